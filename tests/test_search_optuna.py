"""Optuna's search: better than chance, the same again, and silent."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sim.sweeps.space import PointSettings, Search
from sim.types import ConfigError
from tests.searching import search, texts, values

optuna = pytest.importorskip("optuna")

ARGUMENTS = [
    "seed=3",
    "a=interval(0,1)",
    "b=tag(log,interval(1e9,1e11))",
    "workload.batch_size=2",
    "c=int(interval(1,16))",
    "d=x,y,z",
    "e=range(0,20)",
]
OFFSETS = {"x": 0.5, "y": 0.0, "z": 1.0}


def hill(point: PointSettings) -> float:
    """Return a height, at most 0 and there only at (0.3, 10^10.3, 11, y, 6)."""
    at: Any = values(point)
    distance = 4 * (at["a"] - 0.3) ** 2 + (math.log10(at["b"]) - 10.3) ** 2
    return -(distance + ((at["c"] - 11) / 8) ** 2 + OFFSETS[at["d"]] + ((at["e"] - 6) / 10) ** 2)


def asked(**settings: object) -> Search:
    return search(ARGUMENTS, **{"search": "optuna", "points": 24, "batch": 8} | settings)


def climbed(
    found: Search, height: Callable[[PointSettings], float | None] = hill
) -> Iterator[tuple[PointSettings, float | None]]:
    """Run a search to its end; yield its points and what was told of them."""
    for batch in found.batches():
        told = [height(point) for point in batch]
        found.tell(told)
        yield from zip(batch, told, strict=True)


def best(found: Search) -> float:
    return max(value for _, value in climbed(found) if value is not None)


def test_it_finds_higher_ground_than_random_points_do() -> None:
    wins, gaps = 0, []
    for seed in range(5):
        chance = search(ARGUMENTS, search="random", points=48, seed=seed)
        learnt, drawn = best(asked(points=48, batch=4, seed=seed)), best(chance)
        wins += learnt > drawn
        gaps.append(drawn - learnt)
    assert wins >= 4
    assert sum(gaps) < 0


def test_minimising_is_maximising_upside_down() -> None:
    up = [texts(point) for point, _ in climbed(asked())]
    down = asked(direction="minimize")
    assert [texts(point) for point, _ in climbed(down, lambda point: -hill(point))] == up


def test_the_same_results_give_the_same_points_and_another_seed_others() -> None:
    first = list(climbed(asked()))
    assert list(climbed(asked())) == first
    assert list(climbed(asked(seed=1))) != first
    assert list(climbed(asked(), lambda point: -hill(point)))[8:] != first[8:]


@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_a_search_goes_on_from_any_batch_when_told_again_what_is_known(done: int) -> None:
    whole = list(climbed(asked()))
    stopped = asked()
    batches = stopped.batches()
    known = {}
    for _ in range(done):
        batch = next(batches)
        known |= {tuple(texts(point)): hill(point) for point in batch}
        stopped.tell([hill(point) for point in batch])

    def known_or_run(point: PointSettings) -> float:
        return known.get(tuple(texts(point))) or hill(point)

    assert list(climbed(asked(), known_or_run)) == whole


def test_another_process_with_other_hashes_makes_the_same_points() -> None:
    code = (
        "from tests.test_search_optuna import *\n"
        "print([texts(point) for point, _ in climbed(asked(points=12, batch=4))])"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert told == {f"{[texts(point) for point, _ in climbed(asked(points=12, batch=4))]}\n"}


def test_batches_are_of_the_size_asked_for_and_the_last_of_the_rest() -> None:
    found = asked(points=11, batch=4)
    sizes = []
    for batch in found.batches():
        sizes.append(len(batch))
        found.tell([0.0] * len(batch))
    assert sizes == [4, 4, 3]
    assert found.num_points == 11
    assert found.fixed == ("seed=3",)


def test_points_lie_within_what_is_asked_and_keep_the_order_of_the_command_line() -> None:
    for point, _ in climbed(asked()):
        assert [s.key for s in point] == ["a", "b", "workload.batch_size", "c", "d", "e"]
        at: Any = values(point)
        assert 0 <= at["a"] <= 1
        assert 1e9 <= at["b"] <= 1e11
        assert at["c"] in range(1, 17)
        assert type(at["c"]) is int
        assert at["d"] in OFFSETS
        assert at["e"] in range(20)
        assert point[0].text == f"a={at['a']!r}"
        assert float(f"{at['a']:.6g}") == at["a"]


def test_points_that_fail_are_told_as_such_and_the_search_goes_on() -> None:
    def seldom(point: PointSettings) -> float | None:
        at: Any = values(point)
        return None if at["d"] == "x" else math.nan if at["d"] == "z" else hill(point)

    told = list(climbed(asked(), seldom))
    assert len(told) == 24
    assert list(climbed(asked(), seldom))[-1][0] == told[-1][0]
    assert len(list(climbed(asked(), lambda point: None))) == 24


def test_a_batch_must_be_told_of_before_the_next() -> None:
    found = asked()
    batches = found.batches()
    next(batches)
    with pytest.raises(RuntimeError, match="have not been told"):
        next(batches)
    with pytest.raises(ValueError, match="3 results of 8 points"):
        found.tell([1.0] * 3)


def test_optuna_says_nothing_and_keeps_its_settings(
    capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    before = optuna.logging.get_verbosity()
    list(climbed(asked(points=16), lambda point: None))
    list(climbed(asked(points=16)))
    assert capfd.readouterr() == ("", "")
    assert not recwarn
    assert optuna.logging.get_verbosity() == before


def test_without_optuna_one_line_tells_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(
        ConfigError, match=r"not installed; pip install 'greenroom\[search\]', in a checkout: "
    ):
        asked()
