"""Finds the public routing traces, which are not part of the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_SIBLING = Path(__file__).resolve().parents[2] / "shared" / "data" / "routing"


def routing_file(name: str) -> Path:
    """Return the path of a public routing trace; skip the test where it is absent."""
    path = Path(os.environ.get("GREENROOM_PUBLIC_DATA", _SIBLING)) / name
    if not path.is_file():
        pytest.skip(f"public routing trace {name} is absent: set GREENROOM_PUBLIC_DATA")
    return path
