"""Folders of the user's own options: ``--config-dir``, and ``hydra.searchpath`` as an override.

Options are looked for in what comes with Greenroom, then in the folders in their order, so that an earlier
one hides what a later one has under the same name.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sim.types import ConfigError

SEARCHPATH = "hydra.searchpath"
_FILE = "file://"
_PACKAGE = "pkg://"


def add_config_dirs(parser: argparse.ArgumentParser) -> None:
    """Let a command take ``--config-dir``, once or several times, as ``config_dirs``."""
    parser.add_argument(
        "--config-dir",
        metavar="DIR",
        dest="config_dirs",
        action="append",
        default=[],
        help="folder of your own options; may be given again: of options with one name, the first "
        "folder's counts",
    )


def check_folders(config_dirs: Sequence[str]) -> None:
    """Raise ConfigError for a folder that is not there."""
    for folder in config_dirs:
        if not Path(folder).is_dir():
            raise ConfigError(f"--config-dir {folder}: no such folder")


def with_folders(overrides: Sequence[str], config_dirs: Sequence[str]) -> list[str]:
    """Return overrides that make Hydra look into the folders, then into those of a searchpath override.

    Hydra takes one searchpath, so that the two are put together. Raises ConfigError for a folder that is
    not there.
    """
    check_folders(config_dirs)
    rest = [text for text in overrides if _key(text) != SEARCHPATH]
    named = [place for text in overrides if _key(text) == SEARCHPATH for place in _places(text)]
    places = [*(_place(folder) for folder in config_dirs), *named]
    if not places:
        return rest
    from sim.sweeps.grammar import quoted

    return [*rest, f"{SEARCHPATH}=[{','.join(map(quoted, places))}]"]


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0].strip()


def _places(override: str) -> list[str]:
    """Return what a searchpath override names, folders as absolute ones."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    value: Any = OverridesParser.create().parse_override(override).value()
    if not isinstance(value, list):
        rule = "must be a list of folders, as hydra.searchpath=[my_conf]; or write --config-dir"
        raise ConfigError(f"{override}: {rule}")
    return [_checked(str(place)) for place in value]


def _checked(place: str) -> str:
    if place.startswith(_PACKAGE):
        return place
    folder = place.removeprefix(_FILE)
    if not Path(folder).is_dir():
        raise ConfigError(f"{SEARCHPATH} = {folder}: no such folder")
    return _place(folder)


def _place(folder: str) -> str:
    return f"{_FILE}{Path(folder).absolute()}"
