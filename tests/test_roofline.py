"""Rooflines: amounts and roofs by hand on round hardware, and that no run is above its own."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hwmodels.placement import Placement
from hwmodels.predict import Case, predict
from hwmodels.usage import Usage
from sim.cases import case_of, compose_case
from sim.counter import STEP_COLUMNS
from sim.figures.rooflines import points_figure, run_figure
from sim.report_roofline import amount, roofline_line, roofline_table, write_roofline
from sim.roofline import Resource, Roofline, roofline_of_prediction, roofline_of_run
from sim.roofline_work import CountingCosts
from sim.simulate import simulate
from sim.types import KeySpace, LayerPlan, LayerRouting
from tests import round_hardware
from tests.configs import composed
from tests.test_cli import greenroom


def counting(**changes: Any) -> CountingCosts:
    return CountingCosts(round_hardware.costs(**changes), KeySpace(2, 4))


def plan(layer: int, experts: list[int], on_cpu: tuple[int, ...] = ()) -> LayerPlan:
    """Return a plan of one token's experts, those of ``on_cpu`` not on the GPU."""
    keys = [4 * layer + expert for expert in experts]
    made = LayerPlan(LayerRouting(layer, keys, [1] * len(keys)), keys)
    made.on_cpu = [4 * layer + expert for expert in on_cpu]
    return made


# -- amounts ---------------------------------------------------------------------------------------


def test_one_decode_step_by_hand() -> None:
    # Layers: 360 bytes and 3 KV entries of 10; head 1000 and an embedding of 10 x 2; experts of 600.
    costs = counting()
    costs.dense_ns(1, 3, 3)
    costs.on_plan(plan(0, [0, 1]))
    costs.on_plan(plan(1, [2, 3], on_cpu=(3,)))
    costs.step_ns(1, 1, 3, 3)
    costs.count_kernels(15, 0)
    work = costs.work
    assert work.device_bytes.amount == 2 * (360 + 30) + 1020 + 3 * 600
    assert work.device_bytes.least_ns == pytest.approx(3600)
    # Two operations a weight, 40 a pair of token and entry; ten a nanosecond.
    assert work.device_ops.amount == 2 * 2 * 360 + 2 * 3 * 40 + 2 * 1000 + 3 * 1200
    assert work.device_ops.least_ns == pytest.approx(728)
    # 10 launches a layer, 4 a step and 15 of experts, each 7 ns.
    assert work.launches.amount == 2 * 10 + 4 + 15
    assert work.launches.least_ns == pytest.approx(39 * 7)
    assert (work.cpu_bytes.amount, work.cpu_bytes.least_ns) == (600, 600)
    assert (work.cpu_ops.amount, work.cpu_ops.least_ns) == (1200, 120)


def test_a_chunk_of_a_prompt_reads_no_head_and_each_expert_once() -> None:
    costs = counting()
    made = plan(0, [0, 1])
    made.routing.token_counts = [5, 3]  # type: ignore[misc]
    costs.on_plan(made)
    assert costs.work.device_bytes.amount == 2 * 600
    assert costs.work.device_ops.amount == 8 * 1200
    before = costs.work.device_bytes.amount
    costs.step_ns(5, 0, 5, 15)
    assert costs.work.device_bytes.amount - before == 5 * 10 * 2


def test_experts_that_decode_slower_than_memory_have_their_own_rate() -> None:
    slow = ((2.0, round_hardware.BYTE_A_NS // 4), (16.0, round_hardware.BYTE_A_NS))
    shape = round_hardware.shape(expert_bits=2.0)
    costs = CountingCosts(round_hardware.costs(shape, gpu_rate_by_bits=slow), KeySpace(2, 4))
    costs.on_plan(plan(0, [0]))
    assert (costs.work.device_bytes.amount, costs.work.device_bytes.least_ns) == (150, 600)


def test_counting_changes_no_price() -> None:
    plain, costs = round_hardware.costs(), counting()
    assert costs.dense_ns(3, 9, 20) == plain.dense_ns(3, 9, 20)
    assert costs.step_ns(3, 1, 9, 20) == plain.step_ns(3, 1, 9, 20)


# -- formulas --------------------------------------------------------------------------------------


def test_a_row_by_hand() -> None:
    # 4 tokens in 1 s; 8 GB at 16 GB/s need half of it; it worked 0.8 s and was waited for 0.6 s.
    link = Resource("link to the GPU", "B", 8e9, 5e8, 2e10, 8e8, 6e8)
    (row,) = Roofline(4, 1e9, (link,)).rows()
    assert row["amount_per_token"] == 2e9
    assert row["achieved_per_s"] == pytest.approx(8e9)
    assert row["limit_per_s"] == pytest.approx(16e9)
    assert row["rated_per_s"] == 2e10
    assert row["utilisation"] == 0.5
    assert row["busy_share"] == 0.8
    assert row["busy_utilisation"] == 0.625
    assert row["waited_share"] == 0.6
    assert row["least_ns_per_token"] == 1.25e8
    assert (row["tokens_per_s"], row["tokens_per_s_limit"]) == (4, 8)
    assert row["times_from_limit"] == 2


def test_what_is_shown_of_it(tmp_path: Path) -> None:
    link = Resource("link to the GPU", "B", 8e9, 5e8, None)
    kernels = Resource("GPU: kernel launches", "kernel", 4000, 1e7)
    rows = Roofline(4, 1e9, (link, kernels)).rows()
    assert roofline_line(rows) == (
        "Roofline: bound by link to the GPU: 4.0 of 8.0 tokens/s, 2.00 times from its limit; a token takes "
        "at least 2 GB at 16 GB/s."
    )
    assert roofline_table(rows).row_count == 2
    write_roofline(tmp_path / "roofline.csv", rows)
    with (tmp_path / "roofline.csv").open() as file:
        assert [row["resource"] for row in csv.DictReader(file)] == [link.name, kernels.name]


def test_amounts_are_written_short() -> None:
    assert [amount(1.5e9, "B"), amount(999, "B"), amount(2e13, "op"), amount(1e3, "kernel")] == [
        "1.5 GB", "999 B", "20 Top", "1 k",
    ]  # fmt: skip
    assert amount(None, "B") == "-"


# -- runs ------------------------------------------------------------------------------------------

BUNDLED = "trace.path=pkg://traces.tiny/trace.parquet"
RUNS = {
    "link": ("policy=lru",),
    "chunks": ("policy=prefetch_previous", "engine=chunked"),
    "grouped": ("policy=lru", "engine=fused", "workload.batch_size=3", "machine=gh200"),
    "CPU": ("policy=fiddler", "workload.batch_size=2"),
    "both": ("policy=hybrimoe", "workload.batch_size=3"),
    "four GPUs": ("policy=fiddler", "machine=rtx4090_x4"),
    "shared matrices": ("policy=static", "machine=rtx4090_x4", "engine=ktransformers"),
    "storage": ("policy=lru", "cache.host_bytes=1e9", "cache.bytes=3e8"),
    "one memory": ("policy=lru", "machine=jetson_agx_orin"),
    "phone": ("policy=lru", "machine=phone_sd8gen3"),
    "two nodes": ("policy=static", "machine=xeon4510_x2", "cache.ratio=1"),
    "repacked": ("policy=saem", "workload.batch_size=4", "engine=fused"),
    "low precision": ("policy=hobbit", BUNDLED, "workload.length=[4,6]"),
    "open arrivals": ("policy=lru", "workload.arrivals=poisson", "workload.rate_per_s=20"),
}


def settings(trace: Path, *overrides: str) -> dict[str, Any]:
    fixed = ("output.belady=false", "output.roofline=true", "workload.requests=[4,6]")
    return composed(f"trace.path={trace}", "cache.ratio=0.5", *fixed, *overrides)


@pytest.mark.parametrize("name", RUNS)
def test_no_run_is_above_its_roof_nor_changed_by_being_counted(
    name: str, small_trace_file: Path
) -> None:
    config = settings(small_trace_file, *RUNS[name])
    summary, tables = simulate(config)
    config["output"]["roofline"] = False
    plain, same = simulate(config)
    assert same.steps.rows == tables.steps.rows
    rows = summary.pop("roofline")
    assert summary == plain
    assert rows == sorted(rows, key=lambda row: -row["utilisation"])
    for row in rows:
        assert 0 < row["utilisation"] <= 1 + 1e-9, row["resource"]
        assert row["tokens_per_s"] <= row["tokens_per_s_limit"] * (1 + 1e-9)
        assert (row["busy_utilisation"] or 0) <= 1 + 1e-9, row["resource"]
    assert sum(row["waited_share"] or 0 for row in rows) <= 1.01 / (1 - _idle(summary))


def _idle(summary: dict[str, Any]) -> float:
    return float(summary["idle_ns"] / summary["total_ns"])


def test_amounts_of_a_run_are_those_of_its_tables(small_trace_file: Path) -> None:
    config = settings(small_trace_file, "policy=fiddler", "workload.batch_size=2")
    summary, tables = simulate(config)
    found = {row["resource"]: row["amount"] for row in summary["roofline"]}
    # An expert of Qwen3-30B-A3B is 3 x 2048 x 768 weights of 16 bits.
    expert = 3 * 2048 * 768 * 2
    assert found["CPU: weights"] == (summary["on_cpu"] + summary["hits_on_cpu"]) * expert
    assert found["host memory"] == tables.dram_bytes
    accesses = sum(row[STEP_COLUMNS.index("accesses")] for row in tables.steps.rows)
    on_gpu = accesses - summary["on_cpu"] - summary["hits_on_cpu"]
    shape = config["model"]
    head = shape["vocab_size"] * shape["hidden_size"] * 2
    outputs = summary["output_tokens"]
    assert (
        found["GPU: memory"] > on_gpu * expert + outputs // 2 * head
    )  # two tokens share one reading
    # Decoding only adds KV entries and activations: the rest is small.
    layers = 4 * (2 * 2048 * (32 + 4) * 128 + 2048 * 16 + 2 * 2048) * 2
    fixed = on_gpu * expert + summary["steps"] * (layers + head)
    assert found["GPU: memory"] == pytest.approx(fixed, rel=0.02)


def test_all_copies_behind_a_switch_count(small_trace_file: Path) -> None:
    config = settings(small_trace_file, "policy=lru", "machine=rtx4090_x4", "engine=serial")
    config["machine"]["link"]["switch_bytes_per_s"] = 10**10  # less than half of one link
    summary, _ = simulate(config)
    found = {row["resource"]: row for row in summary["roofline"]}["link to the GPU"]
    assert found["amount"] == summary["h2d_bytes"]
    assert found["busy_share"] is None


def test_a_link_that_never_rests_is_at_its_roof(small_trace_file: Path) -> None:
    config = settings(small_trace_file, "policy=on_demand", "workload.requests=[4,5]")
    config["machine"]["link"] |= {"h2d_bytes_per_s": 10**6, "copy_gap_ns": 0, "copy_setup_ns": 0}
    summary, _ = simulate(config)
    binding = summary["roofline"][0]
    assert binding["resource"] == "link to the GPU"
    assert binding["limit_per_s"] == pytest.approx(10**6)
    assert binding["times_from_limit"] == pytest.approx(1, abs=1e-3)
    assert binding["waited_share"] == pytest.approx(1, abs=1e-3)


def test_derates_part_what_is_rated_from_what_is_reached(small_trace_file: Path) -> None:
    config = settings(small_trace_file, "policy=lru", "machine.link.rate_derate=0.5")
    rows = {row["resource"]: row for row in simulate(config)[0]["roofline"]}
    link = rows["link to the GPU"]
    assert link["limit_per_s"] == pytest.approx(link["rated_per_s"] / 2)


def test_without_output_there_is_no_roofline() -> None:
    nothing: Any = {"total_ns": 0, "output_tokens": 0}
    tables: Any = type("Tables", (), {"idle_ns": 0})
    assert roofline_of_run({}, None, tables, nothing, None) is None  # type: ignore[arg-type]


# -- predictions -----------------------------------------------------------------------------------


def placed(**changes: Any) -> Placement:
    plain = compose_case(["placement=offload"]).config["placement"]
    return Placement.from_mapping({**plain, **changes})


def test_a_prediction_by_hand() -> None:
    # All experts loaded, one token: 4 experts of 600 bytes over a link of a byte a nanosecond.
    usage = Usage("uniform", "stated", None, None)
    case = Case(round_hardware.costs(), placed(gpu_ratio=0), usage, 1, 3)
    prediction = predict(case)
    rows = {row["resource"]: row for row in roofline_of_prediction(prediction).rows()}
    assert rows["link to the GPU"]["amount_per_token"] == 2400
    assert rows["link to the GPU"]["least_ns_per_token"] == 2400
    assert rows["GPU: memory"]["amount_per_token"] == 2 * (360 + 30) + 1000 + 2400
    assert rows["link to the GPU"]["tokens_per_s"] == pytest.approx(1e9 / prediction.tpot_ns)


@pytest.mark.parametrize("placement", ["offload", "hybrid", "cpu_layers", "gpu_share", "gpu_only"])
@pytest.mark.parametrize("engine", ["llama_cpp", "ktransformers", "serial", "fused"])
def test_no_prediction_is_above_its_roof(placement: str, engine: str) -> None:
    case = case_of(compose_case([f"placement={placement}", f"engine={engine}"]).config)
    for batch in (1, 16):
        found = roofline_of_prediction(predict(replace(case, batch_size=batch)))
        assert found.resources
        assert all(row["utilisation"] <= 1 + 1e-9 for row in found.rows())


def test_a_machine_without_a_link_reads_storage_or_its_own_memory() -> None:
    case = case_of(compose_case(["placement=offload", "machine=jetson_agx_orin"]).config)
    names = {resource.name for resource in roofline_of_prediction(predict(case)).resources}
    assert names >= {"storage", "GPU: memory"}


# -- figures ---------------------------------------------------------------------------------------


def test_marks_lie_below_roofs_in_the_figure_of_a_run() -> None:
    case = Case(round_hardware.costs(), placed(), Usage("uniform", "stated", None, None), 1, 3)
    rows = roofline_of_prediction(predict(case)).rows()
    (axes,) = run_figure(rows).axes
    low, high = axes.get_ylim()
    assert low < rows[0]["tokens_per_s"] < rows[0]["tokens_per_s_limit"] < high
    assert axes.get_title().startswith(f"bound by {rows[0]['resource']}, ")


def test_a_sweep_has_a_panel_a_resource_that_matters(small_trace_file: Path) -> None:
    rows = [
        {**simulate(settings(small_trace_file, f"policy={name}"))[0], "overrides": {}}
        for name in ("lru", "fiddler")
    ]
    figure = points_figure(rows)
    assert figure is not None
    titles = [axes.get_title() for axes in figure.axes]
    for name in ("link to the GPU (", "CPU: weights ("):
        assert any(title.startswith(name) for title in titles)
    assert points_figure([{**row, "roofline": []} for row in rows]) is None


def test_a_run_on_the_command_line_leaves_table_and_figure(
    tmp_path: Path, small_trace_file: Path
) -> None:
    done = greenroom(
        "sim", f"trace.path={small_trace_file}", "output.roofline=true", "output.belady=false",
        f"hydra.run.dir={tmp_path}", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Roofline: bound by " in done.stdout
    assert (tmp_path / "roofline.png").stat().st_size > 1000
    with (tmp_path / "roofline.csv").open() as file:
        assert next(csv.DictReader(file))["resource"]
