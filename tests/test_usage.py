"""The two curves of expert use: read, interpolated, and measured on a trace by a count of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hwmodels.errors import HardwareError
from hwmodels.usage import Usage
from sim.build import load_trace
from sim.usage_of_trace import usage_of
from tests.configs import options
from tests.public_data import routing_file
from tests.round_hardware import read, shape
from traces.importers.experts_npz import read_experts_npz

UNIFORM = Usage.from_mapping(read("usage", "uniform"))
EIGHT = shape(num_experts=8, top_k=2)


def curves(**changes: Any) -> Usage:
    plain = {"name": "mine", "source": "made up", "distinct": None, "hits": None, **changes}
    return Usage.from_mapping(plain, "usage/mine")


@pytest.mark.parametrize("name", options("usage"))
def test_every_usage_file_builds(name: str) -> None:
    built = Usage.from_mapping(read("usage", name))
    assert built.name == name
    assert built.distinct_experts(EIGHT, 1) == 2


def test_uniform_use_is_independent_draws() -> None:
    assert UNIFORM.distinct_experts(EIGHT, 0) == 0
    assert UNIFORM.distinct_experts(EIGHT, 1) == 2
    assert UNIFORM.distinct_experts(EIGHT, 2) == pytest.approx(8 * (1 - 0.75**2))
    assert UNIFORM.distinct_experts(EIGHT, 10_000) == pytest.approx(8)
    assert UNIFORM.hit_rate(0.25) == 0.25


def test_a_measured_curve_is_linear_in_the_logarithm_of_visits() -> None:
    """500 thousandths of a visit touch 300, 2000 touch 700: 1000 lie half-way."""
    usage = curves(distinct=[[500, 300], [2000, 700]])
    assert usage.distinct_experts(EIGHT, 4) == pytest.approx(8 * 0.5)
    assert usage.distinct_experts(EIGHT, 8) == pytest.approx(8 * 0.7)
    assert usage.distinct_experts(EIGHT, 800) == pytest.approx(8 * 0.7)  # flat beyond
    assert usage.distinct_experts(EIGHT, 1) == 2  # a token uses its top-k
    few = shape(num_experts=80, top_k=2)
    assert usage.distinct_experts(few, 4) == pytest.approx(80 * 0.3 * 100 / 500)


def test_hits_go_through_zero_and_one() -> None:
    usage = curves(hits=[[250, 600], [500, 800]])
    assert [usage.hit_rate(ratio) for ratio in (0.0, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0)] == [
        pytest.approx(rate) for rate in (0, 0.3, 0.6, 0.7, 0.8, 0.9, 1)
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hits": [[250, 1001]]}, "hits = ((250, 1001),): must be thousandths <= 1000"),
        ({"distinct": [[10, 5], [10, 6]]}, "must come after"),
        ({"hit": None}, "unknown field; did you mean 'hits'?"),
        ({"source": ""}, "must be a text that is not empty"),
    ],
)
def test_bad_curves_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(HardwareError) as error:
        curves(**changes)
    assert message in str(error.value)


# -- measured on a trace ---------------------------------------------------------------------------


def lru_hits(ids: np.ndarray, slots: int) -> float:
    """Replay an event-atomic LRU of one layer, the plain way."""
    recent: list[int] = []
    hits = 0
    for event in ids.tolist():
        held = recent[-slots:]
        hits += sum(expert in held for expert in event)
        for expert in reversed(event):
            if expert in recent:
                recent.remove(expert)
            recent.append(expert)
    return hits


def test_a_traces_usage_is_what_a_replay_counts() -> None:
    trace = load_trace("pkg://traces.tiny/trace.parquet")
    tokens = 300
    found = usage_of(trace, "tiny", max_tokens=tokens)
    ids = np.asarray(trace.expert_ids).reshape(-1, 8, 4)[:tokens]
    uses = tokens * 8 * 4
    for ratio, rate in found["hits"]:
        hits = sum(lru_hits(ids[:, layer], ratio * 32 // 1000) for layer in range(8))
        assert rate == max(1, round(1000 * hits / uses)), ratio
    requests = np.asarray(trace.request_id)[:tokens]
    pairs = [i for i in range(0, tokens - 1, 2) if requests[i] == requests[i + 1]]
    touched = np.mean([[len({*ids[i, lay], *ids[i + 1, lay]}) for lay in range(8)] for i in pairs])
    assert [250, round(1000 * touched / 32)] in found["distinct"]
    assert "recorded" in found["source"]
    assert "300 tokens" in found["source"]
    Usage.from_mapping(found)


def test_the_bundled_curves_are_those_of_the_public_routing() -> None:
    """Text and code in the mean; the file took every third layer, this takes all."""
    bundled = read("usage", "qwen3_text")
    rates = []
    for text in ("math", "code"):
        found = usage_of(
            read_experts_npz(routing_file(f"qwen3-30b-a3b_{text}.npz")), text, max_tokens=4000
        )
        rates.append(dict(map(tuple, found["hits"])))
    for ratio, rate in bundled["hits"]:
        assert (rates[0][ratio] + rates[1][ratio]) / 2 == pytest.approx(rate, abs=12), ratio
