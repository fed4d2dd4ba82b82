"""What is looked at before Hydra acts on it: the files it reads, and the classes it is to make itself.

Hydra makes what a configuration names under ``hydra.callbacks``, ``hydra.launcher`` and ``hydra.sweeper``,
and logging what ``hydra.job_logging`` and ``hydra.hydra_logging`` name. Any folder of options may set them,
so that only classes of Hydra, its plugins and logging are let through; whatever else is named is refused
before it is imported. What a policy's ``_target_`` may name: :mod:`sim.targets`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from sim.settings import shortened
from sim.types import ConfigError
from sim.yaml_aliases import check_aliases

_PLUGINS = ("callbacks", "launcher", "sweeper")
_LOGGING = ("job_logging", "hydra_logging")
_MADE_BY_LOGGING = ("class", "()", "_target_")
"""Keys whose value is a class to be made; Hydra knows the last one alone."""
_HOMES = ("hydra._internal.core_plugins.", "hydra.experimental.callbacks", "hydra_plugins.")
"""Modules whose plugins and callbacks may be made: no other names in them, which reach everywhere."""
_OTHERS = re.compile(r"sim\.progress\.SweepProgress|optuna\.samplers\.\w+Sampler")
"""The bar that ``conf/config.yaml`` asks for, and what Hydra's Optuna sweeper takes."""
_HANDLERS = re.compile(
    r"logging\.((Stream|File|Null)Handler|Formatter)"
    r"|logging\.handlers\.(Rotating|TimedRotating|Watched)FileHandler"
    r"|colorlog\.ColoredFormatter"
)
_OUTSIDE = re.compile(r"ext://(?!sys\.std(out|err)$)")
"""What logging takes from any module, but for the two streams."""


@cache
def guard_hydra() -> None:
    """Have Hydra, in this process, refuse what must not be read or made, whoever calls it and however.

    It then raises ConfigError, from ``compose`` as from a command's own run.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.plugins import Plugins

    Plugins.instance()  # fills the registry, with classes that can be imported from nowhere
    files: Any = SourcesRegistry.instance().resolve("file")
    read, load = files.load_config, ConfigLoaderImpl.load_configuration

    def load_config(self: Any, config_path: str) -> Any:
        check_aliases(Path(self.path) / self._normalize_file_name(config_path))
        return read(self, config_path)

    def load_configuration(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = load(self, *args, **kwargs)
        check_hydra(config.hydra)
        return config

    files.load_config = load_config
    ConfigLoaderImpl.load_configuration = load_configuration  # type: ignore[method-assign]


def check_hydra(settings: Any) -> None:
    """Raise ConfigError for a class under ``hydra``'s own settings that is none of Hydra or of logging."""
    for groups, is_good in ((_PLUGINS, _is_plugin), (_LOGGING, _is_of_logging)):
        for group in groups:
            for where, key, value in _leaves(settings, group, f"hydra.{group}", {}):
                if not is_good(key, str(value)):
                    raise ConfigError(
                        f"{where} = {shortened(str(value))}: must be a class of Hydra, its plugins or "
                        "logging; a configuration may name classes of your own as parts of policies only"
                    )


def _leaves(
    node: Any, key: Any, where: str, seen: dict[int, Any]
) -> Iterator[tuple[str, str, Any]]:
    """Yield what lies below a key, interpolations resolved: the place, the last key, the value.

    Of an interpolation that does not stand for anything yet the value is its text.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        value: Any = None if OmegaConf.is_missing(node, key) else node[key]
    except OmegaConfBaseException:
        value = "${...}"
    if not OmegaConf.is_config(value):
        yield where, str(key), value
    elif id(value) not in seen:  # interpolations may lead back
        seen[id(value)] = value  # kept, so that no other one takes its id
        for name in value if OmegaConf.is_dict(value) else range(len(value)):
            yield from _leaves(value, name, f"{where}.{name}", seen)


def _is_plugin(key: str, value: str) -> bool:
    from hydra.core.plugins import Plugin
    from hydra.experimental.callback import Callback

    if key != "_target_" or _OTHERS.fullmatch(value):
        return True
    module, _, name = value.rpartition(".")
    if not module.startswith(_HOMES):
        return False
    try:
        found = getattr(import_module(module), name, None)
    except ImportError:
        return False
    return isinstance(found, type) and issubclass(found, Plugin | Callback)


def _is_of_logging(key: str, value: str) -> bool:
    if key in _MADE_BY_LOGGING:
        return bool(_HANDLERS.fullmatch(value))
    return not _OUTSIDE.match(value)
