"""How many problems a model solves: the bundled model's own, held out, greedily and sampled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from real.remoe_subject import GateSubject

TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
"""Of each way of decoding; the bundled trace was recorded at that of ``sampled``."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Problems solved with one way of decoding, and each one's outcome, for comparing pairwise."""

    right: tuple[bool, ...]

    @property
    def accuracy(self) -> float:
        """Share of problems with the right final number."""
        return sum(self.right) / len(self.right)

    @property
    def standard_error(self) -> float:
        """Of the accuracy: sqrt(p (1 - p) / n)."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / len(self.right))


def difference(after: TaskResult, before: TaskResult) -> tuple[float, float]:
    """Return how much more is solved, and its standard error, from the same problems pair by pair."""
    changes = [int(a) - int(b) for a, b in zip(after.right, before.right, strict=True)]
    count = len(changes)
    mean = sum(changes) / count
    variance = sum((change - mean) ** 2 for change in changes) / max(1, count - 1)
    return mean, math.sqrt(variance / count)


def solve_tasks(
    subject: GateSubject,
    num_problems: int,
    decodings: Sequence[str] = tuple(TEMPERATURES),
    tell: Callable[[str], None] | None = None,
) -> dict[str, TaskResult]:
    """Return by way of decoding what the model solves as it is; nothing for a model without problems.

    ``decodings`` are of ``TEMPERATURES``.
    """
    if not subject.is_tiny:
        return {}
    from traces.tiny.data import problems
    from traces.tiny.evaluate import EVAL_SEED, solve
    from traces.tiny.scoring import final_number

    texts = list(islice(problems(EVAL_SEED, held_out=True), num_problems))
    found = {}
    for name in decodings:
        solutions = solve(subject.model, subject.tokenizer, texts, TEMPERATURES[name])
        right = [final_number(s) == p.answer for p, s in zip(texts, solutions, strict=True)]
        found[name] = TaskResult(tuple(right))
        if tell is not None:
            tell(f"{name}: {sum(right)} of {num_problems} problems solved")
    return found
