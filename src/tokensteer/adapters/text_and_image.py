"""MMaDA and Lumina-DiMOO: LLaDA with image codes behind its text vocabulary (`vocabulary_slice`).

Both are loaded with their own code, and the adapters take the network and its tokenizer. The mask is LLaDA's, 126336,
and there are 8,192 codes.

    MMaDA           <|t2i|> <bos> text <eos> <|soi|> codes <|eoi|>. Codes begin at len(tokenizer). No prompt is the
                    empty text. Images are 32 × 32 codes of a MAGVIT-v2, whose decoder returns pixels in [-1, 1]. From
                    Gen-Verse/MMaDA: models/modeling_mmada.py (t2i_generate) and training/prompting_utils.py.
    Lumina-DiMOO    <system>...</system><user>text</user> <answer> <image> rows of codes, each with an end of line,
                    </image> </answer>. Codes begin at 126356. No prompt is the text <uncondition>. Images are decoded
                    by the VQ-GAN of aMUSEd, 16 pixels to a token. From Alpha-VLLM/Lumina-DiMOO: config.py,
                    inference/inference_t2i.py and generators/image_generation_generator.py.

Both guide by (1 + w)·c - w·u (`powers_from_weight`) and open tokens in MaskGIT's order at the cosine pace. MMaDA's
noise falls faster than linearly there. Tested on small random networks of this layout, not on the published weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from tokensteer.adapters.images import Decoder, ImageModel
from tokensteer.adapters.text import check_known
from tokensteer.adapters.text_to_image import Picture, pixels_per_token, vq_decoder
from tokensteer.adapters.vocabulary_slice import CodeLayout, VocabularySlice
from tokensteer.core.kernels.maskgit import MaskGIT
from tokensteer.core.models.context import Context
from tokensteer.hub import encode

MMADA = CodeLayout(grid=(32, 32), offset=126349, codes=8192, mask=126336, before=(126084,), behind=(126085,))
MMADA_TASK = 126088  # <|t2i|>
LUMINA = CodeLayout(
    grid=(64, 64),
    offset=126356,
    codes=8192,
    mask=126336,
    before=(126354, 126349),
    behind=(126350, 126355),
    row_end=126084,
)
LUMINA_SYSTEM = "Generate an image according to the text prompt."
LUMINA_NOTHING = "<uncondition>"
MMADA_STEPS, LUMINA_STEPS = 18, 64  # of the published samplers
TEMPERATURE = 1.0


def mmada(
    net: nn.Module,
    tokenizer: Any,
    *,
    layout: CodeLayout | None = None,
    task: int = MMADA_TASK,
    text_length: int = 512,
    decoder: Decoder | None = None,
) -> ImageModel:
    """MMaDA, text to image, from its network, called as net(ids), and its tokenizer.

    `layout` is by default the published one, with codes behind the last word of the tokenizer, and `task` the token
    before the prompt. Prompts take up to `text_length` tokens. `decoder` maps ids (P, h, w) to pixels in [0, 1].
    """
    layout = replace(MMADA, offset=len(tokenizer)) if layout is None else layout
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    if None in ends:
        raise ValueError("the tokenizer has no token for the beginning or end of a text: give that of the model")

    def prompt(text: str) -> list[int]:
        check_known(tokenizer, text)
        return [task, ends[0], *encode(tokenizer, text), ends[1]]

    return _image_model(net, lambda ids: net(ids), layout, prompt, "", text_length, MMADA_STEPS, decoder)


def lumina_dimoo(
    net: nn.Module,
    tokenizer: Any,
    vqvae: Any = None,
    *,
    height: int = 1024,
    width: int = 1024,
    layout: CodeLayout = LUMINA,
    text_length: int = 512,
    system: str = LUMINA_SYSTEM,
) -> ImageModel:
    """Lumina-DiMOO, text to image, from its network, called as net(ids, infer=True), its tokenizer and the VQModel that
    decodes its codes.

    Sizes are in pixels, 16 to a token or as the VQModel has it. Prompts take up to `text_length` tokens with the
    `system` prompt, which says what is to be done.
    """
    factor = 16 if vqvae is None else pixels_per_token(vqvae)
    layout = replace(layout, grid=Picture(height, width).grid(factor))

    def prompt(text: str) -> list[int]:
        check_known(tokenizer, text)
        return cast("list[int]", tokenizer(f"<system>{system}</system><user>{text}</user>")["input_ids"])

    decoder = None if vqvae is None else vq_decoder(vqvae)
    return _image_model(
        net, lambda ids: net(ids, infer=True), layout, prompt, LUMINA_NOTHING, text_length, LUMINA_STEPS, decoder
    )


def _image_model(
    net: nn.Module,
    call: Callable[[Tensor], Any],
    layout: CodeLayout,
    prompt: Callable[[str], list[int]],
    nothing: str,
    text_length: int,
    steps: int,
    decoder: Decoder | None,
) -> ImageModel:
    language = cast("Any", net)
    network = VocabularySlice(
        net,
        lambda ids: call(ids).logits,
        layout,
        language.get_input_embeddings(),
        language.get_output_embeddings(),
    )

    def encoded(texts: Sequence[str]) -> Context:
        return (network.prompts([prompt(text) for text in texts], text_length),)

    kernel = MaskGIT(layout.codes, temperature=TEMPERATURE)
    return ImageModel(network, layout.codes, encoded, encoded([nothing]), kernel, steps, decoder)
