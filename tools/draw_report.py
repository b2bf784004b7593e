"""Draw docs/images/report.png, the picture of the README: the top of the demo's report in Chromium.

    tokensteer demo --force
    python tools/draw_report.py

Chromium or Chrome must be on the PATH. The browser tests of the report find it in the same way.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tokensteer.app.report import write

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "helpers"))
from browser import BROWSER, FLAGS  # noqa: E402

FILE = ROOT / "docs" / "images" / "report.png"
WIDTH, HEIGHT = 1280, 1265  # the question, and the first table
MOST = 300_000  # bytes


def draw(folder: Path) -> None:
    """Write the report of a run folder anew, and its picture."""
    if BROWSER is None:
        raise SystemExit("there is no Chromium or Chrome on the PATH: install one")
    page = write(folder)
    with TemporaryDirectory() as profile:
        size = (f"--window-size={WIDTH},{HEIGHT}", "--hide-scrollbars", f"--user-data-dir={profile}")
        command = (BROWSER, *FLAGS, *size, f"--screenshot={FILE}", page.resolve().as_uri())
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    if FILE.stat().st_size > MOST:
        raise SystemExit(f"{FILE} has {FILE.stat().st_size:,} bytes, more than {MOST:,}: lower HEIGHT")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("out/demo"), help="a run folder")
    draw(parser.parse_args().folder)
