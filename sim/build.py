"""From a composed configuration to the objects of a run; every user's mistake is found here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from hwmodels.cost import CostModel
from hwmodels.engine import Engine
from hwmodels.machine import Machine
from hwmodels.model_shape import ModelShape
from sim.budget import Budget, plan_memory
from sim.calibration import Calibration, calibration_of
from sim.hardware import Hardware, hardware_of
from sim.offloader import Offloader
from sim.parts import Supply, build_former, build_policies, build_sizing
from sim.policies.base import PolicySet
from sim.policies.classic import LRU
from sim.settings import check_settings, did_you_mean, prefetch_limit
from sim.types import ConfigError, KeySpace
from sim.warm_up import WarmUp, warm, warm_up_of
from sim.workload import Workload
from traces.importers.by_name import read_any
from traces.part import Part, split_part
from traces.schema import Trace, TraceError
from traces.store import is_trace_file
from traces.stored import decoded_bytes, open_trace


@dataclass(slots=True)
class Scenario:
    """All that a driver needs, fresh for one run, and what must be told about it."""

    workload: Workload
    offloader: Offloader
    costs: CostModel
    hardware: Hardware
    budget: Budget
    shape: ModelShape
    machine: Machine
    calibration: Calibration
    warm_up: WarmUp | None

    @property
    def calibration_overlaps(self) -> bool:
        """Tell whether the run replays requests that calibration has seen."""
        return self.calibration.overlaps(self.workload)


def build(
    config: Mapping[str, Any], *, one_by_one: bool = False, trace: Trace | None = None
) -> Scenario:
    """Build a run from a resolved configuration (plain dicts and lists).

    ``one_by_one``: every expert is an event of its own (see Workload). ``trace``: what to replay instead
    of the configuration's, of the same shape.
    """
    check_settings(config)
    if trace is None:
        trace = load_trace(config["trace"]["path"])
    calibration = calibration_of(config, trace, load_trace)
    workload = _workload(config, trace, calibration)
    warm_up = warm_up_of(config["workload"], trace, workload)
    workload.one_by_one = one_by_one
    if warm_up is not None:
        warm_up.one_by_one = one_by_one
    shape, machine, engine = described(config)
    meta = trace.meta
    shape = shape.priced_as(meta.num_layers, meta.num_experts, meta.top_k)
    shape = _with_low_copies(config["policy"], shape)
    costs = CostModel(shape, _as_read(machine, engine), engine)
    supply = Supply(config, workload, calibration, warm_up)
    build_former(config, workload, supply)
    sizing = build_sizing(config, supply)
    budget = plan_memory(config, costs, workload, sizing)
    policies = build_policies(config, supply, len(budget.pool_bytes), sizing)
    _check_apart(config, policies, calibration, workload)
    _check_roles(config, policies, costs, budget)
    offloader = _offloader(config, policies, costs, budget)
    if warm_up is not None:
        warm(offloader, warm_up)
    return Scenario(
        workload=workload,
        offloader=offloader,
        costs=costs,
        hardware=_hardware(costs, policies, budget, config["policy"].get("plan_ns") or 0),
        budget=budget,
        shape=shape,
        machine=machine,
        calibration=calibration,
        warm_up=warm_up,
    )


def described(config: Mapping[str, Any]) -> tuple[ModelShape, Machine, Engine]:
    """Return the model, machine and engine of a configuration; HardwareError for the first mistake."""

    def name(group: str) -> str:
        return f"{group}/{config[group].get('name')}"

    shape = ModelShape.from_mapping(config["model"], name("model"))
    engine = Engine.from_mapping(config["engine"], name("engine"))
    return shape, Machine.from_mapping(config["machine"], name("machine")), engine


def _with_low_copies(policy: Mapping[str, Any], shape: ModelShape) -> ModelShape:
    """Return the model with the second copy of each expert that a policy asks for."""
    low = policy.get("low")
    if low is None:
        return shape
    if "routing" not in policy:
        raise ConfigError(
            "policy.low: must be left out without policy.routing, which sends tokens to low-precision copies"
        )
    least = min(map(shape.expert_bits_of, range(shape.num_moe_layers)))
    if low["bits"] >= least:
        raise ConfigError(
            f"policy.low.bits = {low['bits']}: must be < {least}, the bits a weight of the experts of "
            f"{shape.name}"
        )
    return replace(shape, low_bits=low["bits"])


def _as_read(machine: Machine, engine: Engine) -> Machine:
    """Return the machine as an engine uses it: what lies in the page cache cannot be pinned."""
    link = machine.link
    if link is None or machine.storage is None or engine.storage_access != "page_cache":
        return machine
    return replace(machine, link=replace(link, pinned=False))


def _check_roles(
    config: Mapping[str, Any], policies: PolicySet, costs: CostModel, budget: Budget
) -> None:
    """Refuse roles that the machine or engine has no use for; give host memory a policy if it needs one."""
    name, kind = config["policy"]["name"], costs.machine.kind
    if policies.placement is not None and kind != "discrete":
        raise ConfigError(
            f"policy/{name}: placement: a {kind} machine ({costs.machine.name}) has one memory, so that a "
            "missing expert can only be loaded; must be left out"
        )
    if costs.engine.storage_access == "page_cache" and costs.machine.storage is None:
        raise ConfigError(
            f"engine.storage_access = page_cache: machine {costs.machine.name} has no storage; must be direct"
        )
    if (
        policies.prefetch is not None
        and kind == "discrete"
        and costs.engine.speculation == "before"
    ):
        raise ConfigError(
            f"engine.speculation = before: machine {costs.machine.name} loads over a link; must be beside"
        )
    if policies.host is not None and costs.engine.storage_access == "page_cache":
        raise ConfigError(
            f"policy/{name}: host: the operating system rules the page cache; must be left out with "
            "engine.storage_access = page_cache"
        )
    if budget.host_bytes is None:
        policies.host = None
    elif policies.host is None:
        policies.host = LRU()


def _offloader(
    config: Mapping[str, Any], policies: PolicySet, costs: CostModel, budget: Budget
) -> Offloader:
    shape, copies = costs.shape, budget.pools.num_copies
    keys = KeySpace(shape.num_moe_layers, shape.num_experts, copies)
    return Offloader(
        budget.residency(keys),
        policies,
        _estimate(config, costs),
        budget.staging_slots,
        prefetch_limit(config),
        budget.joint,
        budget.host_residency(keys),
        costs.engine.exclusive_host,
    )


def _hardware(costs: CostModel, policies: PolicySet, budget: Budget, plan_ns: int) -> Hardware:
    """Return the resources; sharing is computed where several kinds of work may meet at all.

    ``plan_ns`` is what the policy takes to decide a layer.
    """
    machine, cache_bytes = costs.machine, budget.cache_bytes
    one_memory = machine.kind != "discrete" and cache_bytes < budget.pools.stored_bytes
    link = machine.link
    slow_memory = link is not None and machine.cpu.dram_bytes_per_s < link.load_bytes_per_s
    meets = policies.placement is not None or budget.pools.num_gpus > 1 or slow_memory
    reads_storage = budget.host_bytes is not None or one_memory
    hardware = hardware_of(costs, budget.pools.layout, meets, reads_storage)
    return replace(hardware, plan_ns=plan_ns)


_PARTS = ("gpu", "link", "cpu", "storage")


def _estimate(config: Mapping[str, Any], truth: CostModel) -> CostModel:
    """Return the costs that policies believe in: the truth, but for the figures in ``estimate``."""
    believed = config["estimate"]
    if not believed:
        return truth
    mapping: dict[str, Any] = dict(config["machine"])
    for part, figures in believed.items():
        if part in _PARTS and not mapping.get(part):
            raise ConfigError(
                f"estimate.{part} = {figures}: machine {config['machine']['name']} has no {part}"
            )
        if not isinstance(figures, Mapping) or part not in _PARTS:
            hint = did_you_mean(str(part), _PARTS) if part not in _PARTS else ""
            raise ConfigError(
                f"estimate.{part} = {figures}: must be figures of {', '.join(_PARTS[:-1])} or {_PARTS[-1]}"
                f"{hint}"
            )
        mapping[part] = {**mapping[part], **figures}
    believed_machine = _as_read(Machine.from_mapping(mapping, "estimate"), truth.engine)
    return CostModel(truth.shape, believed_machine, truth.engine)


_WITH_TRACES = ("traces", "conf")
"""Packages of ours that bundle traces."""
_MOST_BYTES_IN_MEMORY = 256 * 2**20
"""Size of a trace, decoded, from which its routing is read from the file as the run goes on."""


# -- traces ----------------------------------------------------------------------------------------


def load_trace(path: str) -> Trace:
    """Read a trace; ``pkg://package/file`` names one that is bundled, ``FILE#...`` a part of one."""
    real_path = os.path.realpath(resolve_path(path))
    part = split_part(path)[1]
    try:
        stamp = file_stamp(real_path)
        return _read_trace(real_path, stamp) if part is None else _read_part(real_path, stamp, part)
    except TraceError as error:  # speak of the file as the user does
        raise TraceError(str(error).replace(real_path, path)) from error


def resolve_path(path: str) -> Path:
    """Return the file behind a trace path of the configuration, whatever part of it is named."""
    path, _ = split_part(path)
    if path.startswith("pkg://"):
        package, _, name = path.removeprefix("pkg://").partition("/")
        if (
            package.partition(".")[0] not in _WITH_TRACES
        ):  # a name alone imports no module of others
            raise ConfigError(f"trace.path = {path}: no such package: {package!r}")
        try:
            return Path(str(resources.files(package))) / name
        except (ImportError, ValueError, TypeError) as error:
            raise ConfigError(f"trace.path = {path}: no such package: {package!r}") from error
    return Path(path).expanduser()


def file_stamp(path: str) -> tuple[int, ...]:
    """Return what changes with a file's content: when it was written, and its size; empty for none."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


@lru_cache(maxsize=2)
def _read_trace(path: str, stamp: tuple[int, ...]) -> Trace:
    """Keep the last traces: the points of a sweep share them, so that nobody may write in them.

    One that is large stays in its file.
    """
    if is_trace_file(path) and decoded_bytes(path) > _MOST_BYTES_IN_MEMORY:
        return open_trace(path)
    trace = read_any(path)
    for name in trace.columns:
        column = getattr(trace, name)
        if isinstance(column, np.ndarray):
            column.flags.writeable = False
    return trace


@lru_cache(maxsize=2)
def _read_part(path: str, stamp: tuple[int, ...], part: Part) -> Trace:
    """Keep the last parts too; each is in memory."""
    return part.of(_read_trace(path, stamp), path)


def _workload(config: Mapping[str, Any], trace: Trace, calibration: Calibration) -> Workload:
    """Return the requests to run: those asked for, by default all that calibration leaves."""
    kept_back = [calibration.span] if calibration.trace is trace else []
    span = config["workload"]["warm_up"]
    if span is not None:
        kept_back.append((span[0], trace.num_requests if span[1] is None else span[1]))
    return Workload.from_settings(config["workload"], trace, kept_back)


def _check_apart(
    config: Mapping[str, Any], policies: PolicySet, calibration: Calibration, workload: Workload
) -> None:
    """Refuse to judge a policy on the very text it has learned from, unless that is wished."""
    if not policies.calibrated or config["calibration"]["allow_overlap"]:
        return
    if calibration.overlaps(workload):
        first, last = calibration.span
        raise ConfigError(
            f"calibration.requests = [{first}, {last}]: policy/{config['policy']['name']} learns from "
            "requests that workload.requests replays, so that it looks too good; must be apart, or "
            "calibration.allow_overlap=true"
        )
