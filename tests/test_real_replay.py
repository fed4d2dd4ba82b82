"""``greenroom replay`` as a user meets it: files, words, tiers, a prediction beside it, mistakes, Ctrl-C."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from real.replay import Replay
from real.replay_cli import main
from real.replay_config import RealSettings, compose_replay, format_of_replay, simulated_config
from sim.build import build
from sim.cli import main as greenroom
from sim.counter import STEP_COLUMNS
from sim.events import EVENT_COLUMNS, Lane
from sim.lockstep import run_lockstep
from sim.result_tables import StoredTable
from sim.results import EVENTS, REQUESTS, STEPS
from tests.configs import composed

FEW = ("model=tiny", "workload.requests=[24,26]", "workload.length=[4,5]", "output.belady=false")
OWN = ("real.threads=1", "real.device=cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def ran(folder: Path, *overrides: str) -> dict[str, Any]:
    """Run into a folder; return the summary."""
    assert main([*FEW, *OWN, *overrides, "--out", str(folder)]) == 0
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def sums(folder: Path) -> dict[str, int]:
    """Return the step table's counts, the times left out."""
    rows = np.concatenate(list(StoredTable(folder / STEPS)))
    counts = dict(zip(STEP_COLUMNS, rows.sum(axis=0).tolist(), strict=True))
    left_out = (
        "kernels",
        "gather_bytes",
        "padding_tokens",
    )  # which nobody counts in a measured run
    return {k: v for k, v in counts.items() if not k.endswith("_ns") and k not in left_out}


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


# -- what it leaves --------------------------------------------------------------------------------


def test_a_run_leaves_the_files_of_a_simulated_one_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = ran(tmp_path, "output.perfetto=[0,3]", "real.sim=true")
    files = {"summary.json", "steps.parquet", "requests.parquet", "config.yaml", "events.parquet"}
    files |= {"counters.parquet", "timeline.json.gz"}
    own = {name for name in names(tmp_path) if not name.startswith("simulated/")}
    assert own == files | {"side_by_side.json.gz"}
    assert names(tmp_path / "simulated") == files
    simulated = json.loads((tmp_path / "simulated" / "summary.json").read_text())
    assert set(summary) - set(simulated) == {"described_as", "spent", "predicted"}
    assert set(simulated) <= set(summary)
    for name in (STEPS, REQUESTS, EVENTS):
        ours, theirs = (
            pq.read_schema(where / name) for where in (tmp_path, tmp_path / "simulated")
        )
        assert ours.equals(theirs)
    metadata = json.loads(pq.read_schema(tmp_path / STEPS).metadata[b"greenroom_provenance"])
    assert metadata["measurement"]["tier"] == "storage"
    text = shown(capsys)
    for words in (
        "measured on", "Measured, not simulated: ", "device cpu, 1 thread, torch ", "bfloat16 from storage",
        "A layer took", "waiting for experts", "decisions", "Python", "of a budget of",
        "predicted / measured",
        "Side by side: ", f"Results: {tmp_path}",
    ):  # fmt: skip
        assert words in text, words


def test_every_moment_is_accounted_for_and_earlier_results_go(tmp_path: Path) -> None:
    ran(tmp_path, "output.perfetto=[0,2]", "real.sim=true")
    summary = ran(tmp_path)
    assert names(tmp_path) == {"summary.json", "steps.parquet", "requests.parquet", "config.yaml"}
    spent = summary["spent"]
    assert spent["layer_steps"] == 2 * (1 + 4) * 8
    parts = [spent[f"{name}_ns"] for name in ("kernels", "waiting", "decisions", "python")]
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(spent["layer_ns"])
    assert 0 < spent["slots_bytes"] <= spent["budget_bytes"]
    assert spent["peak_bytes"] == spent["slots_bytes"]


# -- tiers and policies ----------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["ram", "storage", "link"])
def test_counts_and_bytes_are_those_of_the_simulator_on_every_tier(
    tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = ran(tmp_path, f"real.tier={tier}", "real.link_bytes_per_s=1e9", "real.sim=true")
    assert sums(tmp_path) == sums(tmp_path / "simulated")
    rows = {row["quantity"]: row for row in summary["predicted"]}
    assert rows["bytes moved"]["measured"] > 0
    for name in ("hit rate", "loads", "bypasses", "bytes moved"):
        assert rows[name]["ratio"] == 1, name
    speed = rows["tokens/s"]
    assert speed["ratio"] == pytest.approx(speed["predicted"] / speed["measured"])
    measurement = summary["provenance"]["measurement"]
    assert measurement["is_emulated"] == (tier == "link")
    text = shown(capsys)
    assert ("over an emulated link of 1 GB/s" in summary["machine"]) == (tier == "link")
    assert ("emulated: no such link was measured" in text) == (tier == "link")


@pytest.mark.parametrize("policy", ["prefetch_perfect", "hobbit"])
def test_in_lockstep_decisions_are_those_without_a_clock(policy: str, tmp_path: Path) -> None:
    more = [f"policy={policy}", *(["policy.low.bits=8"] if policy == "hobbit" else [])]
    overrides = [*more, "real.tier=ram", "real.lockstep=true", "workload.batch_size=2"]
    summary = ran(tmp_path, *overrides)
    config, _ = compose_replay([*FEW, *OWN, *overrides])
    settings = RealSettings.from_config(config)
    scenario = build(simulated_config(config, settings, format_of_replay(config, settings)))
    rows = np.array(run_lockstep(scenario.workload, scenario.offloader).rows)
    found = sums(tmp_path)
    for place, name in enumerate(STEP_COLUMNS):
        if name in ("hits", "loads", "bypasses", "prefetches", "evictions", "accesses"):
            assert found[name] == rows[:, place].sum(), name
    assert any("real.lockstep" in note for note in summary["notes"])
    assert (tmp_path / "ledger.parquet").exists() == (policy == "hobbit")


def test_a_policy_that_computes_on_the_host_does_so(tmp_path: Path) -> None:
    summary = ran(tmp_path, "policy=fiddler", "real.tier=ram", "output.events=true")
    rows = np.concatenate(list(StoredTable(tmp_path / EVENTS)))
    on_host = rows[:, EVENT_COLUMNS.index("lane")] == Lane.CPU
    assert on_host.sum() == summary["on_cpu"] > 0


def test_experts_in_another_dtype_take_its_bytes(tmp_path: Path) -> None:
    summary = ran(tmp_path, "real.dtype=float32")
    assert summary["read_bytes"] == summary["reads"] * 3 * 128 * 48 * 4 > 0


# -- stores ----------------------------------------------------------------------------------------


def test_a_store_that_is_named_is_kept_and_used_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "experts.bin"
    first = ran(tmp_path / "one", f"real.store={path}")
    made = path.stat()
    again = ran(tmp_path / "two", f"real.store={path}")
    assert path.stat() == made or path.stat().st_mtime_ns == made.st_mtime_ns
    assert first["loads"] == again["loads"]
    capsys.readouterr()
    for override, words in (("real.seed=7", "must be from"), ("real.dtype=int8", "must hold")):
        assert (
            main([*FEW, *OWN, f"real.store={path}", override, "--out", str(tmp_path / "no")]) == 2
        )
        assert words in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_reads_that_are_not_direct_are_said_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("real.aligned_io._try_direct", lambda path: "it was switched off")
    summary = ran(tmp_path)
    seen = capsys.readouterr()
    assert "storage is read through the page cache: it was switched off" in seen.err
    assert "not O_DIRECT: it was switched off" in " ".join(seen.out.split())
    assert summary["provenance"]["measurement"]["is_direct"] is False


# -- what cannot be --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("real.teir=ram", "real.teir: unknown key; did you mean 'real.tier'?"),
        (
            "real.tier=strage",
            "real.tier = strage: must be one of ram, storage, link; did you mean 'storage'?",
        ),
        ("real.dtype=bf16", "real.dtype = bf16: must be one of float32, bfloat16"),
        ("+real.tire=1", "real.tire: unknown key; did you mean 'tier'?"),
        ("real.threads=0", "real.threads = 0: must be a whole number >= 1"),
        ("real.threads=100000", "real.threads = 100000: must be in [1, "),
        ("real.device=gpu", "device = gpu: must be auto, cpu, cuda or cuda:N"),
        ("real.tier=ram real.store=x.bin", "real.store = x.bin: must be null with real.tier = ram"),
        (
            "policy=fiddler",
            "policy/fiddler: placement: with real.tier = storage no expert is in host memory",
        ),
        ("machine=jetson_agx_orin real.tier=ram", "machine/jetson_agx_orin is a unified machine"),
        ("cache.joint_bytes=4e8", "cache.joint_bytes: the real backend cannot do this"),
        ("engine=fused", "engine.graph = True: the real backend cannot do this; must be false"),
        ("engine.storage_block_bytes=1000", "must be a multiple of 4096"),
        (
            "model=deepseek_v2_lite",
            "must have no dense-only layers, shared experts or latent attention",
        ),
        ("output.what_if=true", "output.what_if = true: it is of a simulation"),
        (
            "output.perfetto=[500,null]",
            "output.perfetto = [500, null]: must begin at a step of the run",
        ),
        ("real.store=/nowhere/x.bin", "/nowhere/x.bin: cannot write: No such file or directory"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    overrides: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "a" / "b"
    given = [word for word in (*FEW, *OWN) if word.partition("=")[0] not in overrides]
    assert main([*given, *overrides.split(), "--out", str(where)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("greenroom replay: error: ")
    assert message in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_threads_and_takes_away_what_is_unfinished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, seen = Replay.step, []

    def step(self: Replay) -> Any:
        seen.append([path.name for path in (tmp_path / "a").iterdir()])
        if len(seen) == 4:
            raise KeyboardInterrupt
        return whole(self)

    monkeypatch.setattr(Replay, "step", step)
    arguments = ["replay", *FEW, *OWN, "output.events=true", "--out", str(tmp_path / "a")]
    assert greenroom(arguments) == 130
    assert "interrupted" in capsys.readouterr().err
    assert any(name.endswith("experts.bin") for name in seen[-1]), "it was there while it ran"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("copies")]
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_leaves_earlier_results_and_a_kept_store_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"real.store={tmp_path / 'x.bin'}"
    first = ran(tmp_path / "a", store)
    before = names(tmp_path)

    def step(self: Replay) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Replay, "step", step)
    assert greenroom(["replay", *FEW, *OWN, store, "--out", str(tmp_path / "a")]) == 130
    assert names(tmp_path) == before
    assert json.loads((tmp_path / "a" / "summary.json").read_text()) == first


# -- the command -----------------------------------------------------------------------------------


def test_help_names_every_setting_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    config, _ = compose_replay(["real.device=cpu"])
    for key in config["real"]:
        assert f"real.{key}" in text, key


def test_settings_are_those_of_the_simulator_and_the_group_real() -> None:
    config, _ = compose_replay(["real.device=cpu"])
    plain = composed()
    assert set(config) - set(plain) == {"real"}
    assert {
        group: set(config[group]) for group in plain if group != "engine"
    }.keys() <= config.keys()
    for group in ("cache", "calibration", "estimate", "output"):
        assert config[group] == plain[group]
    changed = {key for key, value in config["workload"].items() if plain["workload"][key] != value}
    assert changed == {"requests", "length"}
    assert config["engine"]["name"] == "greenroom_cpu"


def test_options_of_the_users_own_are_found(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    text = "name: mine\nscope: layer\ncache: {_target_: sim.policies.classic.LRU}\n"
    (tmp_path / "policy" / "mine.yaml").write_text(text)
    summary = ran(tmp_path / "out", "policy=mine", "--config-dir", str(tmp_path))
    assert (summary["policy"], summary["overrides"]["policy"]) == ("mine", "mine")
