"""``greenroom stats``: one pass in bounded memory, the page, the files, what it says and what it refuses."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sim.cli import main
from sim.stats_cli import measure
from sim.stats_report import page
from tests.strategies import trace_of_ids
from traces import locality_requests, locality_stages
from traces.locality import Locality, LocalityCounter, locality
from traces.locality_verdict import cache_sizes, judge
from traces.schema import DECODE, PREFILL, Provenance, Trace
from traces.store import write_trace

LAYERS, EXPERTS, TOP_K = 2, 32, 2


def made(stay: float, requests: int = 4, tokens: int = 200, seed: int = 1) -> Trace:
    """Return requests whose tokens keep their experts with probability ``stay``, else draw others."""
    rng = np.random.default_rng(seed)
    num_tokens = requests * tokens
    fresh = np.argsort(rng.random((num_tokens, LAYERS, EXPERTS)), axis=2)[:, :, :TOP_K]
    keep = rng.random((num_tokens, LAYERS)) < stay
    for row in range(1, num_tokens):
        fresh[row][keep[row]] = fresh[row - 1][keep[row]]
    return trace_of_ids(fresh.astype(np.uint16), [(20, tokens - 20)] * requests, EXPERTS)


def answers(found: Locality) -> dict[str, str]:
    return {judged.question: judged.answer for judged in judge(found)}


SUITS = "Does it suit expert offloading?"


def test_what_repeats_suits_and_what_is_random_does_not() -> None:
    steady, random = (made(stay) for stay in (0.9, 0.0))
    found = locality([steady], steady.meta, len(steady), DECODE)
    assert answers(found)[SUITS] == "yes"
    assert cache_sizes(found).misses_left < 0.3
    noise = locality([random], random.meta, len(random), DECODE)
    assert answers(noise)[SUITS] == "hardly"
    assert cache_sizes(noise).misses_left == pytest.approx(1, abs=0.05)
    assert answers(noise)["Will prefetching help?"] == "hardly"
    assert answers(noise)["Will stages help?"] == "hardly"


def test_the_verdict_names_the_sizes_at_which_a_cache_beats_a_fixed_set() -> None:
    steady = made(0.9)
    sizes = cache_sizes(locality([steady], steady.meta, len(steady), DECODE))
    assert sizes.beats_fixed is not None
    assert sizes.beats_fixed[0] == TOP_K
    assert (sizes.lru[TOP_K - 1 : sizes.knee] > sizes.fixed[TOP_K - 1 : sizes.knee]).all()
    assert sizes.quarter == 8
    # One expert that all use and never leave: a fixed set of it cannot be beaten.
    same = np.zeros((200, 1, 1), dtype=np.uint16)
    same[::2] = np.random.default_rng(2).integers(1, 16, (100, 1, 1))
    trace = trace_of_ids(same, [(0, 200)], 16)
    fixed = cache_sizes(locality([trace], trace.meta, len(trace)))
    assert fixed.beats_fixed is None or fixed.beats_fixed[0] > 1


def test_chunks_do_not_matter() -> None:
    trace = made(0.6)
    trace.stage = (trace.position // 40 % 3).astype(np.int16)
    whole = locality([trace], trace.meta, len(trace), DECODE, curve_tokens=500)
    parts = (trace.take(slice(at, at + 37)) for at in range(0, len(trace), 37))
    cut = locality(parts, trace.meta, len(trace), DECODE, curve_tokens=500)
    assert cut.to_dict() == whole.to_dict()
    assert whole.curve_tokens == 500
    assert whole.num_tokens == len(trace)
    assert whole.counted_tokens == 4 * 180


def stream(num_tokens: int) -> Iterator[Trace]:
    """Yield requests of 10 tokens that go on and on."""
    rng = np.random.default_rng(0)
    meta = made(0, requests=1, tokens=30).meta
    other = np.array([0, 5])
    for first in range(0, num_tokens, 600):
        rows = np.arange(first, first + 600, dtype=np.int32)
        start = rng.integers(0, EXPERTS, (600, LAYERS, 1))
        ids = ((start + other) % EXPERTS).astype(np.uint16)
        position, phase = rows % 10, np.where(rows % 10 < 2, PREFILL, DECODE).astype(np.uint8)
        yield Trace(meta, rows // 10, position, phase, rows, ids)


def test_memory_does_not_grow_with_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locality_stages, "_MOST_BYTES", 6_000)  # 100 requests
    monkeypatch.setattr(locality_requests, "_MOST_BYTES", 0)  # 128, the least

    def peak(num_tokens: int) -> int:
        meta = next(stream(600)).meta
        few = {"windows": (16,), "segments": (16,)}
        counter = LocalityCounter(meta, num_tokens, DECODE, 600, **few)
        tracemalloc.start()
        for chunk in stream(num_tokens):
            counter.add(chunk)
        counter.result()
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    short, long = peak(3_000), peak(5_400)  # 300 and 540 requests
    assert long - short < 90_000  # a number a request is kept; without bounds 125 kB


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trace = made(0.7)
    meta = replace(
        trace.meta, stage_names=("a", "b"), provenance=Provenance("recorded", "a model", "by hand")
    )
    stage = (trace.position // 50 % 2).astype(np.int16)
    path = tmp_path_factory.mktemp("stats") / "mine.parquet"
    write_trace(path, replace(trace, meta=meta, stage=stage), row_group_tokens=100)
    return path


def test_the_command_writes_page_figure_and_numbers(
    staged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found"
    assert main(["stats", str(staged), "--out", str(out)]) == 0
    printed = capsys.readouterr()
    files = {file.name for file in out.iterdir()}
    assert files == {"stats.txt", "stats.json", "stats.png", "stats.pdf"}
    assert (out / "stats.txt").read_text() + f"Results: {out}\n" == printed.out
    assert printed.err == ""
    assert "Locality of mine" in printed.out
    assert "4 requests, 800 tokens (720 counted: decode)" in printed.out
    assert "in a stage" in printed.out
    assert "SYNTHETIC" not in printed.out
    record = json.loads((out / "stats.json").read_text())
    found = measure(str(staged))
    assert record["lru_hit_rate"][1][7] == pytest.approx(found.lru.rates[1, 7], abs=1e-6)
    assert len(record["eor"]) == LAYERS
    assert record["phase"] == "decode"
    assert record["verdict"][0]["question"] == SUITS
    assert (out / "stats.txt").read_text().rstrip().endswith(".")
    assert "Verdict" in printed.out


def test_phases_are_measured_apart(staged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", str(staged), "--phase", "prefill"]) == 0
    assert "(80 counted: prefill)" in capsys.readouterr().out
    assert main(["stats", f"trace.path={staged}", "--phase", "all", "--curve-tokens", "90"]) == 0
    printed = capsys.readouterr().out
    assert "(800 counted: all)" in printed
    assert "first 90 tokens" in printed


def test_a_part_of_a_trace_is_measured(staged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", f"{staged}#request_tokens=100"]) == 0
    assert "8 requests, 800 tokens" in capsys.readouterr().out
    assert main(["stats", f"{staged}#request_token=100"]) == 2
    assert "did you mean 'request_tokens'?" in capsys.readouterr().err


def test_a_synthetic_trace_is_called_so() -> None:
    trace = made(0.5)
    found = locality([trace], trace.meta, len(trace))
    text = page(found, "made up")
    assert text.count("SYNTHETIC") == 2
    assert "of a SYNTHETIC trace" in text


def test_a_trace_of_one_token_has_a_page() -> None:
    trace = made(0.5).take(slice(0, 1))
    text = page(locality([trace], trace.meta, 1), "one")
    assert "What of batches? Unknown: there is one request only." in text
    assert f"{SUITS} Unknown: the trace is too short: 100.0 % of the misses" in text.replace(
        "\n ", ""
    )
    assert "What cache size is worthwhile? Unknown: the trace is too short" in text
    assert "Will prefetching help?" in text
    assert "nan" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.parquet"], "nowhere.parquet: no such file"),
        (["tny"], "tny: no such file, nor a bundled trace; did you mean 'tiny'?"),
        (["--out", __file__], "is a file: must be a folder"),
        (["--out", f"{__file__}/deep"], "is a file: must be a folder"),
        (["trace=tny"], "tny: no such option; did you mean 'tiny'?"),
        (["policy=lru"], "policy: unknown setting (known: trace, trace.path)"),
        (["--curve-tokens", "0"], "--curve-tokens 0: must be >= 1"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stats", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("greenroom stats: error: ")
    assert message in printed.err


def test_a_phase_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = made(0.5)
    path = tmp_path / "prompts.parquet"
    write_trace(path, trace.take(trace.phase == PREFILL))
    assert main(["stats", str(path)]) == 0  # all, as nothing is decoded
    assert "counted: all" in capsys.readouterr().out
    assert main(["stats", str(path), "--phase", "decode"]) == 2
    assert "has no such tokens" in capsys.readouterr().err
