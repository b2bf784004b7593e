"""FID of what tokenisers give back, against the training images: how much of an image their codes hold.

python -m benchmarks.cifar_tokenisers FILE ... --device cuda --reference FOLDER
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from tyro.conf import OmitArgPrefixes, Positional

from benchmarks.cifar import say
from benchmarks.cifar_quality import PART, reference_of
from tokensteer.tasks.cifar.data import data, read
from tokensteer.tasks.common.tokenised_images import reconstructed
from tokensteer.tasks.nets import FSQ, load
from tokensteer.tasks.quality.features import INCEPTION_SHA256, load_inception
from tokensteer.tasks.quality.moments import Moments


@dataclass(frozen=True)
class Options:
    """Reconstructions of the 10,000 test images, and the test images themselves as the floor."""

    files: Positional[tuple[Path, ...]]
    reference: Path = Path("out/cifar")
    """Folder of the moments of the training images. They are computed once."""
    inception: Path | None = None
    """Inception's file, if it is not in the data folder."""
    inception_sha256: str = INCEPTION_SHA256
    device: str = "cpu"


@torch.no_grad()
def main(options: OmitArgPrefixes[Options]) -> None:
    device = torch.device(options.device)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    features = load_inception(options.inception, sha256=options.inception_sha256, device=device, dtype=dtype, rows=PART)
    distance = reference_of(data, features, options.reference, device, options.inception_sha256).distance
    test = [part.to(device) for part in read("test").pixels.split(PART)]
    say(f"test images: FID {distance(Moments.of_parts(features(part) for part in test)).value:.2f}")
    for file in options.files:
        net = load(file, options.device)
        assert isinstance(net, FSQ)
        fid = distance(Moments.of_parts(features(reconstructed(net, part)) for part in test)).value
        say(f"{file}: {net.config.num_codes} codes, FID {fid:.2f}")


if __name__ == "__main__":
    tyro.cli(main)
