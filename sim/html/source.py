"""What a folder of results holds: rows, failed points, configuration and the command that made it."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sim.labels import Row, how
from sim.results import ABOUT, CONFIG, ERROR, SUMMARY, TABLE, num_waiting, read_json
from sim.sound_rows import sound_rows
from sim.types import ConfigError

RUN, SWEEP, ROWS = "run", "sweep", "table"
"""Kinds of sources: a run's folder, a sweep's, and a table of rows alone."""
_HYDRA_SWEEP = "multirun.yaml"
_HYDRA_RUN = ".hydra"


@dataclass(frozen=True, slots=True)
class Failed:
    """A point of a sweep without a result: its number, what set it apart, and why."""

    number: str
    overrides: str
    error: str


@dataclass(frozen=True, slots=True)
class Source:
    """Results as they lie on disk.

    Attributes
    ----------
    path, kind
        The folder or file, and which of ``RUN``, ``SWEEP`` and ``ROWS`` it is.
    rows
        Summary rows, nested.
    failed
        Points without a result.
    command
        What made it, to be typed again; None where that is not known.
    texts
        Titles and texts of configurations.
    digests
        Files that the report was made of, to be hashed.
    num_waiting
        Points of a sweep that have come to nothing yet.
    """

    path: Path
    kind: str
    rows: list[Row]
    failed: list[Failed] = field(default_factory=list)
    command: str | None = None
    texts: list[tuple[str, str]] = field(default_factory=list)
    digests: list[Path] = field(default_factory=list)
    num_waiting: int = 0

    @property
    def folder(self) -> Path | None:
        """Where the tables of a run lie; None where the source is no run."""
        return self.path if self.kind == RUN else None


def open_source(path: Path) -> Source:
    """Read what a run's folder, a sweep's folder or a table of results holds.

    Raises ConfigError where there is nothing, or it is damaged.
    """
    if path.name == SUMMARY and path.is_file():
        path = path.parent
    if path.is_file():
        return Source(path, ROWS, sound_rows(path), digests=[path])
    return _run(path) if (path / SUMMARY).exists() else _sweep(path)


def _run(path: Path) -> Source:
    row = sound_rows(path)[0]
    name = "replay" if how(row) == "measured" else "sim"
    given = _words(_yaml(path / _HYDRA_RUN / "overrides.yaml"))
    given = _overrides(row) if given is None else given
    command = _command(name, [*_own_folders(path), *given])
    texts = [("Resolved configuration", text) for text in _text(path / CONFIG)]
    return Source(path, RUN, [row], command=command, texts=texts, digests=[path / SUMMARY])


def _overrides(row: Row) -> list[str]:
    return [f"{key}={setting}" for key, setting in row.get("overrides", {}).items()]


def _own_folders(path: Path) -> list[str]:
    """Return the flags that named configuration folders of the user's own, as Hydra noted them."""
    noted = _yaml(path / _HYDRA_RUN / "hydra.yaml")
    try:
        sources = noted["hydra"]["runtime"]["config_sources"]
        found = [one["path"] for one in sources if one["provider"] == "command-line"]
    except (KeyError, TypeError):
        return []
    return _folder_flags(found)


def _folder_flags(noted: Any) -> list[str]:
    """Return the flags that name such folders, given as a list of them or as something else: then none."""
    return [word for folder in _words(noted) or [] for word in ("--config-dir", folder)]


def _sweep(path: Path) -> Source:
    failed = _failed(path)
    try:
        rows = sound_rows(path)
    except ConfigError as error:
        if not failed or (path / TABLE).exists():
            raise
        first = failed[0]
        told = f"point {first.number} ({first.overrides}): {first.error}"
        raise ConfigError(f"{path}: all {len(failed)} points failed, {told}") from error
    texts, command = _asked(path)
    table = path / TABLE
    digests = [table] if table.exists() else []
    waiting = num_waiting(path, len(rows), len(failed))
    return Source(path, SWEEP, rows, failed, command, texts, digests, waiting)


def _failed(path: Path) -> list[Failed]:
    """Return the failed points of a sweep, by number."""
    found = []
    for file in path.glob(f"*/{ERROR}"):
        told = read_json(file)
        overrides = told.get("overrides") or []
        words = shlex.join(map(str, overrides)) if isinstance(overrides, list) else str(overrides)
        found.append(Failed(file.parent.name, words, str(told.get("error", "unknown"))))
    return sorted(found, key=lambda one: (len(one.number), one.number))


def _asked(path: Path) -> tuple[list[tuple[str, str]], str | None]:
    """Return what a sweep was asked for: texts with titles, and the command."""
    texts: list[tuple[str, str]] = []
    command = None
    if (path / ABOUT).exists():
        asked = read_json(path / ABOUT)
        folders, arguments = _folder_flags(asked.get("config_dirs")), _words(asked.get("arguments"))
        command = None if arguments is None else _command("sweep", [*folders, *arguments])
        texts.append(("What the sweep was asked for", json.dumps(asked, indent=1, sort_keys=True)))
        title = "Resolved configuration of its first point, and what the others vary"
        return [*texts, *((title, text) for text in _text(path / CONFIG))], command
    with suppress(KeyError, TypeError):
        words = _words(_yaml(path / _HYDRA_SWEEP)["hydra"]["overrides"]["task"])
        command = None if words is None else _command("sim", ["-m", *words])
    configs = sorted(path.glob(f"*/{CONFIG}"), key=lambda file: (len(file.parent.name), file))
    for file in configs[:1]:
        title = (
            f"Resolved configuration of point {file.parent.name}; others differ in what was varied"
        )
        texts += [(title, text) for text in _text(file)]
    return texts, command


def _words(noted: Any) -> list[str] | None:
    """Return a list of words; None for anything else, which may stand for more than can be written."""
    if not isinstance(noted, list) or not all(isinstance(word, str) for word in noted):
        return None
    return noted


def _command(name: str, arguments: list[str]) -> str:
    return shlex.join(["greenroom", name, *arguments])


def _text(file: Path) -> list[str]:
    try:
        return [file.read_text(encoding="utf-8", errors="replace")]
    except FileNotFoundError:
        return []


def _yaml(file: Path) -> Any:
    """Return what a YAML file of Hydra's holds; None where it is missing or damaged: it is a help only."""
    import yaml

    for text in _text(file):
        try:
            return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except (yaml.YAMLError, ValueError, RecursionError):
            return None
    return None
