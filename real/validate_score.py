"""How good predictions are: errors of time, rank agreement, errors by resource, and the verdict.

The bars are those of the project and stand here alone, so that no setting widens them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import hypot
from statistics import fmean, median

from real.validate_parity import Parity
from real.validate_predict import RESOURCES, Compared

MEDIAN_BAR = 0.10
"""The median absolute error of TPOT must not be larger."""
WORST_BAR = 0.25
"""Nor any absolute error of TPOT than this."""
TAU_BAR = 0.9
"""Kendall's tau over policies that measurably differ must not be smaller."""
NOISES = 2.0
"""Two policies measurably differ if they do by more than so many combined standard errors."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Absolute relative errors of a group of runs; ``worst_run`` is whose is the largest."""

    name: str
    num_runs: int
    median: float
    worst: float
    worst_run: Compared


@dataclass(frozen=True, slots=True)
class Ranking:
    """Pairs of policies of one block and ratio, by whether prediction and measurement order them alike.

    ``num_close`` pairs differ by no more than the noise and count as nothing; ``num_tied`` are predicted
    to take the same time although they measurably differ.
    """

    num_agreed: int = 0
    num_crossed: int = 0
    num_tied: int = 0
    num_close: int = 0

    def __add__(self, other: Ranking) -> Ranking:
        return Ranking(
            self.num_agreed + other.num_agreed,
            self.num_crossed + other.num_crossed,
            self.num_tied + other.num_tied,
            self.num_close + other.num_close,
        )

    @property
    def num_pairs(self) -> int:
        """Pairs that measurably differ."""
        return self.num_agreed + self.num_crossed + self.num_tied

    @property
    def tau(self) -> float | None:
        """Kendall's tau: agreed less crossed pairs over all that differ; None without any."""
        if not self.num_pairs:
            return None
        return (self.num_agreed - self.num_crossed) / self.num_pairs


@dataclass(frozen=True, slots=True)
class ResourceErrors:
    """One resource's time a decode step over the runs of a tier, ns in the mean.

    ``median`` and ``worst`` are of the absolute error over the run's whole measured step, so that a
    resource that takes next to nothing does not count as much as one that takes all.
    """

    tier: str
    resource: str
    measured_ns: float
    predicted_ns: float
    median: float
    worst: float


@dataclass(frozen=True, slots=True)
class Bar:
    """One demand: what it is of, the figure (None: nothing to judge by), in words, and whether it is met."""

    name: str
    rule: str
    figure: float | None
    words: str
    is_met: bool


def errors(name: str, rows: Sequence[Compared]) -> Errors:
    """Return median and worst of the runs' absolute errors."""
    worst_run = max(rows, key=lambda row: abs(row.error))
    sizes = [abs(row.error) for row in rows]
    return Errors(name, len(rows), median(sizes), abs(worst_run.error), worst_run)


def errors_by(rows: Sequence[Compared], key: Callable[[Compared], str]) -> list[Errors]:
    """Return the errors of each group of runs, in the order in which the groups first come."""
    names = dict.fromkeys(map(key, rows))
    return [errors(name, [row for row in rows if key(row) == name]) for name in names]


def ranking(rows: Sequence[Compared]) -> Ranking:
    """Compare the order of policies, pair by pair within a tier, batch size and ratio."""
    blocks: dict[tuple[str, int, float], list[Compared]] = {}
    for row in rows:
        blocks.setdefault((row.tier, row.batch_size, row.ratio), []).append(row)
    found = Ranking()
    for block in blocks.values():
        for one, other in combinations(block, 2):
            found += _pair(one, other)
    return found


def _pair(one: Compared, other: Compared) -> Ranking:
    apart_ns = one.measured_ns - other.measured_ns
    noise_ns = hypot(one.noise * one.measured_ns, other.noise * other.measured_ns)
    if abs(apart_ns) <= NOISES * noise_ns:
        return Ranking(num_close=1)
    agreement = apart_ns * (one.predicted_ns - other.predicted_ns)
    if not agreement:
        return Ranking(num_tied=1)
    return Ranking(num_agreed=1) if agreement > 0 else Ranking(num_crossed=1)


def resource_errors(rows: Sequence[Compared]) -> list[ResourceErrors]:
    """Return the errors by tier and resource, of those that take any time there."""
    found = []
    for tier in dict.fromkeys(row.tier for row in rows):
        own = [row for row in rows if row.tier == tier]
        for name in RESOURCES:
            pairs = [(*row.resources[name], row.measured_ns) for row in own]
            if not any(predicted or measured for predicted, measured, _ in pairs):
                continue
            sizes = [abs(predicted - measured) / whole for predicted, measured, whole in pairs]
            found.append(
                ResourceErrors(
                    *(tier, name.removesuffix("_ns")),
                    fmean(measured for _, measured, _ in pairs),
                    fmean(predicted for predicted, _, _ in pairs),
                    *(median(sizes), max(sizes)),
                )
            )
    return found


def depends_on_arrivals(row: Compared) -> bool:
    """Tell whether a run's decisions may depend on when copies come: it loads what nobody waits for yet."""
    return row.times_matter or any(row.counts["prefetches"])


def verdict(rows: Sequence[Compared], parity: Sequence[Parity]) -> list[Bar]:
    """Hold scored runs and lockstep comparisons against the bars; what cannot be judged is not met."""
    return [*_time_bars(rows), _tau_bar(rows), _parity_bar(parity), _counts_bar(rows)]


def _time_bars(rows: Sequence[Compared]) -> list[Bar]:
    found = []
    whole = errors("all", rows) if rows else None
    for name, bar in (("median", MEDIAN_BAR), ("worst", WORST_BAR)):
        figure = None if whole is None else float(getattr(whole, name))
        words = "nothing to judge by" if figure is None else f"{figure:.1%}"
        if whole is not None and name == "worst":
            run = whole.worst_run
            words += f" ({run.policy} at {run.ratio:g}, {run.tier}, batch {run.batch_size})"
        is_met = figure is not None and figure <= bar
        title = f"{name} absolute TPOT error"
        found.append(Bar(title, f"at most {bar:.0%}", figure, words, is_met))
    return found


def _tau_bar(rows: Sequence[Compared]) -> Bar:
    found = ranking(rows)
    tau = found.tau
    if tau is None:
        words = "nothing to judge by: no two policies differ by more than the noise"
    else:
        words = (
            f"{tau:.3f} over {found.num_pairs} pairs, {found.num_crossed} of them crossed; "
            f"{found.num_close} pairs are closer than the noise"
        )
    is_met = tau is not None and tau >= TAU_BAR
    return Bar("rank agreement (Kendall's tau)", f"at least {TAU_BAR:g}", tau, words, is_met)


def _parity_bar(parity: Sequence[Parity]) -> Bar:
    wrong = [one for one in parity if one.difference is not None]
    num_plans = sum(one.num_plans for one in parity)
    words = f"{len(parity) - len(wrong)} of {len(parity)} runs, {num_plans} plans"
    if not parity:
        words = "nothing to judge by"
    elif wrong:
        one = wrong[0]
        words += f"; {one.policy}, {one.tier}, batch {one.batch_size}: {one.difference}"
    return _all_bar("decisions identical in lockstep", len(parity), len(wrong), words)


def _counts_bar(rows: Sequence[Compared]) -> Bar:
    judged = [row for row in rows if not depends_on_arrivals(row)]
    wrong = [row for row in judged if not row.counts_equal]
    words = f"{len(judged) - len(wrong)} of {len(judged)} runs that do not depend on arrival times"
    if not judged:
        words = "nothing to judge by"
    elif wrong:
        row = wrong[0]
        words += f"; {row.policy} at {row.ratio:g}, {row.tier}, batch {row.batch_size}: "
        words += ", ".join(different_counts(row))
    return _all_bar("hits, insertions and bytes identical", len(judged), len(wrong), words)


def different_counts(row: Compared) -> Iterable[str]:
    """Yield what is counted otherwise, in words."""
    for name, (predicted, measured) in row.counts.items():
        if predicted != measured:
            yield f"{name} {predicted} predicted, {measured} measured"


def _all_bar(name: str, num_judged: int, num_wrong: int, words: str) -> Bar:
    share = (num_judged - num_wrong) / num_judged if num_judged else None
    return Bar(name, "all", share, words, share == 1.0)
