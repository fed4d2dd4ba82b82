"""What new gates gain in time: the traces before and after, through the simulator and with actual copies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from real.remoe_config import RemoeConfig
from real.remoe_record import eor_of_trace, record_gates
from real.remoe_run import ARMS, read_gates
from real.remoe_subject import GateSubject
from real.remoe_transform import transformed_live
from real.rig import Tier
from real.store import Store
from real.validate_runs import Run, Setting, decode_ns, opened, take_turns
from sim.composing import compose_config
from sim.counter import STEP_COLUMNS
from sim.results import whole_file
from sim.types import ConfigError
from traces.store import read_meta

SPEED = "speed.json"
BEFORE = "before"
_TRANSFORM = "transform"
_NO_HOST = "~policy.placement"
_RUN = ("where", "policy", "ratio", "gates")
_KEPT = (
    *("tpot_ns_mean", "tpot_ns_p50", "tokens_per_s", "decode_hit_rate", "output_tokens"),
    *("decode_substituted_mass_rate", "decode_route_kl", "decode_route_agreement"),
)
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Speed:
    """What new gates gain in time.

    Parameters
    ----------
    rows
        One a (where, policy, ratio, gates); ``change`` is that of the mean TPOT, relative, against the gates
        before. The gates ``transform`` are those before, with the policy ``reuse`` at the EOR after.
    eor
        EOR at lag 1 of the requests that were simulated, by gates: decoded tokens, mean of layers.
    live
        What the transform costs in answers, see :func:`transformed_live`; None for models without problems.
    """

    rows: list[dict[str, Any]]
    eor: dict[str, float]
    live: dict[str, Any] | None


def run_speed(
    subject: GateSubject, config: RemoeConfig, folder: Path, *, say: Say | None = None
) -> Speed:
    """Record, simulate and measure the gates of the finished run in ``folder``; write ``speed.json``.

    Raises
    ------
    ConfigError
        ``folder`` holds no finished run, or a setting cannot be run.
    """
    settings = config.plain["speed"]
    tell = say or (lambda line: None)
    traces, gates = {}, {BEFORE: None, **{name: read_gates(folder, name) for name in ARMS}}
    for name, values in gates.items():
        traces[name] = folder / f"{name}.parquet"
        tell(f"{name}: recording {settings['requests']} requests")
        record_gates(subject, name, values, traces[name], settings)
    eor = {name: eor_of_trace(path, settings["replayed"]) for name, path in traces.items()}
    rows = list(simulated(traces, eor, settings, tell))
    if settings["real"]["ratios"]:
        tell("with actual weights and copies, in turns")
        rows += measured(traces, settings)
    live = None
    if subject.is_tiny and settings["live"]:
        tell(f"the model itself, with the policy reuse: {settings['live']} problems")
        live = transformed_live(
            eor["remoe"], read_gates(folder, "remoe"), settings["live"], folder / "live"
        )
    found = _joined(folder / SPEED, Speed(with_changes(rows), eor, live))
    with whole_file(folder / SPEED) as path:
        path.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
    return found


def _joined(path: Path, found: Speed) -> Speed:
    """Add what an earlier call with other settings found of the same traces, which the same EOR tells."""
    try:
        earlier = Speed(**json.loads(path.read_text(encoding="utf-8")))
        if earlier.eor != found.eor:
            return found
        mine = {tuple(row[name] for name in _RUN) for row in found.rows}
        others = [row for row in earlier.rows if tuple(row[name] for name in _RUN) not in mine]
    except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError):
        return found
    return Speed(others + found.rows, found.eor, found.live or earlier.live)


def with_changes(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with the change of TPOT, relative, against the same run with the gates before."""
    same = _RUN[:-1]
    before = {
        tuple(row[name] for name in same): row["tpot_ns_mean"]
        for row in rows
        if row["gates"] == BEFORE
    }
    return [
        {**row, "change": row["tpot_ns_mean"] / before[tuple(row[name] for name in same)] - 1}
        for row in rows
    ]


# -- in the simulator ------------------------------------------------------------------------------


def simulated(
    traces: Mapping[str, Path],
    eor: Mapping[str, float],
    settings: Mapping[str, Any],
    tell: Say,
) -> Iterator[dict[str, Any]]:
    """Yield a row a simulated run; the transform is of the trace before, to the EOR after."""
    for where, overrides in settings["simulated"].items():
        for policy in settings["policies"]:
            tell(f"simulating {where} with {policy}")
            for ratio in settings["ratios"]:
                wanted = [*overrides, f"cache.ratio={ratio}", *_workload(settings)]
                for name, trace in traces.items():
                    found = _simulate([f"policy={policy}", f"trace.path={trace}", *wanted])
                    yield {"where": where, "policy": policy, "ratio": ratio, "gates": name, **found}
                if settings["transform"] and policy == "lru":
                    made = ["policy=reuse", f"+policy.routing.target_eor={eor['remoe']}"]
                    found = _simulate([*made, f"trace.path={traces[BEFORE]}", *wanted])
                    row = {"where": where, "policy": policy, "ratio": ratio, "gates": _TRANSFORM}
                    yield {**row, **found}


def _workload(settings: Mapping[str, Any]) -> list[str]:
    first, last = settings["replayed"]
    return [f"workload.requests=[{first},{last}]", "output.belady=false"]


def _simulate(overrides: Sequence[str]) -> dict[str, Any]:
    """Return what a row keeps of a simulated run; without the host's part where there is one memory."""
    from hwmodels.machine import Machine
    from sim.simulate import simulate

    config = compose_config("config", overrides)
    machine = Machine.from_mapping(config["machine"], "machine")
    if machine.kind != "discrete":
        config["policy"].pop("placement", None)
    summary, _ = simulate(config)
    found = {name: summary.get(name) for name in _KEPT}
    moved = summary["h2d_bytes"] or summary["read_bytes"]
    return found | {"bytes_per_token": moved / max(1, summary["output_tokens"])}


# -- with actual weights and copies ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Contest:
    """Runs that take turns: by name of the gates."""

    policy: str
    ratio: float
    runs: Mapping[str, Run]


def measured(traces: Mapping[str, Path], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row a measured run: experts in a file read past the page cache, runs turn and turn about."""
    from real.device import open_device
    from real.replay_run import kernel_threads
    from real.rig import format_of_model
    from real.validate_stores import Stores

    wanted, device, rows = settings["real"], open_device("cpu"), []
    first = compose_config("config", [f"model={wanted['model']}"])
    form, meta = format_of_model(first["model"]), read_meta(traces[BEFORE])
    with kernel_threads(1), Stores(device, None, settings["seed"]) as stores:
        store = stores.of("storage", form, meta.num_layers, meta.num_experts)
        for policy in settings["policies"]:
            given = _given(policy, wanted)
            setting = Setting(Tier("storage"), 1, given, form, device, 1, wanted["turn_steps"])
            for ratio in wanted["ratios"]:
                with _contest(traces, setting, store, first["machine"], (policy, ratio)) as contest:
                    rng = np.random.default_rng(settings["seed"])
                    take_turns(list(contest.runs.values()), wanted["turn_steps"], rng)
                    rows += _rows_of(contest)
    return rows


def _given(policy: str, wanted: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the overrides of a policy's runs; on storage nothing can be placed on the host."""
    first, last = wanted["requests"]
    given = [f"model={wanted['model']}", "engine=greenroom_cpu", "output.belady=false"]
    given += [f"workload.requests=[{first},{last}]", f"workload.length={wanted['length']}"]
    config = compose_config("config", [f"policy={policy}"])
    return (*given, _NO_HOST) if config["policy"].get("placement") is not None else tuple(given)


@contextmanager
def _contest(
    traces: Mapping[str, Path],
    setting: Setting,
    store: Store,
    machine: Mapping[str, Any],
    wanted: tuple[str, float],
) -> Iterator[_Contest]:
    """Open one run a trace over one file of experts."""
    with ExitStack() as stack:
        runs = {}
        for name, trace in traces.items():
            own = replace(setting, overrides=(*setting.overrides, f"trace.path={trace}"))
            (runs[name],) = stack.enter_context(opened(own, store, machine, [wanted]))
        yield _Contest(*wanted, runs)


def _rows_of(contest: _Contest) -> list[dict[str, Any]]:
    """Return a row a run; ``change_error`` is the standard error of the change, from turn to turn."""
    steps = {name: run.steps() for name, run in contest.runs.items()}
    turns = {name: _turn_ns(run, steps[name]) for name, run in contest.runs.items()}
    rows = []
    for name, rows_of_run in steps.items():
        spent = decode_ns(rows_of_run)
        if not len(spent):
            raise ConfigError("speed.real.length: must leave tokens to decode")
        paired = min(len(turns[name]), len(turns[BEFORE]))
        ratios = np.log(turns[name][:paired] / turns[BEFORE][:paired])
        sums = dict(zip(STEP_COLUMNS, rows_of_run.sum(axis=0).tolist(), strict=True))
        rows.append(
            {
                "where": "real storage",
                "policy": contest.policy,
                "ratio": contest.ratio,
                "gates": name,
                "tpot_ns_mean": float(spent.mean()),
                "tpot_ns_p50": float(np.median(spent)),
                "tokens_per_s": 1e9 / float(spent.mean()),
                "decode_hit_rate": sums["hits"] / sums["accesses"],
                "output_tokens": len(spent),
                "bytes_per_token": (sums["demand_bytes"] + sums["prefetch_bytes"]) / len(spent),
                "change_error": float(ratios.std(ddof=1) / np.sqrt(paired)) if paired > 1 else None,
            }
        )
    return rows


def _turn_ns(run: Run, rows: np.ndarray) -> np.ndarray:
    """Return the mean time of a decode step in each turn that has one, ns."""
    means = [decode_ns(rows, first, after) for first, after in run.turns]
    return np.array([spent.mean() for spent in means if len(spent)])
