"""Compose the project's configuration the way the command does."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

CONF = Path(__file__).parents[1] / "conf"


def options(group: str) -> list[str]:
    """Return the names of a group's options."""
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def composed(*overrides: str) -> dict[str, Any]:
    """Return the resolved configuration as plain dicts and lists."""
    return deepcopy(_composed(overrides))


@cache
def _composed(overrides: tuple[str, ...]) -> Any:
    """Composing costs a tenth of a second; the same overrides give the same configuration."""
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("config", overrides=list(overrides))
    return OmegaConf.to_container(config, resolve=True)
