"""Generated word problems with a chain of thought in explicit stages.

Each problem is a chain: a start number and 2 to 4 operations with a one-digit operand, every
value between 1 and 99. The text of the solution restates the chain, plans it, runs it step by
step (sometimes with a wrong step that "Wait" repairs), undoes it as a check, and answers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from traces.tiny import words
from traces.tiny.stages import ANSWER, CHECK, PLAN, RESTATE, STEP, WAIT

LARGEST = 99
ERROR_SHARE = 0.35
HELD_OUT_EVERY = 10
INVERSE = {"+": "-", "-": "+", "*": "/", "/": "*"}

Operation = tuple[str, int]
Span = tuple[str, int, int]


@dataclass(frozen=True)
class Chain:
    """The numbers of a problem: its family, the first value, and the operations on it."""

    family: str
    start: int
    operations: tuple[Operation, ...]

    def values(self) -> list[int]:
        """Return the value before the first and after each operation."""
        values = [self.start]
        for sign, operand in self.operations:
            values.append(apply(values[-1], sign, operand))
        return values

    def held_out(self) -> bool:
        """Tell whether the chain belongs to the held-out split (a hash of its numbers)."""
        key = repr((self.family, self.start, self.operations))
        return zlib.crc32(key.encode()) % HELD_OUT_EVERY == 0


@dataclass(frozen=True)
class Problem:
    """A question, its solution, the final number, and (stage, start, end) spans of the solution."""

    question: str
    solution: str
    answer: int
    stages: list[Span]
    chain: Chain

    @property
    def prompt(self) -> str:
        """The text that the model is given: the question and a newline."""
        return self.question + "\n"

    @property
    def text(self) -> str:
        """The whole text that the model is trained on."""
        return self.prompt + self.solution


def apply(value: int, sign: str, operand: int) -> int:
    """Return ``value sign operand``; a division must be exact."""
    if sign == "+":
        return value + operand
    if sign == "-":
        return value - operand
    if sign == "*":
        return value * operand
    quotient, rest = divmod(value, operand)
    if rest:
        raise ValueError(f"{value} is not divisible by {operand}")
    return quotient


def _pick(rng: np.random.Generator, options: tuple[str, ...] | list[str]) -> str:
    return options[int(rng.integers(len(options)))]


def _integer(rng: np.random.Generator, low: int, high: int) -> int:
    """Draw an integer from low to high, both included."""
    return int(rng.integers(low, high + 1))


def _moves(rng: np.random.Generator, value: int, count: int) -> list[Operation]:
    """Draw ``count`` gains and losses of 1 to 9 that keep the value between 1 and 99."""
    moves: list[Operation] = []
    while len(moves) < count:
        sign, operand = ("+", "-")[int(rng.integers(2))], _integer(rng, 1, 9)
        result = apply(value, sign, operand)
        if 1 <= result <= LARGEST:
            moves.append((sign, operand))
            value = result
    return moves


def _running(rng: np.random.Generator) -> Chain:
    start = _integer(rng, 4, 90)
    return Chain("running", start, tuple(_moves(rng, start, _integer(rng, 2, 4))))


def _compare(rng: np.random.Generator) -> Chain:
    start = _integer(rng, 4, 90)
    return Chain("compare", start, tuple(_moves(rng, start, _integer(rng, 2, 4))))


def _boxes(rng: np.random.Generator) -> Chain:
    boxes, each = _integer(rng, 2, 9), _integer(rng, 2, 9)
    moves = _moves(rng, boxes * each, _integer(rng, 1, 3))
    return Chain("boxes", boxes, (("*", each), *moves))


def _share(rng: np.random.Generator) -> Chain:
    """Draw the moves backwards from a number that divides without a rest."""
    quotient, parts = _integer(rng, 2, 9), _integer(rng, 2, 9)
    back = _moves(rng, quotient * parts, _integer(rng, 1, 2))
    start = quotient * parts
    for sign, operand in back:
        start = apply(start, sign, operand)
    moves = [(INVERSE[sign], operand) for sign, operand in reversed(back)]
    after = _moves(rng, quotient, _integer(rng, 0, 1))
    return Chain("share", start, (*moves, ("/", parts), *after))


FAMILIES: dict[str, Callable[[np.random.Generator], Chain]] = {
    "running": _running,
    "compare": _compare,
    "boxes": _boxes,
    "share": _share,
}


def _event(rng: np.random.Generator, operation: Operation, fill: dict[str, str]) -> str:
    """Write one operation of a story as a sentence."""
    sign, operand = operation
    if sign == "/":
        return _pick(rng, words.SHARES).format(n=operand, **fill)
    act = _pick(rng, words.GAINS if sign == "+" else words.LOSSES)
    friend = _pick(rng, [name for name in words.NAMES if name != fill["name"]])
    return _pick(rng, words.LINKS).format(act=act.format(n=operand, friend=friend), **fill)


def _story(rng: np.random.Generator, chain: Chain, fill: dict[str, str]) -> str:
    """Write the question of the running, boxes and share families."""
    operations = list(chain.operations)
    if chain.family == "boxes":
        each = operations.pop(0)[1]
        opening = _pick(rng, words.BOX_OPENINGS).format(n=chain.start, m=each, **fill)
    else:
        opening = _pick(rng, words.OPENINGS).format(n=chain.start, **fill)
    events = [_event(rng, operation, fill) for operation in operations]
    return " ".join([opening, *events, _pick(rng, words.ENDINGS).format(**fill)])


def _comparison(
    rng: np.random.Generator, chain: Chain, fill: dict[str, str], people: list[str]
) -> str:
    """Write the question of the compare family: each person is compared with the one before."""
    parts = [_pick(rng, words.COMPARE_OPENINGS).format(n=chain.start, **fill)]
    links = zip(people, people[1:], chain.operations, strict=False)
    for person, following, (sign, operand) in links:
        options = words.COMPARE_MORE if sign == "+" else words.COMPARE_LESS
        values = {"name": person, "items": fill["items"]}
        parts.append(_pick(rng, options).format(n=operand, next=following, **values))
    last = {"name": people[-1], "items": fill["items"]}
    parts.append(_pick(rng, words.COMPARE_ENDINGS).format(**last))
    return " ".join(parts)


def _sum(left: int, sign: str, operand: int, result: int) -> str:
    return f"{left} {sign} {operand} = {result}"


def _wrong(rng: np.random.Generator, right: int) -> int:
    """Return a wrong result near the right one, between 1 and 99."""
    options = [right + d for d in (-10, -2, -1, 1, 2, 10) if 1 <= right + d <= LARGEST]
    return options[int(rng.integers(len(options)))]


def write_step(rng: np.random.Generator, index: int, left: int, operation: Operation) -> str:
    """Write the line of one right step."""
    sign, operand = operation
    return _pick(rng, words.STEPS).format(
        i=index,
        deed=words.DEEDS[sign].format(n=operand),
        sum=_sum(left, sign, operand, apply(left, sign, operand)),
    )


def _wait(rng: np.random.Generator, index: int, left: int, operation: Operation) -> str:
    """Write a hedged wrong step and its repair; the hedge comes before the arithmetic."""
    sign, operand = operation
    right = apply(left, sign, operand)
    wrong = _wrong(rng, right)
    hedged = f"Step {index}: {_pick(rng, words.HEDGES)} {_sum(left, sign, operand, wrong)}."
    repair = _pick(rng, words.REPAIRS).format(
        left=f"{left} {sign} {operand}", wrong=wrong, sum=_sum(left, sign, operand, right)
    )
    return f"{hedged}\n{repair}"


def _work(rng: np.random.Generator, chain: Chain) -> list[tuple[str, str]]:
    """Write the steps as (stage, text) pairs; in a share of the texts one step is wrong first."""
    count = len(chain.operations)
    wrong_at = int(rng.integers(count)) if rng.random() < ERROR_SHARE else -1
    parts = []
    for index, (left, operation) in enumerate(zip(chain.values(), chain.operations, strict=False)):
        write, label = (_wait, WAIT) if index == wrong_at else (write_step, STEP)
        parts.append((label, write(rng, index + 1, left, operation)))
    return parts


def _restate(rng: np.random.Generator, chain: Chain, fill: dict[str, str]) -> str:
    style = int(rng.integers(2))
    facts = [words.FACTS[sign][style].format(n=operand) for sign, operand in chain.operations]
    return _pick(rng, words.RESTATES).format(n=chain.start, facts=", ".join(facts), **fill)


def _plan(rng: np.random.Generator, chain: Chain) -> str:
    deeds = [words.DEEDS[sign].format(n=operand) for sign, operand in chain.operations]
    return _pick(rng, words.PLANS).format(n=chain.start, deeds=", ".join(deeds))


def _check(rng: np.random.Generator, chain: Chain) -> str:
    """Undo every operation from the last to the first."""
    values = chain.values()
    sums = [
        _sum(values[index + 1], INVERSE[sign], operand, values[index])
        for index, (sign, operand) in reversed(list(enumerate(chain.operations)))
    ]
    return _pick(rng, words.CHECKS).format(n=values[-1], sums=", ".join(sums))


def _join(parts: list[tuple[str, str]]) -> tuple[str, list[Span]]:
    """Join (stage, text) pairs by newlines; each newline belongs to the stage before it."""
    text, spans = "", []
    for number, (label, part) in enumerate(parts):
        piece = part if number == len(parts) - 1 else part + "\n"
        spans.append((label, len(text), len(text) + len(piece)))
        text += piece
    return text, spans


def _setting(rng: np.random.Generator, people: list[str]) -> dict[str, str]:
    """Draw the place and the things of a story; its hero is the first of ``people``."""
    place = _pick(rng, words.PLACES)
    capital = place[0].upper() + place[1:]
    items = _pick(rng, words.ITEMS)
    return {"name": people[0], "items": items, "place": place, "place_cap": capital}


def write_problem(rng: np.random.Generator, chain: Chain) -> Problem:
    """Write one question and its staged solution around the numbers of ``chain``."""
    count = len(chain.operations) + 1 if chain.family == "compare" else 1
    chosen = rng.choice(len(words.NAMES), size=count, replace=False)
    people = [words.NAMES[int(index)] for index in chosen]
    fill = _setting(rng, people)
    if chain.family == "compare":
        question = _comparison(rng, chain, fill, people)
    else:
        question = _story(rng, chain, fill)
    answer = chain.values()[-1]
    closing = _pick(rng, words.ANSWERS).format(n=answer, **{**fill, "name": people[-1]})
    parts = [(RESTATE, _restate(rng, chain, fill)), (PLAN, _plan(rng, chain))]
    parts += [*_work(rng, chain), (CHECK, _check(rng, chain)), (ANSWER, closing)]
    solution, stages = _join(parts)
    return Problem(question, solution, answer, stages, chain)


def sample_chain(rng: np.random.Generator, held_out: bool = False) -> Chain:
    """Draw a chain of a random family from one side of the split."""
    names = list(FAMILIES)
    while True:
        chain = FAMILIES[names[int(rng.integers(len(names)))]](rng)
        if chain.held_out() == held_out:
            return chain


def sample_problem(rng: np.random.Generator, held_out: bool = False) -> Problem:
    """Draw one problem from the training split, or from the held-out one."""
    return write_problem(rng, sample_chain(rng, held_out))


def problems(seed: int, held_out: bool = False) -> Iterator[Problem]:
    """Yield problems without end; the seed and the split fix the sequence."""
    rng = np.random.default_rng([seed, int(held_out)])
    while True:
        yield sample_problem(rng, held_out)
