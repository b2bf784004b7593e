"""Modules can be imported first, before the public names are loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["tokensteer.app.commands.compare", "tokensteer.tasks.common.task"])
def test_a_module_can_be_the_first_import(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
