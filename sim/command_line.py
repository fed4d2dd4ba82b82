"""How every command reads its arguments, so that each mistake is one line with the nearest good word."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from math import isfinite
from typing import Any, NoReturn

from sim.settings import did_you_mean, shortened
from sim.types import ConfigError

_LARGEST_INT = 2**63 - 1
_KINDS = {int: "a whole number", float: "a number"}
_NUMBER = re.compile(r"-\.?\d")


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are ConfigError, in the words of the rest of the project.

    Beyond argparse it refuses empty values, numbers that are not finite, and whole numbers beyond 64 bits.
    """

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**settings)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; raise ConfigError for the first mistake."""
        words = self._checked(args)
        options, rest = self.parse_known_args(words, namespace)
        return self._whole(options, rest)

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse with options between positional arguments; raise ConfigError for the first mistake."""
        words = self._checked(args)
        options, rest = self.parse_known_intermixed_args(words, namespace)
        return self._whole(options, rest)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with what argparse complains of."""
        raise ConfigError(_in_our_words(message))

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write the help; argparse would pass over it that a disk is full."""
        if message:
            (sys.stderr if file is None else file).write(message)

    def _checked(self, args: Sequence[str] | None) -> list[str]:
        """Refuse the first option that there is not, before one that is missing is complained of."""
        words = list(sys.argv[1:] if args is None else args)
        ends = words.index("--") if "--" in words else len(words)
        if not {"-h", "--help"} & set(words[:ends]):
            for word in words[:ends]:
                if _looks_like_option(word) and not self._knows(word):
                    flag = word.partition("=")[0]
                    hint = did_you_mean_flag(flag, list(self._option_string_actions))
                    self.error(f"{flag}: no such option{hint}")
        return words

    def _knows(self, word: str) -> bool:
        flag = word.partition("=")[0]
        known = self._option_string_actions
        if flag in known or (not flag.startswith("--") and flag[:2] in known):
            return True
        return self.allow_abbrev and any(name.startswith(flag) for name in known if flag[1] == "-")

    def _whole(self, options: argparse.Namespace, rest: Sequence[str]) -> argparse.Namespace:
        if rest:
            self.error(f"{shortened(rest[0])}: is one argument too many")
        return options

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Return a value of the kind that the option wants."""
        name = _name_of(action)
        if not arg_string.strip():
            raise argparse.ArgumentError(None, f"{name}: must not be empty")
        kind = action.type
        if kind not in (int, float):
            return super()._get_value(action, arg_string)
        rule = f"{name} = {shortened(arg_string)}: must be {_KINDS[kind]}"
        try:
            value = int(arg_string) if kind is int else float(arg_string)
        except ValueError:
            raise argparse.ArgumentError(None, rule) from None
        if not isfinite(value) or (kind is int and abs(value) > _LARGEST_INT):
            raise argparse.ArgumentError(None, f"{rule} of a sensible size")
        return value

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse what is none of the choices, with the nearest of them."""
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        hint = did_you_mean(str(value), known)
        rule = f"must be {_listed(known)}{hint}"
        raise argparse.ArgumentError(None, f"{_name_of(action)} = {shortened(str(value))}: {rule}")


def did_you_mean_flag(flag: str, known: Sequence[str]) -> str:
    """Return a hint with the nearest flag; dashes count for nothing, for all flags have them."""
    bare = {name.lstrip("-"): name for name in known}
    near = get_close_matches(flag.lstrip("-").replace("_", "-"), bare, n=1)
    return f"; did you mean {bare[near[0]]!r}?" if near else ""


def _name_of(action: argparse.Action) -> str:
    if action.option_strings:
        return max(action.option_strings, key=len)
    return str(action.metavar or action.dest)


def _looks_like_option(word: str) -> bool:
    """Tell whether argparse takes a word for an option: not a number, nor a text with blanks."""
    return len(word) > 1 and word[0] == "-" and " " not in word and not _NUMBER.match(word)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


_REWORDED = (
    (r"argument (\S+): expected .*argument.*", "{0}: must be followed by a value"),
    (r"the following arguments are required: (.*)", "{0}: missing, must be given"),
    (r"argument (\S+): ignored explicit argument (.*)", "{0}: takes no value, but has {1}"),
    (r"ambiguous option: (\S+) could match (.*)", "{0}: may mean {1}"),
    (r"argument (\S+): not allowed with argument (\S+)", "{0}: only without {1}"),
    (r"argument (\S+): (.*)", "{0}: {1}"),
)  # fmt: skip


def _in_our_words(message: str) -> str:
    """Return argparse's complaint in the form of the project's others."""
    for pattern, words in _REWORDED:
        found = re.fullmatch(pattern, message, re.DOTALL)
        if found:
            first, *others = found.groups()
            return words.format(first.rpartition("/")[2] or first, *others)
    return message
