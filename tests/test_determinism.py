"""The same configuration gives the same bytes: in any process, place, language, engine and order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from configs import CONF, composed, options

import sim.sweeps.coordinator as coordinator
from sim.sweeps.chunk import Chunk
from sim.sweeps.coordinator import run_sweep
from sim.sweeps.serial import SerialEngine

ROOT = Path(__file__).parents[1]
SHORT = ("workload.requests=[24,26]", "workload.length=[3,3]", "output.belady=false")
WORLDS: dict[str, tuple[str, dict[str, str]]] = {
    "one": (
        "here",
        {
            "PYTHONHASHSEED": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TZ": "UTC",
            "LC_ALL": "C",
        },
    ),
    "another": (
        "spawn",
        {
            "PYTHONHASHSEED": "2",
            "OMP_NUM_THREADS": "2",
            "OPENBLAS_NUM_THREADS": "2",
            "ARROW_DEFAULT_MEMORY_POOL": "system",
            "TZ": "Asia/Kathmandu",
            "LC_ALL": "C.UTF-8",
            "COLUMNS": "40",
        },
    ),
    "a third": ("fork", {"PYTHONHASHSEED": "random", "TZ": "America/St_Johns", "PYTHONUTF8": "1"}),
    "a fourth": ("forkserver", {"PYTHONHASHSEED": "0", "PYTHONOPTIMIZE": "1", "NO_COLOR": "1"}),
}
FEW = ("saem", "mrs", "ktransformers_random")


def _begun(world: str, configs: Path, folder: Path) -> subprocess.Popen[str]:
    method, settings = WORLDS[world]
    folder.mkdir()
    env = {
        k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHON"))
    } | settings
    words = [str(ROOT / "tests" / "digests.py"), str(configs), str(folder / "runs"), method]
    return subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=env, stdout=subprocess.PIPE, text=True
    )


def _digests(configs: dict[str, Any], worlds: Sequence[str], folder: Path) -> list[dict[str, str]]:
    """Return what all these configurations leave in each world."""
    path = folder / "configs.json"
    path.write_text(json.dumps(configs))
    begun = [_begun(world, path, folder / world.replace(" ", "_")) for world in worlds]
    said = [process.communicate()[0] for process in begun]
    assert [process.returncode for process in begun] == [0] * len(worlds)
    return [json.loads(text) for text in said]


def _configs(names: Sequence[str], *words: str) -> dict[str, Any]:
    """Return a configuration a policy; those whose file is all there is to it are not composed anew."""
    import yaml

    base = composed(*SHORT, *words)
    found = {}
    for name in names:
        held = yaml.safe_load((CONF / "policy" / f"{name}.yaml").read_text(encoding="utf-8"))
        whole = "defaults" in held or "${" in str(held)
        found[name] = (
            composed(*SHORT, *words, f"policy={name}") if whole else {**base, "policy": held}
        )
    return found


def test_every_policy_leaves_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    configs = _configs(options("policy"))
    one, another = _digests(configs, ("one", "another"), tmp_path)
    assert len(one) == len(configs) > 80
    assert {name for name in one if one[name] != another[name]} == set()
    failed = {name: text for name, text in one.items() if text.startswith("error")}
    assert all("which the trace does not have" in text for text in failed.values()), failed
    assert len({*one.values()} - {*failed.values()}) == len(one) - len(
        failed
    )  # it tells runs apart


def test_all_outputs_are_the_same_however_a_process_is_begun(tmp_path: Path) -> None:
    words = ("output.events=true", "output.roofline=true", "output.perfetto=[0,2]")
    configs = _configs(FEW, *words, "workload.arrivals=poisson", "workload.rate_per_s=5")
    configs["what_if"] = composed(*SHORT, *words, "output.what_if=true", "workload.batch_size=2")
    found = _digests(configs, list(WORLDS), tmp_path)
    assert all(one == found[0] for one in found)
    assert not any(text.startswith("error") for text in found[0].values())


# -- sweeps -----------------------------------------------------------------------------------------

GRID = ["policy=lru,saem,mrs", "cache.ratio=0.125,0.5", "workload.seed=0,1", *SHORT]


class Backwards(SerialEngine):
    """Runs what it is given last first."""

    def submit(self, chunks: Sequence[Chunk]) -> None:
        super().submit(chunks)
        self._waiting.reverse()


def _swept(folder: Path, *words: str) -> dict[str, bytes]:
    outcome = run_sweep([*GRID, f"sweep.dir={folder}", *words])
    assert (len(outcome.rows), outcome.failed) == (12, [])
    names = ["results.parquet", "results.csv", *(f"{n}/summary.json" for n in range(12))]
    return {name: (folder / name).read_bytes() for name in names}


def test_a_sweep_leaves_the_same_bytes_whoever_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = _swept(tmp_path / "serial", "sweep=serial")
    for workers, chunk in ((1, 7), (2, 1), (3, 5)):
        words = (f"sweep.workers={workers}", f"sweep.chunk={chunk}")
        assert _swept(tmp_path / f"pool{workers}", *words) == alone
    monkeypatch.setattr(coordinator, "engine_of", lambda *_: Backwards())
    assert _swept(tmp_path / "backwards", "sweep=serial", "sweep.chunk=1") == alone


def test_a_point_of_a_sweep_is_the_run_alone(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    run_sweep(
        ["policy=lru,saem", *SHORT, f"sweep.dir={folder}", "sweep.workers=2", "sweep.tables=true"]
    )
    configs = {f"{name}": composed(*SHORT, f"policy={name}") for name in ("lru", "saem")}
    for number, name in enumerate(configs):
        _digests({name: configs[name]}, ["one"], _made(tmp_path / name))
        alone = tmp_path / name / "one" / "runs" / name
        for file in alone.glob("*.parquet"):
            assert file.read_bytes() == (folder / str(number) / file.name).read_bytes(), file.name
        assert len([*alone.glob("*.parquet")]) >= 2


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
