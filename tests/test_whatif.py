"""The what-if table: what each variant changes, what is not run and why, and true runs."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from sim.settings import check_settings
from sim.types import ConfigError
from sim.whatif import WHAT_IF_COLUMNS, what_if, write_what_if
from tests.configs import composed
from tests.perfetto_check import problems, read
from tests.test_cli import greenroom

BASE = {
    "tokens_per_s": 100.0, "tpot_ns_p50": 10.0, "bottleneck": "link", "cache_ratio": 0.25,
    "requests": 10, "storage_utilisation": 0.5,
}  # fmt: skip


def config(trace: Path | str = "trace", **machine: Any) -> dict[str, Any]:
    """Return the settings that variants look at."""
    parts: dict[str, Any] = {
        "gpu": {
            "memory_bytes": 1000, "memory_bytes_per_s": 100, "matmul_flops": 10, "launch_ns": 7,
            "graph_launch_ns": 3, "rate_by_bits": [[2, 30], [4, 60], [8, 100]],
        },
        "link": {"h2d_bytes_per_s": 20, "d2h_bytes_per_s": 10, "pinned": False},
        "cpu": {
            "memory_bytes": 5000, "memory_bytes_per_s": 60, "dram_bytes_per_s": 80,
            "thread_bytes_per_s": 30, "matmul_flops": 4, "handover_ns": 9,
            "rate_by_bits": [[2, 30], [8, 60]], "expert_table": None,
        },
        "storage": {"capacity_bytes": 9000, "curve": [[4096, 1, 100], [4096, 32, 700]]},
    }  # fmt: skip
    return {
        "trace": {"path": str(trace)},
        "machine": {**parts, **machine},
        "engine": {"graph": False, "split": "expert", "storage_access": "direct"},
        "policy": {"scope": "global", "cache": {"_target_": "LRU"}, "placement": {}},
        "cache": {"ratio": 0.25, "bytes": None, "joint_bytes": None},
        "workload": {"batch_size": 2},
        "output": {"events": True, "perfetto": [0, 1], "belady": True, "what_if": True},
    }


def settings(config: dict[str, Any], base: dict[str, Any] = BASE) -> dict[str, str]:
    """Return what each variant changes, or why it is not run."""
    rows = what_if(config, lambda c, f, w: (BASE, None), base)
    return {row["name"]: row["settings"] or row["note"] for row in rows}


def test_each_variant_changes_its_own_settings_and_nothing_else() -> None:
    assert settings(config()) == {
        "link x2": "machine.link.h2d_bytes_per_s=40 machine.link.d2h_bytes_per_s=20",
        "host memory x2": (
            "machine.cpu.memory_bytes_per_s=120 machine.cpu.dram_bytes_per_s=160 "
            "machine.cpu.rate_by_bits=[[2, 40], [8, 120]]"
        ),
        "CPU x2": (
            "machine.cpu.memory_bytes_per_s=120 machine.cpu.thread_bytes_per_s=60 "
            "machine.cpu.matmul_flops=8 machine.cpu.rate_by_bits=[[2, 60], [8, 120]]"
        ),
        "GPU memory x2": "machine.gpu.memory_bytes_per_s=200",
        "GPU compute x2": (
            "machine.gpu.matmul_flops=20 machine.gpu.rate_by_bits=[[2, 60], [4, 100], [8, 100]]"
        ),
        "launches free": "machine.gpu.launch_ns=0 machine.gpu.graph_launch_ns=0",
        "launches from a graph": "engine.graph=true",
        "storage x2": "machine.storage.curve=[[4096, 1, 200], [4096, 32, 1400]]",
        "slots +10%": "cache.ratio=0.275",
        "batch x2": "workload.batch_size=4",
        "no handover": "machine.cpu.handover_ns=0",
        "pinned host memory": "machine.link.pinned=true",
        "all experts resident": (
            "machine.gpu.memory_bytes=10000 policy.cache._target_=sim.policies.classic.Static "
            "cache.ratio=1.0"
        ),
    }  # fmt: skip


def test_a_configuration_is_left_as_it_is_and_variants_only_summarise() -> None:
    asked, given = [], config()
    before = deepcopy(given)
    what_if(given, lambda c, f, w: (asked.append(c["output"]) or BASE, None), BASE)
    assert given == before
    silent = dict.fromkeys(("events", "belady", "what_if", "roofline"), False)
    assert all(output == {**silent, "perfetto": None} for output in asked)
    assert len(asked) == 13


def test_what_a_machine_lacks_is_not_run() -> None:
    phone = settings(config(gpu=None, link=None, storage=None))
    assert {name: note for name, note in phone.items() if "=" not in note} == {
        "link x2": "the machine has no link",
        "GPU memory x2": "the machine has no GPU",
        "GPU compute x2": "the machine has no GPU",
        "launches free": "the machine has no GPU",
        "launches from a graph": "the machine has no GPU",
        "no handover": "the machine has no GPU",
        "pinned host memory": "the machine has no link",
        "storage x2": "the machine has no storage",
    }
    assert phone["all experts resident"].startswith("machine.cpu.memory_bytes=10000 ")


def test_what_could_change_nothing_is_not_run() -> None:
    given = config()
    given["engine"]["graph"] = given["machine"]["link"]["pinned"] = True
    given["workload"]["batch_size"] = 10
    del given["policy"]["placement"]
    found = settings(given, {**BASE, "cache_ratio": 1.0, "storage_utilisation": 0.0})
    assert {name: note for name, note in found.items() if "=" not in note} == {
        "CPU x2": "this policy runs no expert on the CPU",
        "launches from a graph": "they come from one already",
        "storage x2": "nothing is read from storage",
        "slots +10%": "the cache holds all experts already",
        "batch x2": "all requests run at one time already",
        "no handover": "this policy runs no expert on the CPU",
        "pinned host memory": "it is pinned already",
        "all experts resident": "the cache holds all experts already",
    }


def test_a_variant_that_comes_to_the_same_settings_is_not_run() -> None:
    given = config()
    given["machine"]["gpu"] |= {"launch_ns": 0, "graph_launch_ns": 0}
    assert settings(given)["launches free"] == "that is the run as it is"


def test_measured_cpu_times_are_halved_for_the_cpu_and_say_nothing_of_memory() -> None:
    given = config()
    given["machine"]["cpu"] |= {"expert_table": [[4096, 1, 500]], "rate_by_bits": None}
    found = settings(given)
    assert "machine.cpu.expert_table=[[4096, 1, 250]]" in found["CPU x2"]
    assert found["host memory x2"] == "cpu.expert_table does not tell what memory is of its times"


def test_tables_by_bits_are_held_against_what_memory_gives_after_its_derate() -> None:
    """The same achieved rates give the same tables, whether a derate is in between or not."""
    given = config()
    given["machine"]["gpu"] |= {"memory_bytes_per_s": 200, "memory_derate": 0.5}
    given["machine"]["cpu"] |= {"memory_bytes_per_s": 120, "memory_derate": 0.5}
    found, plain = settings(given), settings(config())
    rates = "machine.gpu.rate_by_bits=[[2, 60], [4, 100], [8, 100]]"
    assert rates in found["GPU compute x2"]
    assert rates in plain["GPU compute x2"]
    doubled = "machine.cpu.rate_by_bits=[[2, 40], [8, 120]]"
    assert doubled in found["host memory x2"]
    assert doubled in plain["host memory x2"]


def test_a_tenth_of_the_slots_is_at_least_one_a_layer(small_trace_file: Path) -> None:
    given = config(small_trace_file)  # 16 experts a layer
    given["policy"]["scope"] = "layer"
    ratio = float(settings(given)["slots +10%"].removeprefix("cache.ratio="))
    assert int(16 * ratio) == 5, "4 slots and one more"
    given["machine"]["gpu"]["count"] = 4
    ratio = float(settings(given)["slots +10%"].removeprefix("cache.ratio="))
    assert int(4 * ratio) == 2, "of the 4 experts that each GPU has of a layer, 1 and one more"
    given["cache"]["ratio"] = 0.999
    assert settings(given)["slots +10%"] == "cache.ratio=1.0"
    given["cache"]["bytes"] = 1000
    assert settings(given)["slots +10%"] == "cache.bytes=1100"
    given["cache"] |= {"bytes": None, "joint_bytes": 2000}
    assert settings(given)["slots +10%"] == "cache.joint_bytes=2200"
    assert settings(given)["all experts resident"].endswith(
        "cache.ratio=1.0 cache.joint_bytes=null"
    )


def test_the_greatest_gain_is_first_and_what_was_refused_last() -> None:
    def simulate(changed: dict[str, Any], folder: Path | None, watch: Any) -> Any:
        if changed["workload"]["batch_size"] == 4:
            raise ConfigError("machine.gpu.memory_bytes = 1000: must hold 2.00 GB")
        speed = changed["machine"]["link"]["h2d_bytes_per_s"] * 5.0
        return {**BASE, "tokens_per_s": speed, "tpot_ns_p50": 1000 / speed}, None

    rows = what_if(config(), simulate)
    assert rows[0]["name"] == "link x2"
    assert (rows[0]["tokens_per_s_change"], rows[0]["tpot_change"]) == (1.0, -0.5)
    assert [row["tokens_per_s_change"] for row in rows[1:-1]] == [0.0] * 11
    assert rows[-1] == {
        **dict.fromkeys(WHAT_IF_COLUMNS),
        "name": "batch x2",
        "settings": "workload.batch_size=4",
        "note": "refused: machine.gpu.memory_bytes = 1000: must hold 2.00 GB",
    }


def test_the_bar_shows_which_variant_runs() -> None:
    told: list[str] = []

    @contextmanager
    def bar(words: str) -> Iterator[Callable[[int | None], Any]]:
        told.append(words)
        yield lambda num_steps: words

    def simulate(changed: dict[str, Any], folder: Path | None, watch: Any) -> Any:
        assert watch(7) == told[-1]
        assert folder is not None
        assert folder.is_dir()
        return BASE, None

    what_if(config(), simulate, bar=bar)
    assert told[:2] == ["what if: as it is", "what if: link x2"]
    assert len(told) == 14
    what_if(config(), lambda c, f, watch: (BASE, watch and watch(7)))  # nobody watches


def test_rows_are_written_as_csv(tmp_path: Path) -> None:
    rows = what_if(config(storage=None), lambda c, f, w: (BASE, None), BASE)
    write_what_if(tmp_path / "whatif.csv", rows)
    with (tmp_path / "whatif.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert list(found[0]) == list(WHAT_IF_COLUMNS)
    assert found[-1]["note"] == "the machine has no storage"
    assert [row["name"] for row in found] == [row["name"] for row in rows]


@pytest.mark.parametrize("tokens", [None, 0.0])
def test_a_run_that_yields_nothing_has_no_change(tokens: float | None) -> None:
    base = {**BASE, "tokens_per_s": tokens, "tpot_ns_p50": None}
    rows = what_if(config(), lambda c, f, w: (base, None))
    assert {row["tokens_per_s_change"] for row in rows} == {None}


def test_more_of_what_binds_brings_more_and_the_command_says_so(
    tmp_path: Path, small_trace_file: Path
) -> None:
    trace, link = f"trace.path={small_trace_file}", "machine.link.h2d_bytes_per_s=3000000000"
    run = ("sim", "policy=lru", trace, link, "hydra.run.dir=out")
    done = greenroom(*run, "output.what_if=true", "output.perfetto=[0,2]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    rows = {row["name"]: row for row in summary["what_if"]}
    assert summary["bottleneck"] == "link"
    assert rows["link x2"]["tokens_per_s_change"] > 0.3
    assert rows["all experts resident"]["tokens_per_s"] > rows["link x2"]["tokens_per_s"]
    assert rows["all experts resident"]["bottleneck"] == "gpu"
    assert rows["GPU compute x2"]["tokens_per_s_change"] == pytest.approx(0, abs=0.01)
    with (tmp_path / "out" / "whatif.csv").open(newline="") as file:
        assert [row["name"] for row in csv.DictReader(file)] == list(rows)
    assert "What if" in done.stdout
    assert "Bottleneck: the link, for which the GPU waits" in done.stdout
    assert problems(read(tmp_path / "out" / "timeline.json.gz")) == []
    assert "timeline.json.gz (open it in https://ui.perfetto.dev)" in done.stdout
    again = greenroom(*run, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert not {"whatif.csv", "timeline.json.gz"} & {p.name for p in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("output.perfetto=[3,3]", "must be [first, last + 1], at least one step"),
        ("output.perfetto=[-1,3]", "must be [first, last + 1], at least one step"),
        ("output.perfetto=5", "must be [first, last + 1], at least one step"),
        ("output.what_if=1", "must be true or false"),
        ("output.perfeto=null", "unknown key; did you mean 'perfetto'?"),
    ],
)
def test_a_mistaken_output_setting_is_told(override: str, rule: str) -> None:
    key, _, value = override.partition("=")
    changed = composed()
    changed["output"][key.partition(".")[2]] = json.loads(value)
    with pytest.raises(ConfigError) as caught:
        check_settings(changed)
    assert str(caught.value).startswith(key)
    assert rule in str(caught.value)
