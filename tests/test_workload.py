"""Which requests run, of what length, and when they arrive; and what a user may get wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sim.arrivals import poisson_ns, recorded_ns
from sim.build import build
from sim.tiling import Request, Tiling
from sim.types import ConfigError
from sim.workload import Workload, split_layers
from tests.configs import composed
from tests.strategies import make_trace
from traces.schema import NO_EXPERT, Trace


def recorded(*lengths: tuple[int, int]) -> list[Request]:
    """Return requests 0, 1, ... of (prompt rows, decoded rows); request n has rows 100 n and on."""
    return [
        Request(number, np.arange(sum(length)) + 100 * number, length[0], number)
        for number, length in enumerate(lengths)
    ]


def shown(requests: list[Request]) -> list[tuple[int, list[int], list[int], int]]:
    return [
        (r.request_id, r.prompt_rows.tolist(), r.decode_rows.tolist(), r.source_id)
        for r in requests
    ]


# -- lengths ---------------------------------------------------------------------------------------


def test_a_long_request_is_cut_and_a_short_one_begins_anew() -> None:
    found = Tiling((2, 3)).apply(recorded((3, 4), (1, 1)))
    assert shown(found) == [
        (0, [0, 1], [2, 3], 0),  # the third output token is never processed
        (1, [100, 101], [100, 101], 1),
    ]
    assert [request.num_outputs for request in found] == [3, 3]


def test_a_long_request_gives_as_many_as_it_holds() -> None:
    found = Tiling((2, 2), cut=True).apply(recorded((3, 5), (1, 1)))
    assert shown(found) == [
        (0, [0, 1], [2], 0),
        (1, [3, 4], [5], 0),  # what is left, 6 and 7, is too short for a third
        (2, [100, 101], [100], 1),
    ]


def test_repeated_requests_have_ids_of_their_own() -> None:
    found = Tiling(repeat=2).apply(recorded((1, 1), (1, 0)))
    assert shown(found) == [
        (0, [0], [1], 0),
        (1, [100], [], 1),
        (2, [0], [1], 0),
        (3, [100], [], 1),
    ]


def test_a_tiled_request_shares_out_its_rows_evenly() -> None:
    (found,) = Tiling((1, 1000)).apply(recorded((3, 4)))
    assert len(found.rows) == 1000
    assert set(np.bincount(found.rows).tolist()) == {142, 143}


def test_the_note_says_what_was_made() -> None:
    requests = recorded((3, 4), (1, 1))
    assert Tiling().note(requests) == ""
    assert Tiling(repeat=3).note(requests) == "the list of requests runs 3 times over"
    assert Tiling((2, 3)).note(requests) == (
        "requests are cut or tiled to 2 prompt and 3 output tokens; 1 of 2 were shorter and repeat their "
        "rows, so that they reuse experts more than recorded"
    )
    assert Tiling((1, 1), cut=True).note(requests) == (
        "requests are cut into consecutive requests of 1 prompt and 1 output tokens"
    )


@pytest.mark.parametrize(
    ("length", "cut", "repeat", "message"),
    [
        ((0, 3), False, 1, r"workload.length = \[0, 3\]: both must be >= 1"),
        (None, True, 1, "workload.cut = true: must come with a workload.length"),
        (None, False, 0, "workload.repeat = 0: must be >= 1"),
    ],
)
def test_a_wrong_tiling_is_refused(
    length: tuple[int, int] | None, cut: bool, repeat: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Tiling(length, cut, repeat)


def test_calibration_keeps_its_requests_whatever_they_are_made_into(small_trace: Trace) -> None:
    settings = composed("workload.length=[10,6]", "workload.cut=true")["workload"]
    workload = Workload.from_settings(settings, small_trace, kept_back=[(1, 5)])
    assert [r.source_id for r in workload.requests] == [0, 0, 0, 5, 5, 5]
    assert [r.request_id for r in workload.requests] == [0, 1, 2, 3, 4, 5]
    settings["requests"] = [1, 2]
    workload = Workload.from_settings(settings, small_trace, kept_back=[(1, 5)])
    assert {r.source_id for r in workload.requests} == {1}, "asked for by name"


# -- arrivals --------------------------------------------------------------------------------------


def test_poisson_arrivals_have_their_rate_and_depend_on_the_seed_alone() -> None:
    times_ns = poisson_ns(20_000, 50.0, seed=1)
    assert times_ns == sorted(times_ns)
    assert times_ns == poisson_ns(20_000, 50.0, seed=1)
    assert times_ns != poisson_ns(20_000, 50.0, seed=2)
    gaps_ns = np.diff(times_ns)
    assert gaps_ns.mean() == pytest.approx(1e9 / 50, rel=0.03)
    assert gaps_ns.std() == pytest.approx(1e9 / 50, rel=0.05), "exponential: mean = deviation"


@pytest.mark.parametrize(
    "text",
    [
        "0\n0.5\n0.5\n2e0\n",
        "arrival_s\n0\n0.5\n0.5\n2\n",
        "\nid,arrival_s\r\n7,0\r\n8,0.5\r\n\r\n9,0.5\r\n1,2.0\r\n2,9\r\n",
    ],
)
def test_recorded_arrivals_are_numbers_or_a_column(text: str, tmp_path: Path) -> None:
    file = tmp_path / "arrivals.csv"
    file.write_text(text, newline="")
    assert recorded_ns(str(file), 4) == [0, 500_000_000, 500_000_000, 2_000_000_000]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0\n1\n", "holds 2 arrivals: must be at least 3, one a request"),
        ("", "holds 0 arrivals"),
        ("arrival_s\n0\nsoon\n1\n", "line 3: arrival_s = soon: must be a number of seconds"),
        ("0\nnan\n1\n", "line 2: arrival_s = nan: must be a number of seconds"),
        ("0\n-1\n1\n", r"line 2: arrival_s = -1: must be in \[0, "),
        ("0\n1e30\n1\n", r"line 2: arrival_s = 1e30: must be in \[0, .* \(146 years\)"),
        ("0\n2\n1\n", "line 3: arrival_s = 1: comes before the one above it: must be in ascending"),
        (
            "id,arrival\n1,2\n",
            "line 1: id, arrival: must be one number of seconds, or column names",
        ),
        ("id,arrival_s\n1,0\n2\n", "line 3: arrival_s is missing"),
    ],
)
def test_a_bad_line_is_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "arrivals.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        recorded_ns(str(file), 3)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "arrivals.csv"
    file.write_bytes(b"\xff\xfe\x00\x9f")
    with pytest.raises(ConfigError, match="is no text table"):
        recorded_ns(str(file), 3)


def test_arrivals_that_outlast_the_clock_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"workload.rate_per_s = 1e-12: .*146 years"):
        poisson_ns(3, 1e-12, seed=0)


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["workload.prefill_chunk=0"], "workload.prefill_chunk = 0: must be a whole number >= 1"),
        (["workload.prefill_chunk=2.5"], "workload.prefill_chunk = 2.5: must be a whole number"),
        (["workload.mixed=1"], "workload.mixed = 1: must be true or false"),
        (["workload.arrivals=3"], "workload.arrivals = 3: must be 'closed', 'poisson' or a file"),
        (
            ["workload.arrivals=poison"],
            "workload.arrivals = poison: must be 'closed', 'poisson' or a file of arrival times; "
            "there is no such file; did you mean 'poisson'?",
        ),
        (["workload.arrivals=poisson"], "workload.rate_per_s = None: must be > 0"),
        (["workload.rate_per_s=0"], "workload.rate_per_s = 0: must be a number > 0, or null"),
        (["workload.rate_per_s=fast"], "workload.rate_per_s = fast: must be a number > 0"),
        (["workload.seed=-1"], "workload.seed = -1: must be a whole number >= 0"),
        (["workload.length=128"], "workload.length = 128: must be [prompt, output] tokens"),
        (["workload.length=[0,9]"], "workload.length = [0, 9]: must be [prompt, output] tokens"),
        (["workload.cut=true"], "workload.cut = true: must come with a workload.length"),
        (["workload.repeat=0"], "workload.repeat = 0: must be a whole number >= 1"),
        (["workload.kv_limit_tokens=0"], "workload.kv_limit_tokens = 0: must be a whole number"),
        (["+workload.chunk=8"], "workload.chunk: unknown key"),
        (
            ["policy=belady", "workload.arrivals=poisson", "workload.rate_per_s=1"],
            "policy/belady: cache: sim.policies.oracle.Belady must know the future",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_setting_is_named(
    overrides: list[str], message: str, small_trace_file: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(composed(f"trace.path={small_trace_file}", *overrides))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# -- routing ---------------------------------------------------------------------------------------


def test_kv_is_bounded_for_open_arrivals() -> None:
    requests = [([[[0]]] * prompt, [[[0]]] * decode) for prompt, decode in [(3, 2), (1, 1), (4, 4)]]
    trace = make_trace(requests, 4)
    options = {"arrivals": "poisson", "rate_per_s": 1.0}
    assert Workload(trace, 2, **options).peak_kv_tokens() == 8 + 5
    assert Workload(trace, 2, kv_limit_tokens=7, **options).peak_kv_tokens() == 5 + 2
    assert Workload(trace, 3, kv_limit_tokens=9, **options).peak_kv_tokens() == 9
    assert Workload(trace, 1).peak_kv_tokens() == 8


def test_a_long_prompt_is_counted_as_a_whole() -> None:
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((2500, 3, 8)), axis=2)[:, :, :2].astype(np.uint16)
    ids[rng.random(ids.shape) < 0.1] = NO_EXPERT
    for layer, routing in enumerate(split_layers(ids, 8)):
        chosen, counts = np.unique(ids[:, layer], return_counts=True)
        assert routing.experts == (chosen[:-1] + 8 * layer).tolist()
        assert routing.token_counts == counts[:-1].tolist()
