"""``greenroom completion``: what a shell needs so that Tab completes commands, groups, keys and files."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sim.completion_scripts import INSTALL, SCRIPTS

if TYPE_CHECKING:
    from sim.command_line import Parser

_PROGRAM = "greenroom completion"
_AT_CURSOR = "--at-cursor"
"""How the scripts ask: the shell, then the line (bash), or the words and the one at the cursor."""
_SPECIAL = re.compile(r"([^\w@%+=:,./~-])")
_KEPT_BREAKS = "@$"
_EPILOG = """examples:
  eval "$(greenroom completion bash)"        in ~/.bashrc
  eval "$(greenroom completion zsh)"         in ~/.zshrc
  greenroom completion fish | source         in ~/.config/fish/config.fish

Then Tab completes commands, options and files; policy=lru,sa and stages@policy.stages= to options of a group,
those of --config-dir too; cache.ra and policy.cache. to keys of the chosen options. Without a shell: how to
install it for yours. The script goes to standard output. What commands take is kept in
~/.cache/greenroom/completion.json until their source changes."""


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    if arguments[:1] == [_AT_CURSOR]:
        return _answer(arguments[1:])
    from sim.mistakes import complain

    try:
        shell = make_parser().parse_args(arguments).shell
    except Exception as error:
        return complain(_PROGRAM, error)
    print(SCRIPTS[shell] if shell is not None else _how_to_install(), end="")
    return 0


def make_parser() -> Parser:
    """Return what reads the command's arguments."""
    from sim.command_line import Parser

    parser = Parser(
        prog=_PROGRAM,
        description="Print the script with which a shell completes what Greenroom takes.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "shell", nargs="?", choices=tuple(SCRIPTS), help="default: tell how to install it"
    )
    return parser


def _how_to_install() -> str:
    """Return the line for the user's shell, or for all; comments, should it be evaluated by mistake."""
    shell = Path(os.environ.get("SHELL", "")).name
    return INSTALL.get(shell) or "\n".join(INSTALL.values())


# -- at the cursor -----------------------------------------------------------------------------------


def _answer(asked: Sequence[str]) -> int:
    """Print a candidate a line; nothing where anything is wrong, for this is no place to complain."""
    from sim.completion_words import candidates

    shell, rest = (asked[0], list(asked[1:])) if asked else ("", [])
    try:
        if shell == "bash":
            line, breaks = (*rest, "", "")[:2]
            cut = split(line)
            found = candidates(cut.words[1:], cut.current)
            lines = [_for_bash(each.text, each.is_whole, cut, breaks) for each in found]
        else:
            found = candidates(rest[:-1], rest[-1] if rest else "")
            ends = {True: " " if shell == "zsh" else "", False: ""}
            lines = [f"{each.text}{ends[each.is_whole]}\t{each.about}" for each in found]
    except Exception:
        if os.environ.get("GREENROOM_COMPLETION_DEBUG"):
            raise
        return 1
    sys.stdout.write("".join(f"{line}\n" for line in lines if "\n" not in line))
    return 0


class Cut(NamedTuple):
    """A line up to the cursor: the words before, the one at the cursor, how it is written, its open quote."""

    words: list[str]
    current: str
    raw: str
    quote: str


def split(line: str) -> Cut:
    """Split a line as a shell does, but for what is not finished yet."""
    words: list[str] = []
    plain = raw = quote = ""
    escaped = begun = False
    for char in line:
        if not quote and not escaped and char.isspace():
            if begun:
                words.append(plain)
            plain, raw, begun = "", "", False
            continue
        raw, begun = raw + char, True
        if escaped:
            plain, escaped = plain + char, False
        elif char == "\\" and quote != "'":
            escaped = True
        elif char == quote:
            quote = ""
        elif char in "'\"" and not quote:
            quote = char
        else:
            plain += char
    return Cut(words, plain, raw, quote)


def _for_bash(text: str, is_whole: bool, cut: Cut, breaks: str) -> str:
    """Return what bash puts in the place of what follows the last break within the word at the cursor."""
    more = text[len(cut.current) :]
    if cut.quote:
        inside = cut.raw.rpartition(cut.quote)[2]
        return _after_break(inside, inside + more, breaks) + (cut.quote + " " if is_whole else "")
    whole = cut.raw + _SPECIAL.sub(r"\\\1", more)
    return _after_break(cut.raw, whole, breaks) + (" " if is_whole else "")


def _after_break(typed: str, whole: str, breaks: str) -> str:
    """Return what stands behind the last break: readline keeps an @ or $ that is one."""
    last = max((typed.rfind(char) for char in breaks if char not in " \t\n"), default=-1)
    return whole[last if last >= 0 and typed[last] in _KEPT_BREAKS else last + 1 :]
