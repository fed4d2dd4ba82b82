"""Sets that are on the GPU beforehand. Keys are ``layer * 8 + expert`` in 8 layers of 8 experts."""

from __future__ import annotations

import numpy as np
import pytest

from sim.offloader import Offloader
from sim.policies.base import CachePolicy, PlacementPolicy, PolicySet
from sim.policies.classic import Static
from sim.policies.static import (
    FrontLoading,
    LayersOnCPU,
    MissOnCPU,
    RandomSet,
    TensorOverride,
    Uniform,
)
from sim.policies.swap import PrefillSwap
from sim.residency import Residency
from sim.types import ConfigError, LayerRouting, Phase, Service, StepInfo
from tests.doubles import ScriptedPlacement
from tests.placing import KEYS, services, view_of
from tests.strategies import ConstantCosts

LOAD, BYPASS, CPU = Service.LOAD, Service.BYPASS, Service.CPU
ALL_EXPERTS = r"\.ffn_.*_exps\."


def held(policy: CachePolicy, slots: int) -> set[int]:
    """Return what one pool for all layers holds at the start of a run."""
    residency = Residency(KEYS, [1] * 8, [0] * 8, [slots])
    Offloader(residency, PolicySet([policy]), ConstantCosts(), staging_slots=8)
    return set(residency.resident())


# -- KTransformers ---------------------------------------------------------------------------------


def test_uniform_holds_as_many_of_each_layer() -> None:
    assert held(Uniform(8, 8), 16) == {
        layer * 8 + expert for layer in range(8) for expert in (0, 1)
    }
    assert held(Uniform(8, 8), 11) == {*range(0, 64, 8), 1, 9, 17}


def test_front_loading_fills_the_first_layers() -> None:
    assert held(FrontLoading(8, 8), 19) == set(range(19))


def test_frequency_holds_the_hottest_of_all_layers() -> None:
    popularity = np.zeros((8, 8))
    popularity[3] = 5.0
    popularity[6, :2] = 9.0
    assert held(Static(popularity), 10) == {*range(24, 32), 48, 49}


def test_a_random_set_is_the_generators() -> None:
    first, again, other = (
        held(RandomSet(8, 8, np.random.default_rng(seed)), 20) for seed in (42, 42, 43)
    )
    assert first == again != other
    assert len(first) == 20


# -- llama.cpp -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "first"), [(64, 0), (63, 1), (32, 4), (31, 5), (7, 8)])
def test_as_few_layers_as_must_be_are_on_the_cpu(slots: int, first: int) -> None:
    assert held(LayersOnCPU(8, 8), slots) == set(range(first * 8, 64))


def test_the_first_n_layers_are_on_the_cpu_though_there_be_room() -> None:
    assert held(LayersOnCPU(8, 8, cpu_layers=6), 64) == set(range(48, 64))
    assert held(LayersOnCPU(8, 8, cpu_layers=8), 64) == set()


def test_a_pool_of_part_of_the_experts_holds_its_part_of_the_layers() -> None:
    """As on two GPUs that share every layer's experts: 4 of each layer in either pool."""
    residency = Residency(KEYS, [1] * 8, [0] * 8, [13, 13], [key % 2 for key in range(64)])
    caches = [LayersOnCPU(8, 8), LayersOnCPU(8, 8)]
    Offloader(residency, PolicySet(caches), ConstantCosts(), staging_slots=8)
    assert set(residency.resident()) == set(range(40, 64))


def test_too_few_layers_on_the_cpu_are_refused() -> None:
    with pytest.raises(ConfigError, match="cpu_layers = 3: leaves 40 experts for 39 slots"):
        held(LayersOnCPU(8, 8, cpu_layers=3), 39)
    with pytest.raises(ValueError, match=r"cpu_layers = 9: must be in \[-1, 8\]"):
        LayersOnCPU(8, 8, cpu_layers=9)


@pytest.mark.parametrize(
    ("regex", "layers"),
    [
        (ALL_EXPERTS, ()),
        (r"blk\.[0-5]\.ffn_(gate|up|down)_exps", (6, 7)),
        (r"blk\.(1|3)\.", (0, 2, 4, 5, 6, 7)),
        (r"attn", range(8)),
    ],
)
def test_an_expression_finds_the_layers_on_the_cpu(regex: str, layers: tuple[int, ...]) -> None:
    expected = {layer * 8 + expert for layer in layers for expert in range(8)}
    assert held(TensorOverride(8, 8, regex), 64) == expected


def test_dense_layers_count_in_the_names_of_tensors() -> None:
    policy = TensorOverride(8, 8, r"blk\.[0-4]\.ffn_.*_exps", first_layer=3)
    assert held(policy, 64) == set(range(16, 64))


@pytest.mark.parametrize(
    ("regex", "message"),
    [
        ("(", r"regex = \(: not a regular expression"),
        ("ffn_up_exps", "finds blk.0.ffn_up_exps.weight but not blk.0.ffn_gate_exps.weight"),
        (r"blk\.7\.ffn_(gate|down)", "but not blk.7.ffn_up_exps.weight"),
    ],
)
def test_an_expression_that_cannot_be_meant_is_refused(regex: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorOverride(8, 8, regex)


def test_an_expression_that_leaves_too_much_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"regex = blk.0: leaves 56 experts for 55 slots"):
        held(TensorOverride(8, 8, "blk.0"), 55)


# -- misses ----------------------------------------------------------------------------------------


def test_misses_run_on_the_cpu_unless_the_step_has_many_tokens() -> None:
    few, many = view_of(tokens=31), view_of(tokens=32)
    for policy, found in ((MissOnCPU(), CPU), (MissOnCPU(32), BYPASS), (MissOnCPU(32, True), LOAD)):
        assert services(policy, few, {0: 1, 1: 31}) == [CPU, CPU]
        assert services(policy, many, {0: 1, 1: 31}) == [found, found]
    with pytest.raises(ValueError, match="gpu_from_tokens = -1: must be >= 0"):
        MissOnCPU(-1)


# -- sets that a prompt changes --------------------------------------------------------------------


def run(
    policy: CachePolicy,
    placement: PlacementPolicy,
    *events: dict[int, int],
    phase: Phase = Phase.PREFILL,
    slots: int = 3,
    staging: int = 16,
) -> set[int]:
    """Return what layer 0 holds after these events, each a step of 10 tokens."""
    residency = Residency(KEYS, [1] * 8, list(range(8)), [slots] * 8)
    caches = [policy] + [Static(np.zeros((8, 8))) for _ in range(7)]
    offloader = Offloader(residency, PolicySet(caches, placement), ConstantCosts(), staging)
    for number, counts in enumerate(events):
        offloader.begin_step(StepInfo(number, phase, 10))
        plan = offloader.plan_layer(LayerRouting(0, list(counts), list(counts.values())), 0)
        offloader.on_loaded_at_once(plan.loads)
        offloader.end_layer(plan)
    return {key for key in residency.resident() if key < 8}


POPULARITY = np.tile(np.arange(8.0, 0.0, -1.0), (8, 1))  # the first three are held
EVERY = ScriptedPlacement({})  # loads all that is missing


def test_a_prompt_exchanges_what_is_loaded_for_the_coldest() -> None:
    # 3 (5 tokens) replaces 2 (unused), 4 (4) replaces 1 (1), 5 (9) replaces 4; 6 (4) beats nobody then.
    counts = {0: 7, 1: 1, 3: 5, 4: 4, 5: 9, 6: 4}
    assert run(PrefillSwap(POPULARITY, most=1.0), EVERY, counts) == {0, 3, 5}
    # With two exchanges at most, in the order of the event:
    assert run(PrefillSwap(POPULARITY, most=0.25), EVERY, counts) == {0, 3, 4}


def test_only_what_beats_the_factor_is_exchanged() -> None:
    counts = {0: 20, 1: 20, 2: 20, 3: 21, 4: 22}
    assert run(PrefillSwap(POPULARITY), EVERY, counts) == {0, 1, 4}  # 21 = 1.05 * 20 does not
    assert run(PrefillSwap(POPULARITY, factor=1.0), EVERY, counts) == {0, 3, 4}


def test_experts_on_the_cpu_do_not_enter() -> None:
    placement = ScriptedPlacement({3: CPU, 4: BYPASS})
    assert run(PrefillSwap(POPULARITY), placement, {3: 9, 4: 9, 5: 9}) == {0, 1, 5}


def test_nothing_enters_in_decoding_or_in_a_short_prompt() -> None:
    counts = {3: 9, 4: 9}
    assert run(PrefillSwap(POPULARITY), EVERY, counts, phase=Phase.DECODE) == {0, 1, 2}
    assert run(PrefillSwap(POPULARITY, min_tokens=11), EVERY, counts) == {0, 1, 2}
    assert run(PrefillSwap(POPULARITY, min_tokens=10), EVERY, counts) == {0, 3, 4}


def test_each_prompt_counts_for_itself() -> None:
    # 1 and 2 make way for 3 and 4; then nobody of these is used, and 1, the fewest uses before, comes back
    # for the least popular.
    assert run(PrefillSwap(POPULARITY), EVERY, {3: 9, 4: 9}, {1: 1}) == {0, 1, 3}


def test_no_more_are_exchanged_than_staging_slots_keep() -> None:
    # Of 4 slots two are kept for those that come and go.
    assert run(PrefillSwap(POPULARITY), EVERY, dict.fromkeys(range(3, 8), 9), staging=4) == {
        0,
        3,
        4,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.9, 0.5, 1), r"factor = 0.9: must be >= 1"),
        ((1.05, 0.0, 1), r"most = 0.0: must be in \(0, 1\]"),
        ((1.05, 0.5, 0), "min_tokens = 0: must be >= 1"),
    ],
)
def test_prefill_swap_refuses_bad_parameters(
    arguments: tuple[float, float, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PrefillSwap(POPULARITY, *arguments)
