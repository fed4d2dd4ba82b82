"""Which errors are a user's mistake, and how to say so in one line."""

from __future__ import annotations

import errno
import re
import sys
import traceback
from itertools import pairwise
from pathlib import Path

from hwmodels.errors import HardwareError
from sim.settings import did_you_mean
from sim.types import ConfigError
from traces.schema import TraceError

_PARTS = ("machine/gpu", "machine/cpu", "machine/link", "machine/storage")
_RUN = ("trace", "model", "machine", *_PARTS, "engine", "policy")
_GROUPS = {
    "config": _RUN,
    "replay": _RUN,
    "validate": (),
    "remoe": (),
    "predict": ("model", "machine", *_PARTS, "engine", "placement", "usage"),
}
"""Groups by the file in ``conf/`` that has them."""
_FOLDER_FLAGS = ("--config-dir", "-cd")


def explain(error: Exception, config: str = "config") -> str | None:
    """Return one line for a user's mistake; None for what is a defect of the program.

    ``config`` is the file in ``conf/`` that was composed, whose keys may be meant.
    """
    if isinstance(error, ConfigError | HardwareError | TraceError):
        return _one_line(str(error))
    if isinstance(error, MemoryError):
        return _one_line(f"not enough memory: {error}".rstrip(": "))
    hydra_line = _explain_hydra(error, config)
    if hydra_line is not None:
        return hydra_line
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the results cannot be written: {error.strerror}"
    if _raised_by_hydra(error):
        return _one_line(str(error))
    return _explain_file(error)


def complain(program: str, error: Exception, config: str = "config") -> int:
    """Tell stderr of a user's mistake and return the exit code; raise ``error`` if it is a defect."""
    message = explain(error, config)
    if message is None:
        raise error
    print(f"{program}: error: {message}", file=sys.stderr)
    return 2


def _raised_by_hydra(error: Exception) -> bool:
    """Tell whether Hydra itself refused something, with an error of no kind of its own."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "hydra" in Path(frames[-1].filename).parts


def _explain_file(error: Exception) -> str | None:
    """Explain what is wrong with a YAML file that cannot be read."""
    import yaml

    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return _one_line(f"{mark.name}: line {mark.line + 1}: {error.problem}")
    if isinstance(error, yaml.YAMLError | UnicodeError):
        return _one_line(f"a configuration file cannot be read: {error}")
    return None


def _explain_hydra(error: Exception, config: str) -> str | None:
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _explain_missing(str(error.missing_cfg_file), list(error.options or []))
    if isinstance(error, HydraException):
        cause = error.__cause__
        text = f"{error} {cause}" if isinstance(cause, OmegaConfBaseException) else str(error)
        return _with_near_key(_one_line(text), config)
    if isinstance(error, OmegaConfBaseException):
        return _one_line(str(error))
    return None


def _explain_missing(name: str, options: list[str]) -> str:
    group, _, option = name.rpartition("/")
    hint = did_you_mean(option, options)
    known = f" (known: {', '.join(sorted(options))})" if options else ""
    return f"{group or 'config'} = {option}: no such option{hint}{known}"


def _with_near_key(text: str, config: str) -> str:
    """Add the nearest key of the main configuration to OmegaConf's complaint about an unknown one."""
    found = re.search(r"Key '([^']+)' is not in struct.*?full_key: (\S+)", text)
    if not found:
        return text
    full_key = found.group(2)
    part = f"machine/{full_key}"
    hint = (
        f"; did you mean {part!r}?"
        if part in _PARTS
        else did_you_mean(full_key, _known_keys(config))
    )
    return f"{full_key}: unknown key{hint} (to add a new one write +{full_key}=...)"


def _known_keys(config: str) -> list[str]:
    """Return the groups, and the dotted keys of the configuration with the groups that were chosen.

    Choices may be of folders of the user's own; if they cannot be composed the default ones count.
    """
    from sim.composing import compose_config
    from sim.own_options import with_folders
    from sim.results import flatten

    groups = _GROUPS[config]
    pattern = rf"(?:{'|'.join(groups)})=\w+|hydra\.searchpath=.+"
    choices = [word for word in sys.argv[1:] if re.fullmatch(pattern, word)]
    try:
        given = with_folders(choices, _own_folders(sys.argv[1:]))
        plain = compose_config(config, given, resolve=False)
    except Exception:  # of whatever kind: the mistake to tell of is another one
        plain = compose_config(config, resolve=False)
    return [*groups, *flatten(plain)]


def _own_folders(words: list[str]) -> list[str]:
    """Return the folders behind ``--config-dir``."""
    named = [word.partition("=")[2] for word in words if word.startswith(f"{_FOLDER_FLAGS[0]}=")]
    named += [after for flag, after in pairwise(words) if flag in _FOLDER_FLAGS]
    return named


def _one_line(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text.strip())
