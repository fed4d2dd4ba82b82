"""``--cfg job`` of the commands that compose a configuration: shows it, and runs nothing."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from sim.settings import did_you_mean
from sim.types import ConfigError

SHOWN = ("job", "hydra", "all")


def add_show(parser: argparse.ArgumentParser) -> None:
    """Let a command take ``--cfg``, ``--package`` and ``--resolve``, as ``greenroom sim`` does."""
    add = parser.add_argument
    add("--cfg", "-c", choices=("job",), help="show the settings with their values; run nothing")
    add(
        "--package", "-p", metavar="KEY", help="with --cfg: only what stands there, as policy.cache"
    )
    add(
        "--resolve",
        action="store_true",
        help="with --cfg: replace interpolations by what they mean",
    )


def show(name: str, overrides: Sequence[str], options: argparse.Namespace) -> int:
    """Print what the overrides make of ``conf/NAME.yaml``, as YAML; return the exit code."""
    from omegaconf import OmegaConf

    from sim.composing import compose_config
    from sim.own_options import with_folders

    given = with_folders(overrides, getattr(options, "config_dirs", ()))
    plain = compose_config(name, given, resolve=options.resolve)
    shown, lead = plain, ""
    if options.package is not None:
        shown, lead = plain_at(plain, options.package), f"# @package {options.package}\n"
    print(f"{lead}{OmegaConf.to_yaml(OmegaConf.create(shown))}", end="")
    return 0


def plain_at(plain: Mapping[str, Any], package: str) -> dict[str, Any]:
    """Return the settings below a dotted key; ConfigError with the nearest if there are none."""
    found: Any = plain
    for part in package.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            hint = did_you_mean(package, list(packages(plain)))
            raise ConfigError(f"--package {package}: no such group of settings{hint}")
    return dict(found)


def packages(plain: Mapping[str, Any], lead: str = "") -> list[str]:
    """Return the dotted keys of all that holds further settings."""
    names = []
    for key, value in plain.items():
        if isinstance(value, Mapping):
            names += [f"{lead}{key}", *packages(value, f"{lead}{key}.")]
    return names


def check_show(options: argparse.Namespace) -> None:
    """Refuse what means nothing without ``--cfg``."""
    for name in ("package", "resolve"):
        if getattr(options, name) and options.cfg is None:
            raise ConfigError(f"--{name}: only with --cfg job")
