"""Which traces come with the project, and what another one is called."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml


def bundled_trace(name: str) -> str | None:
    """Return the path behind an option of the group ``trace``; None if there is no such option."""
    file = resources.files("conf") / "trace" / f"{name}.yaml"
    if not name.isidentifier() or not file.is_file():
        return None
    return str(yaml.safe_load(file.read_text(encoding="utf-8"))["path"])


def bundled_names() -> list[str]:
    """Return the options of the group ``trace``."""
    folder = resources.files("conf") / "trace"
    return sorted(file.name[:-5] for file in folder.iterdir() if file.name.endswith(".yaml"))


def trace_name(trace: Mapping[str, Any]) -> str:
    """Return what results call the trace of a configuration.

    Where only ``trace.path`` was changed, ``trace.name`` is still that of a bundled one: then the file's
    name counts.
    """
    name, path = str(trace["name"]), str(trace["path"])
    own = bundled_trace(name)
    return name if own is None or own == path else Path(path).stem
