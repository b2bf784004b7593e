"""Sequences as FASTA files with their weights, and as pictures."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tokensteer import files
from tokensteer.core.particles.result import Result
from tokensteer.tasks.common.png import write_coloured_png
from tokensteer.tasks.dna.data import LETTERS, read_letters, spelled


def write_fasta(result: Result, file: Path) -> None:
    """All particles, by weight within each population. Headers have the place in the result, the normalised weight,
    and the reward if there is one."""
    lines: list[str] = []
    for b, (samples, weights) in enumerate(zip(result.samples, result.weights, strict=True)):
        words, order = spelled(samples), weights.argsort(descending=True, stable=True)
        for n in (int(i) for i in order):
            reward = "" if result.reward is None else f" reward={float(result.reward[b, n]):.6g}"
            lines += [f">population{b}_particle{n} weight={float(weights[n]):.6g}{reward}", words[n]]
    files.write_text(file, "\n".join(lines) + "\n")


def read_fasta(file: Path) -> tuple[list[str], Tensor]:
    """Headers without >, and ids (P, L) of sequences of equal length, each on one or more lines."""
    headers: list[str] = []
    words: list[str] = []
    for line in file.read_text().split("\n"):
        if line.startswith(">"):
            headers.append(line[1:].strip())
            words.append("")
        elif line.strip():
            if not words:
                raise ValueError(f"{file} is no FASTA file: it does not begin with a header, >")
            words[-1] += line.strip().upper()
    if len({len(word) for word in words}) != 1:
        raise ValueError(f"{file} must hold sequences of one length, got {sorted({len(word) for word in words})}")
    return headers, read_letters(words)


COLOURS = ((46, 125, 50), (21, 101, 192), (239, 157, 0), (198, 40, 40), (255, 255, 255))
"""Of A, C, G, T as in sequencing traces, and of the space between sequences."""


def picture(ids: Tensor, file: str | Path, zoom: int = 4) -> None:
    """Sequences (P, L) below each other, with a coloured rectangle for each letter."""
    gap = torch.full((len(ids), 1, ids.shape[1]), len(LETTERS))
    strips = torch.cat([ids.cpu().unsqueeze(1).expand(-1, 3, -1), gap], 1).flatten(0, 1)[:-1]
    write_coloured_png(file, strips.repeat_interleave(zoom, 0).repeat_interleave(zoom, 1), COLOURS)
