"""The flags of ``greenroom sim``: those of Hydra, which itself answers a mistake with all its usage."""

from __future__ import annotations

from pathlib import Path

from sim.command_line import did_you_mean_flag
from sim.settings import did_you_mean
from sim.types import ConfigError

FLAGS = (
    *("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"),
    *("--info", "-i"),
)
FLAGS_WITH_VALUE = (
    *("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn"),
    *("--package", "-p", "--cfg", "-c"),
)
_NOT_OURS = {
    "--shell-completion": "greenroom completion does it, for all commands",
    "-sc": "greenroom completion does it, for all commands",
    "--experimental-rerun": "it would load a pickle, which may run anything; give the overrides again",
}
"""Flags of Hydra that are refused, and why."""
_SHOWN_BY_CFG = ("job", "hydra", "all")
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_OVERRIDE_SIGNS = ("+", "~")


def flags_first(arguments: list[str]) -> list[str]:
    """Move flags ahead of overrides, for Hydra reads overrides from one place only.

    Raises ConfigError for a flag that Hydra does not have, and for a value that a flag cannot have.
    """
    flags: list[str] = []
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            overrides.append(word)
            continue
        flag, equals, value = word.partition("=")
        _check_flag(flag)
        if flag in ("--info", "-i"):
            flags.append(f"--info={_info(value, rest)}")
        elif flag in FLAGS_WITH_VALUE:
            if not equals:
                value = rest.pop(0) if rest and not rest[0].startswith("-") else ""
            _check_value(flag, value, arguments)
            flags += [flag, value]
        elif equals:
            raise ConfigError(f"flag {flag}: takes no value, but has {value!r}")
        else:
            flags.append(word)
    return [*flags, *overrides]


def _check_flag(flag: str) -> None:
    if flag in _NOT_OURS:
        raise ConfigError(f"flag {flag}: {_NOT_OURS[flag]}")
    known = (*FLAGS, *FLAGS_WITH_VALUE)
    if flag not in known:
        raise ConfigError(f"flag {flag}: no such flag{did_you_mean_flag(flag, known)}")


def _check_value(flag: str, value: str, arguments: list[str]) -> None:
    if not value.strip():
        raise ConfigError(f"flag {flag}: must be followed by a value")
    if flag in ("--cfg", "-c") and value not in _SHOWN_BY_CFG:
        raise ConfigError(f"flag {flag} {value}: must be one of {', '.join(_SHOWN_BY_CFG)}")
    if flag in ("--package", "-p"):
        _check_package(value, arguments)


def _info(value: str, rest: list[str]) -> str:
    """Return the kind of information that is asked for, taken from ``rest`` if it stands there."""
    if (
        not value
        and rest
        and "=" not in rest[0]
        and not rest[0].startswith(("-", *_OVERRIDE_SIGNS))
    ):
        value = rest.pop(0)
    if value and value not in _INFO:
        rule = f"must be one of {', '.join(_INFO)}{did_you_mean(value, _INFO)}"
        raise ConfigError(f"flag --info {value}: {rule}")
    return value or "all"


def _check_package(value: str, arguments: list[str]) -> None:
    """Refuse a place that the configuration does not have, for Hydra would end the process."""
    from sim.completion_conf import Conf
    from sim.mistakes import own_folders
    from sim.show_config import plain_at

    folders = [*Conf().folders, *map(Path, own_folders(arguments))]
    plain_at(Conf(folders).compose("config", arguments).values, value)
