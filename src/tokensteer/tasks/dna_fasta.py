"""Sequences with their weights as FASTA, which every tool for DNA reads."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from tokensteer import files
from tokensteer.core.result import Result
from tokensteer.tasks.dna_data import read_letters, spelled


def write_fasta(result: Result, file: Path) -> None:
    """All particles, best first within each population; a header says where a sequence stands in the result, its
    normalised weight in its population, and its reward if there is one."""
    lines: list[str] = []
    for b, (samples, weights) in enumerate(zip(result.samples, result.weights, strict=True)):
        words, order = spelled(samples), weights.argsort(descending=True, stable=True)
        for n in (int(i) for i in order):
            reward = "" if result.reward is None else f" reward={float(result.reward[b, n]):.6g}"
            lines += [f">population{b}_particle{n} weight={float(weights[n]):.6g}{reward}", words[n]]
    files.write_text(file, "\n".join(lines) + "\n")


def read_fasta(file: Path) -> tuple[list[str], Tensor]:
    """Headers without their >, and ids (P, L) of sequences of equal length, which may go over several lines."""
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
