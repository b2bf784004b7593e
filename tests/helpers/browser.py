"""The browser that pages are opened in: by the tests of the report, and by tools/draw_report.py."""

from __future__ import annotations

import shutil

BROWSER = next(
    (found for name in ("chromium", "google-chrome", "chromium-browser") if (found := shutil.which(name))), None
)
"""Chromium or Chrome, None if there is none."""
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000")
