"""What ``greenroom predict`` answers, as plain values: the figures of one case and what they rest on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hwmodels.layer_time import GPU_BYTES, Spent
from hwmodels.placement import Placement
from hwmodels.predict import Case, Prediction, predict
from sim.cases import GROUPS, Composed, case_of
from sim.gains import filled, gains, placed_as
from sim.interval import Interval, Missed, interval_of
from sim.limits import limit_words
from sim.trust import weak_figures

_MS = 1e6
FITTED = "F: fitted by greenroom calibrate"
"""How the sources of figures begin that a calibration wrote."""
_LEAST_PART = 1e-4
"""Share of the time below which a part is left out."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One question: the overrides, what they compose to, and notes on where the usage comes from."""

    overrides: tuple[str, ...]
    composed: Composed
    notes: tuple[str, ...] = ()


def answer(asked: Asked, errors: Sequence[Missed]) -> dict[str, Any]:
    """Predict what is asked; return plain values that JSON can hold.

    Times in ms, memory in bytes. Raises HardwareError or ConfigError for a user's mistake.
    """
    case = case_of(asked.composed.config)
    found = predict(case)
    decode, prefill = (_interval(asked, errors, is_prefill) for is_prefill in (False, True))
    return {
        "asked": _asked(asked, case),
        "decode": _speeds(found.tokens_per_s, found.tpot_ns, "tpot_ms", decode),
        "prefill": _speeds(found.prefill_tokens_per_s, found.ttft_ns, "ttft_ms", prefill),
        "decode_parts": _parts(found.decode, case),
        "prefill_parts": _parts(found.prefill, case),
        "bytes_per_token": {
            _named(where, case): num_bytes / case.batch_size
            for where, num_bytes in found.decode.num_bytes.items()
            if num_bytes
        },
        "bottleneck": {
            "part": _named(found.bottleneck, case),
            "words": limit_words(found, found.bottleneck),
        },
        "memory": memory(found),
        "problems": list(found.problems),
        "context": _context(found),
        "used_alike_tokens_per_s": used_alike(case),
        "hangs_on_use": _hangs_on_use(case),
        "weak_figures": weak_figures(found, asked.composed.config["machine"], _changed(asked)),
        "notes": [*asked.notes, *_notes(case)],
        "gains": _gains(found),
        "fill": _fill(found),
    }


def _asked(asked: Asked, case: Case) -> dict[str, Any]:
    config = asked.composed.config
    shape = case.costs.shape
    return {
        "overrides": list(asked.overrides),
        "choices": dict(asked.composed.choices),
        "names": {group: config[group]["name"] for group in GROUPS},
        "placement": _placement_words(case.placement, case),
        "usage_source": case.usage.source,
        "expert_bits": shape.expert_bits,
        "dense_bits": shape.dense_bits,
        "work": dict(config["work"]),
    }


def _placement_words(place: Placement, case: Case) -> str:
    """Say where the experts are and who computes those that are not in GPU memory."""
    machine, layers = case.costs.machine, case.costs.shape.num_moe_layers
    if machine.link is None:
        held = place.gpu_ratio if machine.storage else 1
        rest = "" if held == 1 else "; the others are read from storage when used"
        return f"{held:.0%} of the experts in the one memory there is{rest}"
    on_cpu = place.num_cpu_layers(case.costs.shape)
    words = [f"{on_cpu} of {layers} layers' experts on the CPU"] if on_cpu else []
    if on_cpu < layers:
        share = "all" if place.gpu_ratio == 1 else f"{place.gpu_ratio:.1%}"
        words.append(f"{share} of the {'others' if on_cpu else 'experts'} in GPU memory")
    if on_cpu < layers and place.gpu_ratio < 1:
        words.append(_MISSES[place.misses])
    return ", ".join(words)


_MISSES = {
    "load": "missing ones are copied over the link",
    "cpu": "missing ones are computed by the CPU",
    "split": "missing ones are divided between link and CPU",
}


def _speeds(speed: float, time_ns: float, time_name: str, interval: Interval) -> dict[str, Any]:
    """Return a speed and its time, each with its interval."""
    around, times = interval.of(speed), interval.of_time(time_ns / _MS)
    return {
        "tokens_per_s": speed,
        "tokens_per_s_interval": None if around is None else list(around),
        time_name: time_ns / _MS,
        f"{time_name}_interval": None if times is None else list(times),
        "interval_from": interval.words,
    }


def _interval(asked: Asked, errors: Sequence[Missed], is_prefill: bool) -> Interval:
    config, choices = asked.composed.config, asked.composed.choices
    engine = choices.get("engine", config["engine"]["name"])
    machine = choices.get("machine", config["machine"]["name"])
    own_fit = _is_own_fit(config["machine"])
    return interval_of(errors, engine, machine, is_prefill, is_changed(asked), own_fit)


def _is_own_fit(machine: Mapping[str, Any]) -> bool:
    """Tell whether ``greenroom calibrate`` wrote a figure of the machine, which it does in users' files."""
    parts = [part for part in machine.values() if isinstance(part, Mapping)]
    sources = [source for part in parts for source in (part.get("sources") or {}).values()]
    return any(str(source).startswith(FITTED) for source in sources)


def is_changed(asked: Asked) -> bool:
    """Tell whether a part or a figure of the machine was overridden, which makes it another machine."""
    return bool(_machine_overrides(asked))


def _machine_overrides(asked: Asked) -> list[str]:
    """Return the overrides that make a machine another one: a part, or a figure of one."""
    keys = [text.lstrip("+~").partition("=")[0] for text in asked.overrides]
    return [key for key in keys if key.startswith(("machine/", "machine.", "machine@"))]


def _changed(asked: Asked) -> frozenset[str]:
    return frozenset(key.removeprefix("machine.") for key in _machine_overrides(asked))


def _named(part: str, case: Case) -> str:
    """Return a part's name, or that of a memory; without a GPU all is the CPU's."""
    return part if case.costs.machine.gpu else _WITHOUT_GPU.get(part, part)


_WITHOUT_GPU = {GPU_BYTES: "memory"}


def _parts(spent: Spent, case: Case) -> list[dict[str, Any]]:
    """Return the critical path by part, the longest first."""
    total = spent.total_ns
    return [
        {"part": _named(part, case), "ms": time_ns / _MS, "share": time_ns / total}
        for part, time_ns in sorted(spent.ns.items(), key=lambda item: -item[1])
        if time_ns > _LEAST_PART * total
    ]


def memory(prediction: Prediction) -> dict[str, dict[str, Any]]:
    """Return what the GPU's and the host's memory must hold, by use, against what is there.

    Weights are those of all but routed experts. Where there is one memory it stands under ``host``.
    """
    case, shape = prediction.case, prediction.case.costs.shape
    machine = case.costs.machine
    rest = {
        "weights": shape.non_expert_bytes(shape.num_moe_layers),
        "kv": case.batch_size * shape.kv_bytes(max(case.context_tokens, case.prompt_tokens)),
        "workspace": machine.device.workspace_bytes * machine.device.count,
    }
    if machine.gpu is not None and machine.link is not None:
        experts = prediction.gpu_bytes - sum(rest.values())
        have = machine.gpu.memory_bytes * machine.gpu.count
        gpu = _room(prediction.gpu_bytes, have, {**rest, "experts": experts})
        host = {"experts": prediction.host_bytes}
        return {"gpu": gpu, "host": _room(prediction.host_bytes, machine.cpu.memory_bytes, host)}
    experts = prediction.host_bytes - sum(rest.values())
    uses = {**rest, "experts": experts}
    return {"host": _room(prediction.host_bytes, machine.cpu.memory_bytes, uses)}


def _room(needed: int, have: int, uses: Mapping[str, int]) -> dict[str, Any]:
    return {"needed": needed, "have": have, "fits": needed <= have, "uses": dict(uses)}


def _context(prediction: Prediction) -> dict[str, float]:
    """Return what twice the context costs."""
    case = prediction.case
    tokens = 2 * case.context_tokens
    longer = predict(replace(case, context_tokens=tokens))
    more_ns = longer.tpot_ns - prediction.tpot_ns
    return {
        "tokens": tokens,
        "tpot_ms": longer.tpot_ns / _MS,
        "ms_per_1000_tokens": 1000 * more_ns / case.context_tokens / _MS,
        "fits": not longer.problems,
    }


def used_alike(case: Case) -> float:
    """Return tokens/s if all experts were used alike, which is the worst for a cache."""
    alike = replace(case.usage, name="uniform", distinct=None, hits=None, apart=None)
    return predict(replace(case, usage=alike, prompt_tokens=1)).tokens_per_s


def _hangs_on_use(case: Case) -> bool:
    """Tell whether it matters to decoding which experts tokens use: to a cache, or to a batch."""
    place, layers = case.placement, case.costs.shape.num_moe_layers
    has_cache = place.num_cpu_layers(case.costs.shape) < layers and 0 < place.gpu_ratio < 1
    return case.batch_size > 1 or (has_cache and place.hit_rate is None)


def _notes(case: Case) -> list[str]:
    """Return what a reader must be told about a combination that means less than it says."""
    place, machine, notes = case.placement, case.costs.machine, []
    shape = case.costs.shape
    if machine.link is None and place.gpu_ratio < 1 and place.misses != "load" and machine.storage:
        notes.append(
            f"{machine.name} has one memory: placement.misses = {place.misses} means nothing there, missing "
            "experts are read from storage"
        )
    if machine.link is None and not machine.storage and place.gpu_ratio < 1:
        notes.append(
            f"{machine.name} has one memory and no storage: placement.gpu_ratio means nothing there"
        )
    if machine.link is None and machine.gpu and place.num_cpu_layers(shape):
        notes.append(
            f"{machine.name} has one memory: placement.cpu_layers means nothing there, the GPU computes all "
            "experts where they lie"
        )
    elif place.cpu_layers is not None and place.cpu_layers > shape.num_moe_layers:
        notes.append(
            f"placement.cpu_layers = {place.cpu_layers}: the model has {shape.num_moe_layers} MoE layers, "
            "all of which are on the CPU then"
        )
    return notes


def _gains(prediction: Prediction) -> list[dict[str, Any]]:
    return [
        {
            "change": gain.name,
            "tokens_per_s": gain.tokens_per_s,
            "gain": gain.change,
            "is_hardware": gain.is_hardware,
        }
        for gain in gains(prediction)
    ]


def _fill(prediction: Prediction) -> dict[str, Any] | None:
    """Return the placement of this kind that fills the GPU memory there is, where it is another one."""
    case = prediction.case
    full = filled(case)
    found = None if full is None else predict(full)
    if full is None or found is None or found.gpu_bytes == prediction.gpu_bytes:
        return None
    return {"settings": placed_as(full.placement, case), "tokens_per_s": found.tokens_per_s}
