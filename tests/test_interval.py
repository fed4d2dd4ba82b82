"""Intervals from left-out errors: which rows count, and the quantiles of a made-up table by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.interval import Interval, Missed, interval_of, read_errors
from sim.types import ConfigError

HEAD = "id,engine,machine,complete,metric,error_fit,error_left_out,error_machine_left_out\n"
ERRORS = (-0.2, -0.1, 0.0, 0.25, 0.5)


def table(tmp_path: Path, *lines: str) -> list[Missed]:
    path = tmp_path / "errors.csv"
    path.write_text(HEAD + "".join(f"{line}\n" for line in lines))
    return read_errors(path)


def decode(engine: str, machine: str, alone: float, away: float | str) -> str:
    return f"1,{engine},{machine},True,decode_tokens_per_s,0.0,{alone},{away}"


def test_a_fitted_machine_takes_rows_left_out_alone(tmp_path: Path) -> None:
    """Ratios 0.8, 0.9, 1, 1.25, 1.5: the 10 % quantile is 0.84, the 90 % one 1.4."""
    rows = table(tmp_path, *(decode("e", "here", error, 9.0) for error in ERRORS))
    found = interval_of(rows, "e", "here", is_prefill=False)
    assert found.low == pytest.approx(1 / 1.4)
    assert found.high == pytest.approx(1 / 0.84)
    assert found.of(140.0) == pytest.approx((100.0, 140 / 0.84))
    assert found.of_time(10.0) == pytest.approx((8.4, 14.0))
    assert "5 published decode rows of e" in found.words
    assert "has fitted rows" in found.words


def test_another_machine_takes_rows_left_out_with_theirs(tmp_path: Path) -> None:
    rows = table(tmp_path, *(decode("e", "here", 0.0, error) for error in ERRORS))
    for machine, is_changed in (("there", False), ("here", True)):
        found = interval_of(rows, "e", machine, is_prefill=False, is_changed=is_changed)
        assert found.low == pytest.approx(1 / 1.4)
        assert "no fitted rows" in found.words


def test_the_side_on_which_predictions_fell_is_told(tmp_path: Path) -> None:
    """Medians of 0.9, 1.25 and 1: 10 % too low, 25 % too high, right."""
    for errors, words in (
        ((-0.2, -0.2, -0.1, 0.0, 0.5), "too low in the median by 10.0%"),
        ((0.0, 0.2, 0.25, 0.5, 0.5), "too high in the median by 25.0%"),
        (ERRORS, "right in the median"),
    ):
        rows = table(tmp_path, *(decode("e", "here", 9.0, error) for error in errors))
        found = interval_of(rows, "e", "there", is_prefill=False)
        assert found.words.endswith(f"predictions of such rows were {words}")


def test_a_machine_that_its_user_calibrated_is_not_called_unfitted(tmp_path: Path) -> None:
    rows = table(tmp_path, *(decode("e", "here", error, 2 * error) for error in ERRORS))
    plain = interval_of(rows, "e", "there", is_prefill=False)
    own = interval_of(rows, "e", "there", is_prefill=False, is_own_fit=True)
    assert (own.low, own.high) == (plain.low, plain.high)
    assert "a calibration of your own, whose errors --errors FILE gives" in own.words
    assert "no fitted rows" not in own.words
    known = interval_of(rows, "e", "here", is_prefill=False, is_own_fit=True)
    assert "this machine has fitted rows" in known.words


def test_few_rows_of_an_engine_give_way_to_all_engines(tmp_path: Path) -> None:
    lines = [decode(f"engine{n}", "here", error, "") for n, error in enumerate(ERRORS)]
    rows = table(tmp_path, *lines)
    assert "all engines" in interval_of(rows, "engine0", "here", is_prefill=False).words
    none = interval_of(
        rows, "engine0", "there", is_prefill=False
    )  # no error with the machine left out
    assert none.of(10.0) is None
    assert none.of_time(10.0) is None
    assert "only 0 published rows" in none.words
    assert interval_of(rows, "engine0", "here", is_prefill=True).low is None


def test_times_are_turned_round_and_incomplete_rows_do_not_count(tmp_path: Path) -> None:
    rows = table(
        tmp_path,
        "1,e,here,True,ttft_s,0,1.0,0.25",  # twice as long as published: half the speed
        "2,e,here,True,prefill_tokens_per_s,0,1.0,",
        "3,e,here,False,tpot_ms,0,0.0,0.0",
    )
    assert [row.alone for row in rows] == [0.5, 2.0, 1.0]
    assert [row.with_machine for row in rows] == [0.8, None, 1.0]
    assert [row.is_prefill for row in rows] == [True, True, False]
    assert "only 0" in interval_of(rows, "e", "here", is_prefill=False).words


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1,e,here,True,tpot_ms,0,-1.0,0", "line 2: error_left_out = -1.0: must be a number > -1"),
        ("1,e,here,True,tpot_ms,0,0,often", "line 2: error_machine_left_out = often"),
        ("1,e,here,True,tpot_ms,0,nan,0", "error_left_out = nan"),
    ],
)
def test_a_table_that_cannot_be_is_refused(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        table(tmp_path, line)


def test_a_table_without_a_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "errors.csv"
    path.write_text("id,engine\n1,e\n")
    with pytest.raises(ConfigError, match="column machine: missing"):
        read_errors(path)


def test_the_bundled_table_can_be_read() -> None:
    """There or not; where it is, every row has an engine and a metric known here."""
    for row in read_errors():
        assert row.engine
        assert row.alone is None or 0 < row.alone < 100


def test_an_unknown_interval_says_nothing() -> None:
    assert Interval(None, None, "why").of(3.0) is None
