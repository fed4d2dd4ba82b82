"""What the Python API takes beside overrides, turned into overrides: policies of yours, and traces.

A policy that is no name becomes a file in a folder of options, as one written by hand would be, and a trace
in memory becomes a trace file, so that the runs of the API are those of the command line.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sim.api_arguments import as_pythons
from sim.policies.base import Policy
from sim.results import write_text
from sim.types import ConfigError
from traces.schema import Trace

PolicyLike = str | type[Policy] | Mapping[str, Any]
"""An option of the group ``policy``, a class of yours, or what a policy's YAML file would hold."""
TraceLike = str | os.PathLike[str] | Trace
"""A bundled trace's name, a file in any format that is read, or a trace in memory."""

_LRU = "sim.policies.classic.LRU"
_PARAMETER_OF = {
    "policy": "policy or policies",
    "trace": "trace",
    "trace.path": "trace",
    "sweep.dir": "folder",
}
_PLAIN = re.compile(r"[\w./~+@%-]+")


class Inputs:
    """The overrides and folders of options of a call.

    Parameters
    ----------
    folder
        Where files are written for policies and traces that have none; None: one that vanishes with
        this object.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self.overrides: list[str] = []
        self.config_dirs: list[str] = []
        self.main_classes: list[type] = []
        """Classes of the policies that no other process can import: those of a notebook or script."""

    def add_policies(self, policies: Sequence[PolicyLike]) -> list[str]:
        """Choose policies, several for a sweep; return their names."""
        names = [self._option(policy) for policy in policies]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ConfigError(f"policies: {min(twice)} is there twice: names must differ")
        if names:
            self.overrides.append(f"policy={','.join(names)}")
        return names

    def check_once(self, overrides: Sequence[str]) -> None:
        """Raise ConfigError for an override of what a parameter sets: one of them would not count."""
        own = {_key_of(text) for text in self.overrides}
        for text in overrides:
            key = _key_of(text)
            if key in own or key == "sweep.dir":
                raise ConfigError(f"{text}: the parameter {_PARAMETER_OF[key]} is for that")

    def add_folders(self, folders: Sequence[str | os.PathLike[str]]) -> None:
        """Look for options in the user's own folders too."""
        self.config_dirs += [os.fspath(folder) for folder in folders]

    def add_trace(self, trace: TraceLike) -> None:
        """Choose the trace."""
        self.overrides.append(self.trace_override(trace))

    def trace_override(self, trace: TraceLike) -> str:
        """Return the override that chooses a trace; one in memory is written to a file first."""
        from sim.bundled import bundled_trace

        if isinstance(trace, str) and bundled_trace(trace) is not None:
            return f"trace={trace}"
        return f"trace.path={quoted(self.trace_path(trace))}"

    def trace_path(self, trace: TraceLike) -> str:
        """Return the path behind a trace; one in memory is written to a file first."""
        from sim.stats_cli import trace_of

        if isinstance(trace, Trace):
            return str(self._written(trace))
        if not isinstance(trace, str | os.PathLike):
            kind = type(trace).__name__
            raise ConfigError(f"trace = {kind}: must be a name, a path, or what load_trace returns")
        text = os.fspath(trace)
        if isinstance(trace, str):
            return trace_of(text)[1]
        return text

    def folder(self) -> Path:
        """Return the folder for files of this call."""
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            return self._folder
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="greenroom-")
        return Path(self._temporary.name)

    def _written(self, trace: Trace) -> Path:
        """Write a trace in memory, by parts, for its columns may lie in a large file."""
        from traces.store import TraceWriter

        name = re.sub(r"\W+", "_", trace.meta.model) or "trace"
        path = self.folder() / f".tmp-{name}.parquet"
        with TraceWriter(path, trace.meta) as writer:
            for first in range(0, len(trace), writer.row_group_tokens):
                writer.append(trace.take(slice(first, first + writer.row_group_tokens)))
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        # Named by its content, for what was read from a path is kept.
        return path.replace(self.folder() / f"{name}_{digest[:8]}.parquet")

    def _option(self, policy: PolicyLike) -> str:
        """Return the name under which a policy can be chosen."""
        if isinstance(policy, str):
            return policy
        import yaml

        group = self._group(policy)
        name = group["name"]
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"policy.name = {name}: must be letters, digits and underscores")
        if _is_bundled(name):
            raise ConfigError(f"policy.name = {name}: is one of Greenroom's own: give it another")
        options = self.folder() / "own_options"
        (options / "policy").mkdir(parents=True, exist_ok=True)
        write_text(options / "policy" / f"{name}.yaml", yaml.safe_dump(group, sort_keys=False))
        if str(options) not in self.config_dirs:
            self.config_dirs.append(str(options))
        return name

    def _group(self, policy: PolicyLike) -> dict[str, Any]:
        """Return what a policy's file would hold; what is left out is a cache of each layer, of LRU."""
        if isinstance(policy, type):
            policy = {"name": _snake(policy.__name__), role_of(policy): policy}
        if not isinstance(policy, Mapping):
            kind = type(policy).__name__
            rule = "must be a name, a class of yours, or a mapping of parts"
            raise ConfigError(f"policy = {kind}: {rule}")
        cache = policy.get("cache", {"_target_": _LRU})
        group = {"name": "own", "scope": "layer", "cache": cache, **policy}
        return {key: self._plain(value) for key, value in group.items()}

    def _plain(self, value: Any) -> Any:
        """Return a value of a policy's mapping with the names of classes in their place."""
        if isinstance(value, type):
            return {"_target_": self._path_of(value)}
        if isinstance(value, Mapping):
            target = value.get("_target_")
            plain = {key: self._plain(v) for key, v in value.items() if key != "_target_"}
            if isinstance(target, type):
                target = self._path_of(target)
            return plain if target is None else {"_target_": target, **plain}
        found = as_pythons(value)
        return [self._plain(one) for one in found] if isinstance(found, list | tuple) else found

    def _path_of(self, kind: type) -> str:
        """Return the dotted path of a class, by which it is found again."""
        path = f"{kind.__module__}.{kind.__qualname__}"
        if "." in kind.__qualname__:
            rule = "must be defined at the top of a module or cell, not within another thing"
            raise ConfigError(f"policy: class {kind.__qualname__}: {rule}")
        if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is not kind:
            raise ConfigError(f"policy: class {path} is another one by now: run its cell again")
        if kind.__module__ == "__main__":
            self.main_classes.append(kind)
        return path


def _key_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0].strip()


def quoted(text: str) -> str:
    """Return a value as an override can hold it."""
    if _PLAIN.fullmatch(text):
        return text
    from sim.sweeps import grammar

    return grammar.quoted(text)


def role_of(kind: type) -> str:
    """Return the role that a class of yours plays, by its base class."""
    from sim.parts import ROLES

    for role, base in ROLES.items():
        if issubclass(kind, base):
            return role
    bases = ", ".join(dict.fromkeys(base.__name__ for base in ROLES.values()))
    raise ConfigError(f"policy: class {kind.__name__}: must be derived from one of {bases}")


def source_of(kind: type) -> str:
    """Return the code of a class, the empty string where nobody knows it."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def _is_bundled(name: str) -> bool:
    from importlib import resources

    return (resources.files("conf") / "policy" / f"{name}.yaml").is_file()


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
