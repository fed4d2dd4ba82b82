"""Each policy class by itself: its rule on cases computed by hand. Keys are ``layer * 4 + expert``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from sim.policies.base import CachePolicy, PolicySet
from sim.policies.classic import FIFO, LFU, LRU, OnDemand, Static, rank
from sim.policies.detectors import CueStageDetector
from sim.policies.oracle import NEVER, Belady, NextUse
from sim.policies.placement import InSituCPU
from sim.policies.repack import ExpertAligned
from sim.residency import Residency
from sim.types import ExpertWork, KeySpace, LayerRouting, Phase, Service, StepInfo, View
from tests.strategies import ConstantCosts

CUES = ["wait", "alternatively", r"step \d+"]


def make_view(costs: ConstantCosts | None = None) -> View:
    keys = KeySpace(2, 4)
    residency = Residency(keys, [1, 1], [0, 0], [8])
    return View(keys, costs or ConstantCosts(), StepInfo(0, Phase.DECODE, 1), residency)


def anything(key: int) -> bool:
    return True


def event(*keys: int, tokens: int = 1) -> LayerRouting:
    return LayerRouting(keys[0] // 4, keys, [tokens] * len(keys))


def insert(policy: CachePolicy, *keys: int) -> View:
    view = make_view()
    for key in keys:
        policy.on_insert(key, view)
    return view


def drops(policy: CachePolicy, view: View, number: int) -> list[int | None]:
    """Return the next victims, each dropped before the next is asked for."""
    found: list[int | None] = []
    for _ in range(number):
        found.append(policy.choose_victim(anything, view))
        if found[-1] is not None:
            policy.on_evict(found[-1])
    return found


# -- classic -------------------------------------------------------------------------------------


def test_static_gives_up_the_least_popular_and_wants_it_back() -> None:
    policy = Static(np.array([[1.0, 4.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0]]))
    policy.start(range(4), 4, make_view())
    view = insert(policy, *policy.preload(make_view()))
    assert policy.choose_victim(anything, view) is None
    gone = []
    for _ in range(2):
        gone.append(policy.give_up(anything, view))
        policy.on_evict(gone[-1])
    assert gone == [0, 2]
    assert list(policy.wants(view)) == [2, 0]
    policy.on_insert(2, view)
    assert list(policy.wants(view)) == [0]
    assert policy.give_up(anything, view) == 2


def test_on_demand_admits_nothing() -> None:
    policy = OnDemand()
    assert not policy.admits(3, make_view())
    assert policy.choose_victim(anything, make_view()) is None


def test_lru_drops_the_longest_unused() -> None:
    policy = LRU()
    view = insert(policy, 0, 1, 2)
    policy.on_hit([0], view)
    assert drops(policy, view, 4) == [1, 2, 0, None]


def test_lru_keeps_the_order_of_use_within_an_event() -> None:
    policy = LRU()
    view = insert(policy, 0, 1, 2)
    policy.on_hit([2, 0], view)
    assert drops(policy, view, 3) == [1, 2, 0]


def test_lru_skips_what_may_not_go_and_keeps_its_place() -> None:
    policy = LRU()
    view = insert(policy, 0, 1)
    assert policy.choose_victim(lambda key: key != 0, view) == 1
    assert policy.choose_victim(anything, view) == 0


def test_fifo_ignores_uses() -> None:
    policy = FIFO()
    view = insert(policy, 0, 1)
    policy.on_hit([0], view)
    assert drops(policy, view, 2) == [0, 1]


def test_lfu_counts_tokens_and_breaks_ties_by_last_use() -> None:
    policy, view = LFU(), make_view()
    for number, (key, tokens) in enumerate([(0, 1), (1, 3), (2, 1)]):
        view.event = number
        policy.observe(event(key, tokens=tokens), view)
        policy.on_insert(key, view)
    assert drops(policy, view, 3) == [0, 2, 1]


def test_lfu_remembers_the_count_of_what_it_dropped() -> None:
    policy, view = LFU(), make_view()
    for key in (0, 0, 0, 1, 1):
        policy.observe(event(key), view)
    insert(policy, 0, 1)
    policy.on_evict(0)
    policy.on_insert(0, view)
    assert policy.choose_victim(anything, view) == 1


def test_lfu_with_decay_forgets() -> None:
    def victim(decay: float) -> int | None:
        policy, view = LFU(decay), make_view()
        for step, key in enumerate([0, 0, 1]):  # 0 twice, then 1 once two steps later
            view.step = StepInfo(4 * (step // 2), Phase.DECODE, 1)
            policy.observe(event(key), view)
        insert(policy, 0, 1)
        return policy.choose_victim(anything, view)

    # 0 is worth 2 * decay ** 4 when 1 is worth 1: even at decay = 0.5 ** 0.25.
    assert victim(1.0) == 1
    assert victim(0.85) == 1
    assert victim(0.83) == 0


def test_lfu_survives_more_decay_than_a_float_can_hold() -> None:
    policy, view = LFU(decay=0.5), make_view()
    for step in range(5000):
        view.step, view.event = StepInfo(step, Phase.DECODE, 1), step
        policy.observe(event(step % 3), view)
    insert(policy, 0, 1, 2)
    assert drops(policy, view, 3) == [2, 0, 1]  # used last at 4997, 4998, 4999


@pytest.mark.parametrize("decay", [0.0, 1.5, -1.0])
def test_lfu_refuses_a_decay_outside_its_range(decay: float) -> None:
    with pytest.raises(ValueError, match=rf"decay = {decay}: must be in \[0.01, 1\]"):
        LFU(decay)


def test_lfu_admits_after_the_event_only_with_bypass() -> None:
    assert LFU(bypass=True).admits_after
    assert not LFU(bypass=False).admits_after


def test_rank_keeps_equals_in_the_order_given() -> None:
    assert rank([3, 1, 2, 0], np.array([5.0, 1.0, 5.0, 9.0])) == [3, 2, 0, 1]


def test_static_preloads_by_popularity_within_its_pool_and_never_changes() -> None:
    policy, view = Static(np.array([[1, 4, 0, 2], [9, 0, 0, 9]])), make_view()
    policy.start(range(4), 2, view)
    assert list(policy.preload(view)) == [1, 3, 0, 2]
    assert policy.pins(1)
    assert not policy.admits(2, view)
    assert policy.choose_victim(anything, view) is None


# -- oracle --------------------------------------------------------------------------------------


def test_next_use_is_strictly_after_the_event() -> None:
    future = NextUse([event(0, 1), event(4), event(0), event(1)])
    assert [future.after(0, now) for now in (-1, 0, 1, 2)] == [0, 2, 2, NEVER]
    assert [future.after(1, now) for now in (0, 2, 3)] == [3, 3, NEVER]
    assert future.after(7, 0) == NEVER


def belady(uses: Sequence[LayerRouting], *keys: int) -> tuple[Belady, View]:
    policy, view = Belady(NextUse(uses)), make_view()
    view.event = 0
    for key in keys:
        policy.on_insert(key, view)
    return policy, view


def test_belady_drops_the_farthest_next_use() -> None:
    policy, view = belady([event(3), event(1), event(0), event(2)], 0, 1, 2)
    assert drops(policy, view, 4) == [2, 0, 1, None]


def test_belady_looks_past_a_use_when_it_happens() -> None:
    policy, view = belady([event(3), event(1), event(0), event(2), event(0)], 0, 1, 2)
    view.event = 1
    policy.on_hit([1], view)  # never again
    assert drops(policy, view, 3) == [1, 2, 0]


def test_belady_passes_over_what_may_not_go_without_forgetting_it() -> None:
    policy, view = belady([event(3), event(1), event(0), event(2)], 0, 1, 2)
    assert policy.choose_victim(lambda key: key == 1, view) == 1
    assert drops(policy, view, 3) == [2, 0, 1]


def test_belady_is_an_oracle_and_a_set_with_it_too() -> None:
    assert PolicySet([Belady(NextUse([]))]).oracle
    assert not PolicySet([LRU()], placement=InSituCPU()).oracle
    assert not PolicySet([LRU()]).lossy


# -- placement and repacking ---------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "service"), [(2, Service.CPU), (3, Service.LOAD)])
def test_in_situ_runs_on_the_cpu_while_that_is_cheaper_than_a_load(
    tokens: int, service: Service
) -> None:
    view = make_view(ConstantCosts(cpu=40, load=100, gpu=20))  # 40 a token against 120
    assert list(InSituCPU().place([ExpertWork(1, tokens)], view)) == [service]


def test_in_situ_judges_each_expert_alone() -> None:
    view = make_view(ConstantCosts(cpu=40, load=100, gpu=10))
    work = [ExpertWork(0, 1), ExpertWork(1, 9), ExpertWork(2, 2)]
    assert list(InSituCPU().place(work, view)) == [Service.CPU, Service.LOAD, Service.CPU]


def test_expert_aligned_packs_and_keeps_one_micro_batch() -> None:
    policy = ExpertAligned()
    assert policy.packed
    assert policy.repack(event(0, 1), make_view()) is None


# -- stages --------------------------------------------------------------------------------------


def boundaries(detector: CueStageDetector, *pieces: str) -> list[int]:
    """Return the decode steps at which a stage begins."""
    steps = [StepInfo(i, Phase.DECODE, 1, 1, 0, (0,), (text,)) for i, text in enumerate(pieces)]
    return [info.step for info in steps if detector.is_boundary(info)]


def test_a_cue_counts_at_the_start_of_a_line_or_sentence_once_its_word_has_ended() -> None:
    pieces = ["Wait", " and", " wait", ".", " Wait", "\n\n", "WAIT", ",", " yes"]
    assert boundaries(CueStageDetector(CUES, min_steps=1), *pieces) == [1, 5, 7]


def test_a_cue_may_come_in_pieces_and_be_an_expression() -> None:
    pieces = ["a", ".", "\n", "Alter", "native", "ly", ",", "\nStep ", "2", ":"]
    assert boundaries(CueStageDetector(CUES, min_steps=1), *pieces) == [6, 9]


@pytest.mark.parametrize("piece", ["Wait,", "Wait ", "\nWait, no"])
def test_a_cue_inside_a_longer_piece_counts(piece: str) -> None:
    assert boundaries(CueStageDetector(CUES, min_steps=1), "a.\n", piece, " it") == [1]


def test_the_beginning_of_a_longer_word_is_no_cue() -> None:
    assert boundaries(CueStageDetector(CUES, min_steps=1), "a.\n", "wait", "ress", "es.") == []


def test_stages_keep_their_least_and_greatest_length() -> None:
    cue = "\nwait,"
    assert boundaries(CueStageDetector(CUES, min_steps=3), *[cue] * 7) == [2, 5]
    assert boundaries(CueStageDetector(CUES, 1, max_steps=4), *["x"] * 9) == [3, 7]


def test_prompts_and_missing_text_are_no_cues() -> None:
    detector = CueStageDetector(CUES, min_steps=1, max_steps=2)
    prompt = StepInfo(0, Phase.PREFILL, 1, 1, 0, (0,), ("\nwait,",))
    assert not detector.is_boundary(prompt)
    silent = [StepInfo(i, Phase.DECODE, 1, 1, 0, (0,)) for i in range(2)]
    assert [detector.is_boundary(info) for info in silent] == [False, True]


def test_each_request_of_a_batch_has_its_own_text() -> None:
    detector = CueStageDetector(CUES, min_steps=1)
    batch = [("so", "\nwa"), ("it", "x"), ("x", "\nwait,")]
    infos = [StepInfo(i, Phase.DECODE, 2, 2, 0, (0, 1), pair) for i, pair in enumerate(batch)]
    assert [detector.is_boundary(info) for info in infos] == [False, False, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((CUES, 0), "min_steps = 0"),
        ((CUES, 9, 8), "min_steps = 9"),
        (([],), "cues"),
        ((["("],), "cues"),
    ],
)
def test_a_detector_refuses_bad_parameters(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CueStageDetector(*arguments)  # type: ignore[arg-type]
