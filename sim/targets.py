"""What a ``_target_`` in a configuration may name: a class that is a part of a policy, nothing else.

The name is looked at before anything is imported: modules of Python itself and those of ours that hold no
policies are refused by name. Whatever else is named is imported, which runs that module's code: it is the
user's own, found where he is or installed. The class is looked at before it is called.
"""

from __future__ import annotations

import pkgutil
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from sim.settings import did_you_mean, shortened
from sim.types import ConfigError

HOME = "sim.policies"
"""Where the policies are that come with Greenroom."""
_OURS = ("conf", "hwmodels", "real", "sim", "traces", "greenroom")
_FORM = "must name a class, as package.module.Class"


def locate_class(target: Any, where: str, kind: type) -> type:
    """Return the class that ``target`` names, which derives from ``kind``.

    Parameters
    ----------
    target
        As it stands in the configuration, of whatever type.
    where
        The setting that errors speak of, without the ``_target_``.

    Raises
    ------
    ConfigError
        For another form than dotted names, a module that may not be named or cannot be imported, a name
        that it lacks, and what is no class of the kind. None of them has been called.
    """
    said = f"{where}._target_ = {shortened(str(target))}"
    if not isinstance(target, str) or not _is_dotted(target):
        raise ConfigError(f"{said}: {_FORM}")
    module_name, _, name = target.rpartition(".")
    _check_module(module_name, name, said)
    module = _imported(module_name, name, said)
    found = getattr(module, name, None)
    if found is None:
        raise ConfigError(f"{said}: no such class{did_you_mean(name, _classes(module, kind))}")
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"{said}: must be a {kind.__name__}{_near(module, name, kind)}")
    return found


def _is_dotted(target: str) -> bool:
    names = target.split(".")
    return len(names) > 1 and all(name.isidentifier() for name in names)


def may_hold_policies(module: str) -> bool:
    """Tell whether a module may be imported because a configuration names it: by its name alone."""
    top = module.partition(".")[0]
    if top in _OURS:
        return module == HOME or module.startswith(f"{HOME}.")
    return not _is_pythons(top)


def _is_pythons(top: str) -> bool:
    return top in sys.stdlib_module_names or top in sys.builtin_module_names


def _check_module(module: str, name: str, said: str) -> None:
    """Refuse a module that can hold no policy of a user, unseen: importing some of them does things."""
    top = module.partition(".")[0]
    if _is_pythons(top):
        raise ConfigError(
            f"{said}: {top} is a module of Python itself: must be a class of {HOME}, or of a module of "
            f"your own{_near_home(name)}"
        )
    if not may_hold_policies(module):
        raise ConfigError(
            f"{said}: must be a class of {HOME}, or of a module of your own{_near_home(name)}"
        )


def _imported(module: str, name: str, said: str) -> ModuleType:
    try:
        return import_module(module)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        told = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        hint = ""
        if isinstance(error, ModuleNotFoundError) and module.startswith(f"{HOME}."):
            hint = _near_home(name) or did_you_mean(module, _home_modules())
        raise ConfigError(f"{said}: cannot be imported: {told}{hint}") from error


def _classes(module: ModuleType, kind: type) -> list[str]:
    """Return the names of a module's classes of a kind."""
    return [
        name
        for name, found in vars(module).items()
        if isinstance(found, type) and issubclass(found, kind) and found is not kind
    ]


def _near(module: ModuleType, name: str, kind: type) -> str:
    """Return a hint with the nearest class of the kind, if there is another one of nearly that name."""
    return did_you_mean(name, [other for other in _classes(module, kind) if other != name])


def _home_modules() -> list[str]:
    package = import_module(HOME)
    return [f"{HOME}.{found.name}" for found in pkgutil.iter_modules(package.__path__)]


def _near_home(name: str) -> str:
    """Return a hint with the class of ours that is called so, or nearly."""
    from sim.policies.base import Policy

    places = {
        found: f"{module}.{found}"
        for module in _home_modules()
        for found in _classes(import_module(module), Policy)
        if getattr(sys.modules[module], found).__module__ == module
    }
    if name in places:
        return f"; did you mean {places[name]!r}?"
    hint = did_you_mean(name, places)
    near = hint.removeprefix("; did you mean '").removesuffix("'?")
    return f"; did you mean {places[near]!r}?" if hint else ""
