"""One replay from a composed configuration to results in a folder: the files of a simulated run, measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from real.dense import DenseWork
from real.device import Device
from real.executor import Executor
from real.machine_facts import cpu_name, num_cores
from real.replay import Replay, dense_work
from real.replay_config import RealSettings, format_of_replay, simulated_config
from real.replay_store import opened_store, source_of
from real.rig import build_executor, real_scenario
from real.store import Progress, Store
from real.store_file import FileStore
from sim.build import Scenario
from sim.metrics import RunTables, Totals
from sim.perfetto import check_window
from sim.result_tables import streamed_tables
from sim.simulate import Watch, choices_of, metrics_of, provenance_of
from sim.types import ConfigError


def replay(
    config: Mapping[str, Any],
    folder: Path,
    device: Device,
    *,
    watch: Watch | None = None,
    progress: Progress | None = None,
    tell: Callable[[str], None] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a composed configuration; return its summary row, and the configuration for the simulator.

    Parameters
    ----------
    config
        Of conf/replay.yaml, resolved.
    folder
        Where the tables go while the run goes on; they are there whole or not at all.
    device
        What computes.
    watch
        Is told the number of steps and returns what to call after each.
    progress
        Is told how many experts are written, and of how many.
    tell
        Is told what a reader must know before it runs, one line each.

    Raises ConfigError for what cannot run, RealError for a fault of a file or of the machine.
    """
    settings = RealSettings.from_config(config)
    form = format_of_replay(config, settings)
    plain = simulated_config(config, settings, form)
    scenario = real_scenario(plain)
    check_window(plain, scenario.workload.num_steps)
    dense = dense_work(scenario, device, form, settings.seed)
    threads = settings.threads or (1 if device.kind == "cpu" else None)
    source, totals = source_of(scenario.shape, form, settings.seed), Totals()
    folder.mkdir(parents=True, exist_ok=True)
    with (
        device.faults(),
        kernel_threads(threads),
        opened_store(source, settings, device, folder, progress) as store,
    ):
        measurement = _measurement(settings, device, store)
        if tell is not None and measurement["why_not_direct"]:
            tell(f"storage is read through the page cache: {measurement['why_not_direct']}")
        provenance = {**provenance_of(plain, scenario), "measurement": measurement}
        shape = scenario.workload.num_experts, wants_events(plain), scenario.workload.num_layers
        lossy = scenario.offloader.policies.lossy
        with (
            streamed_tables(folder, totals, provenance, *shape, lossy) as tables,
            Run(scenario, dense, store, device, settings, tables) as run,
        ):
            run.all_steps(watch)
            spent = run.spent()
    summary = {**choices_of(plain, scenario), **metrics_of(plain, scenario, totals, tables)}
    summary |= _labels(summary, device, settings)
    held_bytes = spent["peak_bytes"] + (spent["dense_bytes"] if device.kind == "cpu" else 0)
    summary |= {"gpu_bytes": held_bytes, "spent": spent, "provenance": provenance}
    return summary, plain


def wants_events(config: Mapping[str, Any]) -> bool:
    """Tell whether a run keeps its event table."""
    output = config["output"]
    return bool(output["events"] or output["perfetto"] is not None)


class Run:
    """A replay with memory of its own, which it gives back: a context manager.

    Parameters
    ----------
    scenario, dense, store, device, settings
        What runs, its layers but for experts, where these wait, what computes, and the group ``real``.
    tables
        What the run fills.
    """

    def __init__(
        self,
        scenario: Scenario,
        dense: DenseWork,
        store: Store,
        device: Device,
        settings: RealSettings,
        tables: RunTables,
    ) -> None:
        self._scenario = scenario
        self._device = device
        device.reset_peak()
        self.executor: Executor = build_executor(
            *(scenario, store, device, settings.own_tier, tables), lockstep=settings.lockstep
        )
        self._dense = dense
        self._replay = Replay(scenario, self.executor, dense)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.executor.close()

    def all_steps(self, watch: Watch | None = None) -> None:
        """Run to the end."""
        on_step = None if watch is None else watch(self._scenario.workload.num_steps)
        while self._replay.step() is not None:
            if on_step is not None:
                on_step()

    def spent(self) -> dict[str, Any]:
        """Return where the time of a layer went, ns in the mean over (step, layer), and the bytes held."""
        accounts, budget = self.executor.accounts, self._scenario.budget
        total_ns, count = accounts.step_ns, max(1, accounts.num_layers)
        parts = {
            "kernels": accounts.kernels_ns,
            "waiting": accounts.waited_ns,
            "decisions": accounts.plan_ns,
        }
        parts["python"] = max(0, total_ns - sum(parts.values()))
        return {
            "layer_steps": accounts.num_layers,
            "layer_ns": total_ns / count,
            **{f"{name}_ns": time_ns / count for name, time_ns in parts.items()},
            "slots_bytes": self.executor.parts.arena.num_bytes,
            "budget_bytes": budget.cache_bytes + budget.staging_bytes,
            "dense_bytes": self._dense.num_bytes,
            "peak_bytes": self._device.peak_bytes(),
        }


@contextmanager
def kernel_threads(count: int | None) -> Iterator[None]:
    """Let kernels on the CPU use so many threads; None: as many as they do."""
    before = torch.get_num_threads()
    if count is not None:
        use_threads("real.threads", count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def use_threads(name: str, count: int) -> None:
    """Let kernels on the CPU use so many threads.

    Raises ConfigError, with the setting's ``name``, for more than there are cores: thousands of threads
    end the process.
    """
    cores = num_cores()
    if not 1 <= count <= cores:
        raise ConfigError(f"{name} = {count}: must be in [1, {cores}], the cores of this machine")
    torch.set_num_threads(count)


def _measurement(settings: RealSettings, device: Device, store: Store) -> dict[str, Any]:
    """Return what the times were measured on."""
    file = store if isinstance(store, FileStore) else None
    return {
        "machine": machine_words(),
        "device": device.kind,
        "device_name": device.name,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "tier": settings.tier,
        "is_direct": None if file is None else file.is_direct,
        "why_not_direct": "" if file is None else file.why_not,
        "why_not_pinned": device.why_not_locked,
        "is_emulated": settings.tier == "link",
        "link_bytes_per_s": settings.link_bytes_per_s if settings.tier == "link" else None,
        "lockstep": settings.lockstep,
        "dtype": store.formats[0].dtype,
        "seed": settings.seed,
    }


def machine_words() -> str:
    """Return what this machine is, in words."""
    count = num_cores()
    return f"{cpu_name()}, {count} core{'s' * (count != 1)}"


_NOT_COUNTED = ("kernels", "kernels_per_layer", "gather_bytes", "padding_tokens", "padding_ratio")
"""Columns of a simulated run that nobody counts in a measured one."""


def _labels(summary: Mapping[str, Any], device: Device, settings: RealSettings) -> dict[str, Any]:
    """Return the columns of a measured run that say otherwise than those of a simulated one."""
    name = machine_words() if device.kind == "cpu" else f"{device.name}, {machine_words()}"
    if settings.tier == "link":
        name += f", over an emulated link of {settings.link_bytes_per_s / 1e9:g} GB/s"
    labels: dict[str, Any] = {
        "machine": name,
        "described_as": summary["machine"],
        "notes": list(summary["notes"]),
    }
    labels |= dict.fromkeys(_NOT_COUNTED)
    if device.kind == "cpu":  # what computes is this CPU, whatever memory it is taken for
        labels["machine_kind"] = "cpu_only"
    if settings.lockstep:
        labels["notes"].append("decisions are those of copies that take no time (real.lockstep)")
    return labels
