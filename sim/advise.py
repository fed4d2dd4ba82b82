"""Search for the fastest way to run a model on a machine: engines, placements, quantisations, cache sizes.

Every point is a prediction in closed form. Quality is stated as bits a weight of the experts, which orders
schemes and says no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from hwmodels.cost import CostModel
from hwmodels.file_types import FILE_TYPES, SCHEMES, quantised
from hwmodels.model_shape import ModelShape
from hwmodels.placement import Placement
from hwmodels.predict import Case, Prediction, predict
from hwmodels.quantisation import IK_BLOCKS, canonical
from sim.advise_reserve import Left, Reserve, left_of
from sim.cases import case_of
from sim.gains import placed_as
from sim.predict_answer import Asked
from sim.settings import did_you_mean
from sim.types import ConfigError

AS_GIVEN = "as given"
"""The quantisation that model file and overrides say."""
QUALITY_FLOOR = 4.0
_MOST_SIZES = 33
"""Numbers of experts a layer that are tried for a cache, where it has more experts than that."""

WAYS = {
    "llama_cpp": ("gpu_only", "cpu_layers"),
    "ik_llama": ("gpu_only", "cpu_layers"),
    "ktransformers": ("gpu_only", "gpu_share"),
    "vllm_like": ("gpu_only", "offload"),
    "freetoken": ("gpu_only", "hybrid"),
    "hf_offload": ("gpu_only", "offload"),
}
"""Engines for a GPU with a link to host memory, and the placements that each has; others have all.

vllm_like with offload stands for the expert cache proposed for vLLM (PR 37190).
"""
_ONE_MEMORY = {
    "llama_cpp": ("gpu_only",),
    "ik_llama": ("gpu_only",),
    "vllm_like": ("gpu_only",),
    "phone_stream": ("gpu_only", "offload"),
}
"""The same where there is one memory; offload then reads missing experts from storage."""
_NEEDS_GPU = ("vllm_like",)
_PLACEMENTS = ("gpu_only", "cpu_layers", "gpu_share", "offload", "hybrid")

_GGUF = (*("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_K_S", "IQ4_XS"), *("Q3_K_M", "IQ3_XXS", "Q2_K"))
_SAFETENSORS = ("FP8", "AWQ_INT4", "NVFP4")
_TRIED = {"hf_offload": ("NF4",), "vllm_like": _SAFETENSORS, "freetoken": _SAFETENSORS}
"""What is tried beside the given quantisation; engines not named read GGUF files."""


@dataclass(frozen=True, slots=True)
class Point:
    """One way to run the model, and what is predicted for it."""

    engine: str
    kind: str
    quant: str
    case: Case
    found: Prediction
    reserve: Reserve = field(default=Reserve())

    @property
    def settings(self) -> str:
        """What sets it apart within its kind of placement, as overrides."""
        own = f"placement={self.kind}"
        return (
            own if self.kind == "gpu_only" else f"{own} {placed_as(self.case.placement, self.case)}"
        )

    @property
    def bits(self) -> float:
        """Bits a weight of the experts, the mean over layers."""
        return self.case.costs.shape.expert_bits

    @property
    def speed(self) -> float:
        """Decoded tokens a second."""
        return self.found.tokens_per_s

    @property
    def memory_bytes(self) -> int:
        """Bytes of GPU memory, or of the one memory there is."""
        return self.found.gpu_bytes if self.case.costs.machine.gpu else self.found.host_bytes

    @property
    def fits(self) -> bool:
        """Whether all memory suffices."""
        return not self.found.problems

    @property
    def left(self) -> list[Left]:
        """What it leaves of each memory."""
        return left_of(self.found, self.reserve)

    @property
    def has_room(self) -> bool:
        """Whether it fits and leaves the reserve."""
        return self.fits and all(one.is_enough for one in self.left)

    @property
    def fit(self) -> str:
        """How it fits: ``no``, ``barely``, ``yes``."""
        if not self.fits:
            return "no"
        return "yes" if self.has_room else "barely"


def short(settings: str) -> str:
    """Return a point's settings without the words that the head of a column says."""
    return settings.replace("placement=", "").replace("placement.", "")


@dataclass(frozen=True, slots=True)
class Wish:
    """What is searched: names by commas on the command line; None: what suits the machine."""

    engines: tuple[str, ...] | None = None
    quants: tuple[str, ...] | None = None
    quality_floor: float = QUALITY_FLOOR
    reserve: Reserve = field(default=Reserve())


def engines_for(case: Case, wish: Wish) -> dict[str, tuple[str, ...]]:
    """Return the engines to try, each with its kinds of placement."""
    machine = case.costs.machine
    ways = _ONE_MEMORY if machine.link is None else WAYS
    if wish.engines is not None:
        others = ("gpu_only", "offload") if machine.link is None else _PLACEMENTS
        chosen = {name: ways.get(name, others) for name in wish.engines}
    else:
        chosen = {e: kinds for e, kinds in ways.items() if machine.gpu or e not in _NEEDS_GPU}
    if machine.storage is None and machine.link is None:
        chosen = dict.fromkeys(chosen, ("gpu_only",))
    return chosen


def search(asked: Mapping[str, Asked], wish: Wish) -> list[Point]:
    """Predict every point; ``asked`` has each engine and each placement composed (see :func:`to_ask`).

    Raises ConfigError where nothing is left to try.
    """
    first = case_of(next(iter(asked.values())).composed.config)
    chosen = engines_for(first, wish)
    placements = {
        kind: case_of(asked[f"placement={kind}"].composed.config).placement
        for kinds in chosen.values()
        for kind in kinds
    }
    given = has_own_bits(next(iter(asked.values())).overrides)
    points: list[Point] = []
    for engine, kinds in chosen.items():
        base = case_of(asked[f"engine={engine}"].composed.config)
        for quant, shape in _quantised(engine, base.costs.shape, wish, given):
            for kind in kinds:
                case = _at(base, shape, placements[kind])
                points += _points(engine, kind, quant, case, wish.reserve)
    if not points:
        raise ConfigError(
            f"--quality-floor {wish.quality_floor:g}: nothing is left to try: the model has "
            f"{first.costs.shape.expert_bits:.3g} bits a weight"
        )
    return points


def to_ask(engines: Sequence[str]) -> list[tuple[str, ...]]:
    """Return sets of overrides that compose each engine and each kind of placement at least once."""
    pairs = zip_longest(engines, _PLACEMENTS, fillvalue=None)
    return [
        (f"engine={engine or engines[-1]}", f"placement={kind or 'gpu_only'}")
        for engine, kind in pairs
    ]


def has_own_bits(overrides: Sequence[str]) -> bool:
    """Tell whether the user has set the precision of the model himself."""
    keys = [text.lstrip("+~").partition("=")[0] for text in overrides]
    return any(key.startswith("model.") and "bits" in key for key in keys)


def _quantised(
    engine: str, shape: ModelShape, wish: Wish, is_given: bool
) -> Iterator[tuple[str, ModelShape]]:
    """Yield the quantisations of the model to try, which none has more bits than it comes with."""
    if wish.quants is None:
        names = () if is_given else _TRIED.get(engine, _GGUF)
        if shape.expert_bits >= wish.quality_floor:
            yield AS_GIVEN, shape
    else:
        names = tuple(name for name in wish.quants if _reads(engine, name))
    for name in names:
        made = quantised(shape, name)
        is_less = made.expert_bits < 0.9 * shape.expert_bits or wish.quants is not None
        if made.expert_bits >= wish.quality_floor and is_less:
            yield name, made


def _reads(engine: str, quant: str) -> bool:
    """Tell whether an engine takes files of a scheme: llama.cpp's types are those of GGUF files."""
    name = canonical(quant)
    if name in IK_BLOCKS:
        return engine == "ik_llama"
    is_gguf = name in FILE_TYPES
    if engine in _TRIED:
        return not is_gguf
    return is_gguf or engine not in WAYS or name in ("MXFP4", "BF16", "F16")


def check_quants(names: Sequence[str]) -> None:
    """Raise ConfigError for a name that is no scheme."""
    for name in names:
        if canonical(name) not in SCHEMES:
            raise ConfigError(
                f"--quant {name}: no such scheme{did_you_mean(canonical(name), SCHEMES)}"
            )


def _at(base: Case, shape: ModelShape, placement: Placement) -> Case:
    costs = base.costs
    return replace(base, costs=CostModel(shape, costs.machine, costs.engine), placement=placement)


def _points(engine: str, kind: str, quant: str, case: Case, reserve: Reserve) -> Iterator[Point]:
    for placement in _sizes(kind, case, reserve):
        one = replace(case, placement=placement)
        yield Point(engine, kind, quant, one, predict(one), reserve)


def _sizes(kind: str, case: Case, reserve: Reserve) -> Iterator[Placement]:
    """Yield a kind's placements: by layers on the CPU, or by experts of each layer in memory."""
    place, shape = case.placement, case.costs.shape
    if kind == "gpu_only":
        yield place
    elif kind == "cpu_layers":
        for layers in range(1, shape.num_moe_layers + 1):
            yield replace(place, cpu_layers=layers)
    else:
        experts = shape.num_experts
        step = max(1, -(-experts // _MOST_SIZES))
        largest = _largest(case, Reserve(0, 0)) | _largest(case, reserve)
        held = {*range(0, experts, step), *largest} - {experts}
        for number in sorted(held):
            yield replace(place, gpu_ratio=number / experts)


def _largest(case: Case, reserve: Reserve) -> set[int]:
    """Return the most experts of each layer that leave the reserve; an empty set if not even none do."""
    machine, shape = case.costs.machine, case.costs.shape
    none = predict(replace(case, placement=replace(case.placement, gpu_ratio=0.0)))
    if machine.link is None or machine.gpu is None:
        needed, have = none.host_bytes, machine.cpu.memory_bytes - reserve.host_bytes
    else:
        of_each = machine.gpu.memory_bytes - reserve.gpu_bytes
        needed, have = none.gpu_bytes, of_each * machine.gpu.count
    layers = range(case.placement.num_cpu_layers(shape), shape.num_moe_layers)
    row = sum(shape.expert_bytes(layer) for layer in layers)
    if needed > have or not row:
        return set()
    return {min(shape.num_experts, (have - needed) // row)}
