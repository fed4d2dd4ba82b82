"""Which errors are a user's mistake, and how to say so in one line."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path

from hwmodels.errors import HardwareError
from sim.completion_conf import Conf
from sim.config_groups import GROUPS, PARTS
from sim.near_files import with_near_file
from sim.settings import did_you_mean, shortened, without_middle
from sim.types import ConfigError
from traces.schema import TraceError

_MANY_DIGITS = "integer string conversion"
"""Python's words where a whole number is too long to be written; YAML may give one in base 16."""
_FOLDER_FLAGS = ("--config-dir", "-cd")


def explain(error: Exception, config: str = "config") -> str | None:
    """Return one line for a user's mistake; None for what is a defect of the program.

    ``config`` is the file in ``conf/`` that was composed, whose keys may be meant.
    """
    line = _explain(error, config)
    return None if line is None else with_near_file(line)


def _explain(error: Exception, config: str) -> str | None:
    if isinstance(error, ConfigError | HardwareError | TraceError):
        return _one_line(str(error))
    if isinstance(error, RecursionError) and _is_of_yaml(error):
        return "a configuration file is nested too deep, or a part of it holds itself"
    if isinstance(error, MemoryError):
        return _one_line(f"not enough memory: {error}".rstrip(": "))
    if isinstance(error, ValueError) and _MANY_DIGITS in str(error):
        return f"a whole number has more than {sys.get_int_max_str_digits()} digits"
    hydra_line = _explain_hydra(error, config)
    if hydra_line is not None:
        return hydra_line
    if isinstance(error, OSError) and error.filename is not None:
        return _one_line(f"{error.filename}: {error.strerror}")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the results cannot be written: {error.strerror}"
    if isinstance(error, OSError) and error.errno in (errno.EIO, errno.EINVAL, errno.EISDIR):
        return f"a file cannot be read or written: {error.strerror}"
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


def _is_of_yaml(error: Exception) -> bool:
    """Tell whether an error came up while a YAML file was read, or made into a configuration."""
    import omegaconf
    import yaml

    homes = tuple(str(Path(str(module.__file__)).parent) for module in (yaml, omegaconf))
    depth = 50 if isinstance(error, RecursionError) else 1  # it ends in whatever was called last
    last = traceback.extract_tb(error.__traceback__)[-depth:]
    return any(frame.filename.startswith(homes) for frame in last)


def _explain_file(error: Exception) -> str | None:
    """Explain what is wrong with a YAML file that cannot be read."""
    import yaml

    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return _one_line(f"{mark.name}: line {mark.line + 1}: {error.problem}")
    if isinstance(error, yaml.YAMLError | UnicodeError) or (
        isinstance(error, OSError | ValueError) and _is_of_yaml(error)
    ):
        return _one_line(f"a configuration file cannot be read: {error}")
    return None


def _explain_hydra(error: Exception, config: str) -> str | None:
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _explain_missing(str(error.missing_cfg_file), list(error.options or []))
    if isinstance(error, HydraException):
        if isinstance(error, OverrideParseException):
            return _explain_override(error.override, str(error.message), config)
        folder = re.match(r"Additional config directory '(.*)' not found", str(error))
        if folder:
            here = f"{os.getcwd()}{os.sep}"
            return f"--config-dir {folder.group(1).removeprefix(here)}: no such folder"
        several = re.match(r"Ambiguous value for argument '(.*?)'\n", str(error))
        if several:
            rule = "must be one; a list is written [a,b]; -m, where a command has it, takes each in turn"
            return f"{shortened(several.group(1))}: several values: {rule}"
        cause = error.__cause__
        text = f"{error} {cause}" if isinstance(cause, OmegaConfBaseException) else str(error)
        return _with_near_key(_one_line(text), config)
    if isinstance(error, OmegaConfBaseException):
        return _one_line(str(error))
    return None


def _explain_override(override: str, reason: str, config: str) -> str:
    """Explain a word that is no KEY=VALUE; if it is the name of an option, its group is what is missing."""
    word = shortened(override.strip())
    if "=" in word or word.startswith("~"):
        told = re.sub(
            r"^Error parsing override .*?\n|\s*See https?://.*$", "", reason, flags=re.DOTALL
        )
        return (
            f"{word}: cannot be read: {_one_line(told)}; quote what has blanks, commas or brackets"
        )
    groups = Conf([*Conf().folders, *map(Path, own_folders(sys.argv[1:]))])
    known = {
        name: f"{group}={name}"
        for group in reversed(GROUPS[config])
        for name in groups.options(group)
    }
    near = get_close_matches(word, known, n=1)
    hint = f"; did you mean {known[near[0]]!r}?" if near else ""
    return f"{word}: must be GROUP=OPTION or KEY=VALUE{hint}"


def _explain_missing(name: str, options: list[str]) -> str:
    group, _, option = name.rpartition("/")
    hint = did_you_mean(option, options)
    if name.startswith("trace/") and Path(option).suffix:  # a file of one's own
        group, option = "trace", name.removeprefix("trace/")
        hint = f"; did you mean 'trace.path={option}'?"
    known = f" (known: {', '.join(sorted(options))})" if options and not hint else ""
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
        if part in PARTS
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

    groups = GROUPS[config]
    pattern = rf"(?:{'|'.join(groups)})=\w+|hydra\.searchpath=.+"
    choices = [word for word in sys.argv[1:] if re.fullmatch(pattern, word)]
    try:
        given = with_folders(choices, own_folders(sys.argv[1:]))
        plain = compose_config(config, given, resolve=False)
    except Exception:  # of whatever kind: the mistake to tell of is another one
        plain = compose_config(config, resolve=False)
    return [*groups, *flatten(plain)]


def own_folders(words: list[str]) -> list[str]:
    """Return the folders behind ``--config-dir``."""
    named = [word.partition("=")[2] for word in words if word.startswith(f"{_FOLDER_FLAGS[0]}=")]
    named += [after for flag, after in pairwise(words) if flag in _FOLDER_FLAGS]
    return named


def _one_line(text: str) -> str:
    """Return a text as one line of bounded length."""
    return without_middle(re.sub(r"\s*\n\s*", " ", text.strip()))
