"""Predicted against measured: scores by hand, parity that catches, a tiny validation end to end."""

from __future__ import annotations

import csv
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from real import validate as validate_module
from real import validate_parity
from real.device import open_device
from real.limits import LimitResult
from real.observed import Mean, Observed
from real.rig import format_of_model
from real.validate import validate
from real.validate_blocks import Block, Wanted, blocks_of, config_of_runs, setting_of, tiny_setting
from real.validate_cli import write
from real.validate_config import Matrix, compose_matrix
from real.validate_machine import first_guess, machine_of
from real.validate_parity import TINY, Parity, check_parity, first_difference
from real.validate_predict import Compared
from real.validate_report import report
from real.validate_result import Played, Validation
from real.validate_score import (
    MEDIAN_BAR,
    WORST_BAR,
    Bar,
    errors_by,
    ranking,
    resource_errors,
    verdict,
)
from real.validate_stores import Stores
from real.validate_tables import run_rows
from sim.cli import main
from sim.figures.validation import _BANDS, validation_figure
from sim.lockstep import run_lockstep
from sim.plot_style import look
from sim.types import ConfigError, LayerPlan


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def made(policy: str, measured: float, predicted: float, **changes: Any) -> Compared:
    """Return a run of so many ms a step; all of it kernels, but for 1 ms of waiting that is not predicted."""
    usual: dict[str, Any] = {
        "tier": "ram",
        "batch_size": 1,
        "ratio": 0.25,
        "policy": policy,
        "noise": 0.01,
        "measured_ns": measured * 1e6,
        "predicted_ns": predicted * 1e6,
        "num_steps": 8,
        "counts": {"hits": (7, 7), "prefetches": (0, 0)},
        "resources": {
            "gpu_busy_ns": (predicted * 1e6, (measured - 1) * 1e6),
            "link_stall_ns": (0.0, 1e6),
            **dict.fromkeys(("storage_stall_ns", "cpu_stall_ns", "host_stall_ns"), (0.0, 0.0)),
        },
        "times_matter": False,
    }
    return Compared(**{**usual, **changes})


SAME = Parity("ram", 1, 0.25, "lru", 64, None)
GOOD = [made("lru", 10, 10.5), made("static", 20, 19), made("fiddler", 30, 33)]


# -- scores ------------------------------------------------------------------------------------------


def test_errors_are_absolute_by_group() -> None:
    rows = [made("lru", 10, 9), made("static", 10, 12), made("lru", 10, 11, tier="link")]
    rows.append(made("static", 10, 10.4, tier="link"))
    ram, link = errors_by(rows, lambda row: row.tier)
    assert (ram.name, ram.num_runs, ram.worst_run.policy) == ("ram", 2, "static")
    assert (ram.median, ram.worst) == pytest.approx((0.15, 0.2))
    assert (link.median, link.worst) == pytest.approx((0.07, 0.1))


def test_tau_by_hand() -> None:
    rows = [made("a", 10, 10), made("b", 20, 31), made("c", 30, 22), made("d", 40, 40)]
    found = ranking(rows)
    assert (found.num_agreed, found.num_crossed) == (5, 1)
    assert found.tau == pytest.approx(4 / 6)


def test_pairs_are_of_one_tier_batch_and_ratio() -> None:
    rows = [made("a", 10, 30), made("b", 20, 20, tier="link"), made("c", 30, 10, batch_size=8)]
    rows.append(made("d", 40, 5, ratio=0.5))
    assert ranking(rows).num_pairs == 0
    assert ranking(rows).tau is None


def test_pairs_within_the_noise_do_not_count_and_equal_predictions_agree_with_nobody() -> None:
    # standard errors of 3 and 4 ms are 5 together, so that 10 ms apart is not enough
    one, other = made("a", 100, 90, noise=0.03), made("b", 110, 80, noise=4 / 110)
    assert (ranking([one, other]).num_close, ranking([one, other]).num_pairs) == (1, 0)
    further = made("b", 110.1, 80, noise=4 / 110.1)
    assert ranking([one, further]).num_crossed == 1
    tied = ranking([one, made("b", 130, 90)])
    assert (tied.num_tied, tied.num_pairs, tied.tau) == (1, 1, 0.0)


def test_errors_by_resource_are_shares_of_the_step() -> None:
    gpu, link = resource_errors([made("lru", 10, 10), made("static", 20, 15)])
    assert (gpu.tier, gpu.resource, link.resource) == ("ram", "gpu_busy", "link_stall")
    assert (gpu.measured_ns, gpu.predicted_ns) == (14e6, 12.5e6)
    assert (gpu.median, gpu.worst) == pytest.approx((0.15, 0.2))
    assert (link.median, link.worst) == pytest.approx((0.075, 0.1))


# -- the verdict -------------------------------------------------------------------------------------


def missed(rows: Sequence[Compared], parity: Sequence[Parity] = (SAME,)) -> list[str]:
    return [bar.name for bar in verdict(rows, parity) if not bar.is_met]


def test_good_predictions_meet_all_bars() -> None:
    assert missed(GOOD) == []


WRONG = replace(SAME, difference="plan 3 (layer 3): loads = []: must be [101]")


@pytest.mark.parametrize(
    ("rows", "parity", "name"),
    [
        ([*GOOD, made("arc", 40, 50.4)], [SAME], "worst absolute TPOT error"),
        ([made("a", 10, 11.1), made("b", 20, 22.2)], [SAME], "median absolute TPOT error"),
        ([made("a", 100, 102), made("b", 104, 99)], [SAME], "rank agreement (Kendall's tau)"),
        (GOOD[:1], [SAME], "rank agreement (Kendall's tau)"),
        (GOOD, [SAME, WRONG], "decisions identical in lockstep"),
        (GOOD, [], "decisions identical in lockstep"),
        (
            [*GOOD, made("arc", 40, 40, counts={"hits": (7, 6), "prefetches": (0, 0)})],
            [SAME],
            "hits, insertions and bytes identical",
        ),
    ],
)
def test_one_missed_bar_is_a_missed_verdict(
    rows: list[Compared], parity: list[Parity], name: str
) -> None:
    assert missed(rows, parity) == [name]
    found = made_validation(rows, parity)
    assert report(found).splitlines()[2] == f"**Verdict: missed** ({name})."


def test_counts_of_runs_that_depend_on_arrival_times_may_differ() -> None:
    late = {"hits": (7, 6), "prefetches": (3, 2)}
    assert missed([*GOOD, made("saem", 40, 40, counts=late)]) == []
    timed = made("next", 40, 40, counts={"hits": (7, 6), "prefetches": (0, 0)}, times_matter=True)
    assert missed([*GOOD, timed]) == []


def test_nothing_judged_is_not_met() -> None:
    bars = verdict([], [])
    assert [bar.is_met for bar in bars] == [False] * 5
    assert {bar.figure for bar in bars} == {None}


# -- decisions ---------------------------------------------------------------------------------------


def tiny_matrix(**changes: Any) -> Matrix:
    usual = {"policies": ["lru", "static"], "ratios": [0.25], "batch_sizes": [1], "tiers": ["ram"]}
    short = {"steps": 8, "parity_steps": 3, "minutes": 0.01, "limit_steps": 0, "peer_tokens": 0}
    return compose_matrix(["model=tiny", *TINY], {**usual, **short, **changes})


def compare(policy: str, tier: str, batch_size: int, folder: Path) -> Parity:
    matrix, device = tiny_matrix(parity_steps=6), open_device("cpu")
    form = format_of_model(config_of_runs(matrix, device, TINY)["model"], "float32")
    block = Block(tier, batch_size, (), ((policy, 0.25),))
    setting = tiny_setting(setting_of(matrix, block, form, device, 1, 6), form)
    machine = machine_of(first_guess(), device, setting.tier, batch_size, 1)
    with Stores(device, str(folder), 0) as stores:
        return check_parity(setting, stores.of(tier, form, 8, 32), machine, policy, 0.25)


@pytest.mark.parametrize(
    ("policy", "tier", "batch_size"),
    [("saem", "ram", 1), ("prefetch_next_gate", "link", 2), ("llama_cpp", "ram", 2)],
)
def test_decisions_are_the_same_in_lockstep(
    policy: str, tier: str, batch_size: int, tmp_path: Path
) -> None:
    found = compare(policy, tier, batch_size, tmp_path)
    assert found.difference is None
    assert found.num_plans == 8 * (5 + batch_size)  # layers x (prompts one by one, and 5 steps)


def test_parity_catches_a_tampered_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tampered(workload: Any, offloader: Any, on_plan: Any) -> Any:
        def swap(plan: LayerPlan) -> None:
            plan.loads = list(plan.loads)[::-1]
            on_plan(plan)

        return run_lockstep(workload, offloader, swap)

    monkeypatch.setattr(validate_parity, "run_lockstep", tampered)
    found = compare("lru", "ram", 1, tmp_path)
    assert found.difference is not None
    assert found.difference.startswith("plan 0 (layer 0): loads = [")


def test_a_plan_too_few_is_a_difference() -> None:
    plans: list[dict[str, Any]] = [{"layer": 0, "loads": [1]}, {"layer": 1, "loads": []}]
    assert first_difference(plans, plans) is None
    assert first_difference(plans, plans[:1]) == "2 plans in lockstep, 1 carried out"


# -- which runs there are ----------------------------------------------------------------------------


def matrix_of(**changes: Any) -> Matrix:
    return compose_matrix((), {"policies": ["lru", "fiddler"], "batch_sizes": [1], **changes})


ON_HOST = frozenset({"fiddler", "ktransformers_uniform"})


def sizes(matrix: Matrix, num_bytes: int) -> dict[Wanted, int]:
    names = (*matrix.policies, *matrix.references)
    return {(name, ratio): num_bytes for name in names for ratio in matrix.ratios}


def test_blocks_have_references_and_no_host_with_storage() -> None:
    matrix = matrix_of(tiers=["ram", "storage"])
    ram, storage = blocks_of(matrix, ON_HOST, sizes(matrix, 1), 100)
    assert ram.references == (("fifo", 0.25), ("fifo", 0.5), ("ktransformers_uniform", 0.25))
    assert ram.runs == (("lru", 0.25), ("fiddler", 0.25), ("lru", 0.5), ("fiddler", 0.5))
    assert storage.references == (("fifo", 0.25), ("fifo", 0.5))
    assert storage.runs == (("lru", 0.25), ("lru", 0.5))


def test_a_block_too_large_is_split_by_ratio_or_refused() -> None:
    matrix = matrix_of(tiers=["link"])
    names = [block.name for block in blocks_of(matrix, ON_HOST, sizes(matrix, 10), 65)]
    assert names == ["link, batch 1, ratio 0.25", "link, batch 1, ratio 0.5"]
    with pytest.raises(ConfigError, match=r"link, batch 1, ratio 0.25: its 4 runs take"):
        blocks_of(matrix, ON_HOST, sizes(matrix, 10), 30)


def test_storage_with_host_policies_alone_is_refused() -> None:
    matrix = matrix_of(tiers=["storage"], policies=["fiddler"])
    with pytest.raises(ConfigError, match="must have a policy"):
        blocks_of(matrix, ON_HOST, sizes(matrix, 1), 100)


# -- end to end --------------------------------------------------------------------------------------


def made_validation(rows: list[Compared], parity: Sequence[Parity]) -> Validation:
    facts = {
        "cpu": "a CPU",
        "cores": 2,
        "memory_bytes": 1 << 34,
        "system": "a system",
        "python": "3",
        "torch": "2",
        "greenroom": "0",
        "device": {"kind": "cpu", "name": "cpu", "memory_bytes": 1 << 34},
    }
    asked = {
        "model": "tiny",
        "engine": "e",
        "dtype": "float32",
        "threads": 1,
        "top_k": 4,
        "expert_bytes": 4096,
        "num_layers": 8,
        "num_experts": 32,
        "hidden_size": 64,
        "intermediate_size": 32,
    }
    block = Block("ram", 1, (("fifo", 0.25),), (("lru", 0.25),))
    seen = Observed(kernels={(4096, 1): Mean(2, 3000)}, copied_bytes=8, copy_busy_ns=4)
    limit = LimitResult("on demand", 2.2e6, 2e6, 1.1, 1.15, True, "2 MB a step")
    played = [Played(block, 3.0, 4, seen)]
    return Validation(compose_matrix(), asked, facts, list(parity), rows, [], played, [limit])


def test_a_met_verdict_is_said_and_returned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = made_validation(GOOD, [SAME])
    assert write(found, tmp_path) == 0
    said = capsys.readouterr().out
    assert "met     median absolute TPOT error: 5.0%" in said
    assert "met     on demand: 1.10 (bar: 1.15)" in said
    text = (tmp_path / "report.md").read_text()
    assert text.splitlines()[2] == "**Verdict: met.**"
    assert "| on demand | 2.20 | 2.00 | 1.10 | 1.15 | met | 2 MB a step |" in text
    assert "is **emulated**" in text
    assert "| ram | 1 | 0.25 | `lru` | 10.00 | 10.50 | +5.0 % | 1.0 % | 8 | same |" in text


def test_a_missed_verdict_is_exit_code_1_and_names_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write(made_validation(GOOD, [SAME, WRONG]), tmp_path) == 1
    assert "1 of 2 runs, 128 plans; lru, ram, batch 1: plan 3" in capsys.readouterr().out
    text = (tmp_path / "report.md").read_text()
    assert f"| ram | 1 | 0.25 | lru | {WRONG.difference} |" in text
    assert json.loads((tmp_path / "validation.json").read_text())["is_met"] is False


def test_a_tiny_validation_end_to_end(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    matrix = tiny_matrix(tiers=["link", "storage"], policies=["lru"], scratch=str(scratch))
    before = threading.active_count()
    found = validate(matrix)
    assert threading.active_count() == before
    assert list(scratch.iterdir()) == []
    code = write(found, tmp_path / "out")
    told = json.loads((tmp_path / "out/validation.json").read_text())
    assert code == (0 if told["is_met"] else 1)
    bars = {bar["name"]: bar["is_met"] for bar in told["verdict"]}
    assert bars["decisions identical in lockstep"]
    assert bars["hits, insertions and bytes identical"]
    rows = list(csv.DictReader((tmp_path / "out/results.csv").open()))
    runs = [(row["tier"], row["policy"], row["is_reference"]) for row in rows]
    assert runs == [
        *(("link", "lru", "False"), ("storage", "lru", "False")),
        *(("link", "fifo", "True"), ("link", "ktransformers_uniform", "True")),
        ("storage", "fifo", "True"),
    ]
    assert {row["num_steps"] for row in rows} == {"6"}  # three turns of two: no time for more
    assert len({row["hits.measured"] for row in rows}) > 1
    assert (tmp_path / "out/validation.png").stat().st_size > 10_000
    text = (tmp_path / "out/report.md").read_text()
    for word in ("## The machine", "`lru`", "(reference)", "storage, batch 1", "0 differ"):
        assert word in text


def test_an_interrupt_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(validate_module, "take_turns", stop)
    before = threading.active_count()
    (tmp_path / "scratch").mkdir()
    given = ["--tiers", "storage", "--policies", "lru", "--ratios", "0.25", "--batch-sizes", "1"]
    given += ["--scratch", str(tmp_path / "scratch"), "--out", str(tmp_path / "out"), "--quick"]
    assert main(["validate", *given, "parity_steps=2", "model=tiny", *TINY]) == 130
    assert threading.active_count() == before
    assert [path.name for path in tmp_path.rglob("*")] == ["scratch"]
    assert "interrupted" in capsys.readouterr().err


# -- mistakes and looks ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tiers", "rom"], "tiers = rom: must be of ram, storage, link; did you mean 'ram'?"),
        (["--ratios", "half"], "--ratios half: must be numbers, by commas"),
        (["--ratios", "1.5"], "ratios = [1.5]: must be a list of different numbers in [0, 1]"),
        (["--policies", "fifo"], "policies = fifo: must not be of the references"),
        (["--policies", "lrv"], "policy = lrv: no such option; did you mean 'lru'?"),
        (["--policies", "hobbit"], "policies = hobbit: has low-precision copies"),
        (["--dtype", "int8"], "dtype = int8: must be of auto, float32, bfloat16, float16"),
        (["stpes=3"], "stpes"),
        (["--threads", "999"], "threads = 999: must be in [1, "),
        (["--scratch", "/nowhere"], "scratch = /nowhere: no such folder"),
        (["--minutes", "0"], "minutes = 0.0: must be a number in (0, 1440]"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [] if "--policies" in arguments else ["--policies", "lru"]
    assert main(["validate", *arguments, *given, "references=[fifo]", "model=tiny"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_quick_gives_way_to_what_is_asked_for() -> None:
    quick = compose_matrix(["steps=50"], {"ratios": [0.5]}, quick=True)
    assert (quick.steps, quick.ratios, quick.minutes) == (50, (0.5,), 3)
    assert set(quick.policies) < set(compose_matrix().policies)


def test_the_figure_shows_every_run_and_tells_what_it_cuts_off() -> None:
    rows = [*GOOD, made("s3fifo", 10, 20), made("lru", 12, 12, tier="link", batch_size=8)]
    figure = validation_figure(run_rows(made_validation(rows, [SAME])), "a machine")
    times, errors = figure.axes
    assert len(times.containers) == len(errors.containers) == len(rows)
    assert [text.get_text() for text in errors.texts] == ["+100%"]
    policies = compose_matrix().policies
    assert len({look(policy).colour for policy in policies}) == len(policies)
    assert [size for size, _ in _BANDS] == [WORST_BAR, MEDIAN_BAR]


def test_bars_are_those_of_the_project() -> None:
    bars: list[Bar] = verdict(GOOD, [SAME])
    assert [bar.rule for bar in bars] == [
        "at most 10%",
        "at most 25%",
        "at least 0.9",
        "all",
        "all",
    ]
