"""Stage detectors by hand: annotation, fixed windows, guards, and drifts of the router."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from sim.policies.detectors import (
    AnnotatedStageDetector,
    CueStageDetector,
    FixedStageDetector,
    GuardedStageDetector,
)
from sim.policies.drift import DriftStageDetector, EntropyStageDetector, mean_entropy
from sim.policies.history import PastRequest
from sim.policies.windows import HistogramWindows, MeanWindows
from sim.types import ConfigError, KeySpace, LayerRouting, Phase, StepInfo, View
from tests.strategies import ConstantCosts

LAYERS, EXPERTS = 2, 4


def decode(
    step: int, requests: Sequence[int] = (0,), stages: tuple[int, ...] | None = None
) -> StepInfo:
    n = len(requests)
    return StepInfo(step, Phase.DECODE, n, n, request_ids=tuple(requests), stages=stages)


class Past:
    """Calibration requests made of experts, the same in both layers, or of logits."""

    num_layers, num_experts, top_k = LAYERS, EXPERTS, 1

    def __init__(self, *texts: Sequence[int], prompt: int = 0, logits: bool = False) -> None:
        self.texts, self.prompt, self.logits = texts, prompt, logits

    def popularity(self) -> NDArray[np.float64]:
        raise AssertionError("nobody asks")

    def requests(self) -> Iterator[PastRequest]:
        for text in self.texts:
            ids = both_layers(text)
            yield PastRequest(ids, self.prompt, router_logits=sharp(text) if self.logits else None)


def both_layers(experts: Sequence[int]) -> NDArray[np.uint16]:
    return np.array(experts, np.uint16)[:, None, None].repeat(LAYERS, axis=1)


def sharp(certain: Sequence[int]) -> NDArray[np.float16]:
    """Logits of tokens whose routers are certain (1) or not at all (0)."""
    logits = np.zeros((len(certain), LAYERS, EXPERTS), np.float16)
    logits[np.array(certain) == 1, :, 0] = 50
    return logits


class Told(LayerRouting):
    """A routing with these choices and logits of one layer, [n, 1] and [n, num_experts]."""

    def __init__(self, layer: int, ids: NDArray, logits: NDArray | None = None) -> None:
        super().__init__(layer, (), ())
        self._ids, self._logits = ids, logits

    @property
    def topk_ids(self) -> NDArray:
        return self._ids

    @property
    def router_logits(self) -> NDArray | None:
        return self._logits


def play(detector: GuardedStageDetector, *texts: Sequence[int], logits: bool = False) -> list[int]:
    """Let requests decode these experts side by side; return the steps that begin a stage."""
    from sim.residency import Residency

    keys = KeySpace(LAYERS, EXPERTS)
    view = View(keys, ConstantCosts(), decode(0), Residency(keys, [1, 1], [0, 1], [1, 1]))
    found = []
    for step, experts in enumerate(zip(*texts, strict=True)):
        if detector.is_boundary(decode(step, range(len(texts)))):
            found.append(step)
        ids, values = both_layers(experts), sharp(experts) if logits else None
        for layer in range(LAYERS):
            own = None if values is None else values[:, layer]
            detector.observe(Told(layer, ids[:, layer], own), view)
    return found


# -- annotation, the clock, cues -------------------------------------------------------------------


def test_an_annotated_stage_begins_where_the_label_changes_and_unknown_ones_change_nothing() -> (
    None
):
    detector = AnnotatedStageDetector()
    prompt = StepInfo(0, Phase.PREFILL, 2, 1, request_ids=(0, 0), stages=(0, 0))
    assert not detector.is_boundary(prompt)
    labels = [1, 1, -1, 1, 2, -1, 3]
    infos = [decode(i, stages=(label,)) for i, label in enumerate(labels)]
    assert [i.step for i in infos if detector.is_boundary(i)] == [0, 4, 6]


def test_a_new_request_has_no_stage_before_its_first() -> None:
    detector = AnnotatedStageDetector()
    steps = [((0, 1), (1, 5)), ((0, 1), (1, 5)), ((0, 2), (1, 7)), ((0, 2), (1, 8))]
    infos = [decode(i, requests, stages) for i, (requests, stages) in enumerate(steps)]
    assert [detector.is_boundary(info) for info in infos] == [False, False, False, True]


def test_a_request_that_sits_out_keeps_its_stage() -> None:
    detector = AnnotatedStageDetector()
    steps = [((0, 1), (1, 5)), ((0,), (1,)), ((1,), (5,)), ((1,), (6,))]
    infos = [decode(i, requests, stages) for i, (requests, stages) in enumerate(steps)]
    assert [detector.is_boundary(info) for info in infos] == [False, False, False, True]


def test_in_a_mixed_step_only_decoded_tokens_begin_a_stage() -> None:
    detector = AnnotatedStageDetector()
    ids = (0, 1, 1)
    kind = {"num_sequences": 2, "num_decoding": 1, "request_ids": ids}
    mixed = [
        StepInfo(i, Phase.MIXED, 3, stages=s, **kind) for i, s in enumerate([(1, 4, 5), (1, 6, 6)])
    ]  # type: ignore[arg-type]
    assert [detector.is_boundary(info) for info in mixed] == [False, False]
    assert detector.is_boundary(decode(2, (0, 1), (1, 7)))


def test_annotations_that_are_not_there_are_asked_for() -> None:
    with pytest.raises(ConfigError, match="no annotated stages"):
        AnnotatedStageDetector().is_boundary(decode(0))


def test_fixed_windows_end_every_so_many_decode_steps() -> None:
    detector = FixedStageDetector(3)
    assert not detector.is_boundary(StepInfo(0, Phase.PREFILL, 5, request_ids=(0,) * 5))
    infos = [decode(i) for i in range(1, 11)]
    assert [i.step for i in infos if detector.is_boundary(i)] == [3, 6, 9]


def test_guards_hold_for_annotations_too() -> None:
    labels = [0, 1, 2, 3, 3, 3, 3, 3, 3]
    infos = [decode(i, stages=(label,)) for i, label in enumerate(labels)]
    detector = AnnotatedStageDetector(min_steps=3, max_steps=4)
    assert [i.step for i in infos if detector.is_boundary(i)] == [2, 6]


def cues(detector: CueStageDetector, *pieces: str) -> list[int]:
    infos = [
        StepInfo(i, Phase.DECODE, 1, request_ids=(0,), texts=(p,)) for i, p in enumerate(pieces)
    ]
    return [info.step for info in infos if detector.is_boundary(info)]


def test_a_cue_rests_for_some_tokens_after_one_that_counted() -> None:
    wait = "\nwait,"
    assert cues(CueStageDetector(["wait"], 1, refractory=0), wait, wait, wait) == [0, 1, 2]
    assert cues(CueStageDetector(["wait"], 1, refractory=2), *[wait] * 7) == [0, 3, 6]
    # A cue that comes too soon for a boundary counts all the same, and those after it rest.
    assert cues(CueStageDetector(["wait"], 2, refractory=3), *[wait] * 6) == [4]


def test_a_cue_may_count_inside_a_sentence() -> None:
    pieces = ("so", " wait", " a", " bit", ", await", " it")
    assert cues(CueStageDetector(["wait"], 1, sentence_start=False), *pieces) == [2]
    assert cues(CueStageDetector(["wait"], 1), *pieces) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedStageDetector(0), "steps = 0"),
        (lambda: AnnotatedStageDetector(0), "min_steps = 0"),
        (lambda: AnnotatedStageDetector(5, 4), "min_steps = 5"),
        (lambda: CueStageDetector(["x"], refractory=-1), "refractory = -1"),
        (lambda: drift(short=0), "short = 0"),
        (lambda: drift(short=5, long=4), "short = 5"),
        (lambda: drift(distance="l2"), "distance = l2"),
        (lambda: drift(quantile=1.0), "quantile = 1.0"),
        (lambda: drift(streak=0), "streak = 0"),
        (lambda: drift(cooldown=0), "cooldown = 0"),
        (lambda: DriftStageDetector(Past([0] * 9), short=5), "short = 5: must be smaller"),
        (lambda: EntropyStageDetector(Past([0] * 9), 2, 2), "calibration has no router_logits"),
    ],
)
def test_parameters_are_checked(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# -- windows -----------------------------------------------------------------------------------------


def test_distances_of_histograms_by_hand() -> None:
    """Recent window of 2 tokens, 2 before it, one layer; expert 9 stands for none."""
    windows = HistogramWindows((1, 4, 1), 2, 2)
    tokens = [0, 0, 0, 1, 1, 0, 65535]
    found = [float(windows.add(np.array([0]), np.array([[[t]]]))[0]) for t in tokens]
    half = 1 - 1 / np.sqrt(2)  # {0: 2} against {0: 1, 1: 1}
    # after 4: past 00, recent 01; 5: past 00, recent 11; 6: 01 and 10; 7: past 11, recent {0: 1}
    np.testing.assert_allclose(found, [np.nan, np.nan, np.nan, half, 1, 0, 1], atol=1e-6)


def test_divergence_by_hand() -> None:
    windows = HistogramWindows((1, 4, 1), 2, 2, "jsd")
    found = [float(windows.add(np.array([0]), np.array([[[t]]]))[0]) for t in (0, 0, 1, 1, 0)]
    # {0: 1} against {1: 1} is 1 bit; then {0: 1/2, 1: 1/2} against itself
    np.testing.assert_allclose(found[3:], [1, 0], atol=1e-6)


def test_each_slot_has_windows_of_its_own_and_may_begin_anew() -> None:
    windows = HistogramWindows((1, 4, 1), 1, 1)
    for slot in range(9):  # more than there is room for at first
        windows.clear(slot)
    both = np.array([0, 8])
    assert np.isnan(windows.add(both, np.array([[[0]], [[2]]]))).all()
    np.testing.assert_allclose(windows.add(both, np.array([[[1]], [[2]]])), [1, 0])
    windows.clear(8)
    assert np.isnan(windows.add(np.array([8]), np.array([[[3]]])))


def test_means_by_hand() -> None:
    windows = MeanWindows(1, 2)
    found = [float(windows.add(np.array([0]), np.array([x]))[0]) for x in (1.0, 3.0, 8.0, 8.0)]
    np.testing.assert_allclose(found, [np.nan, 2, 6, 2.5])  # 8 - (1 + 3) / 2, 8 - (3 + 8) / 2


def test_entropy_is_a_share_of_the_largest() -> None:
    np.testing.assert_allclose(mean_entropy(sharp([0, 1])), [1, 0], atol=1e-6)
    masked = np.array([[[0.0, 0.0, -np.inf, -np.inf]]], np.float16)
    np.testing.assert_allclose(mean_entropy(masked), [0.5], atol=1e-6)


# -- drift -------------------------------------------------------------------------------------------


def drift(**changes) -> DriftStageDetector:
    """Calibrated on a text whose expert never changes but in one place of 24."""
    settings = {"short": 2, "long": 2, "quantile": 0.5, "streak": 1, "cooldown": 1, **changes}
    return DriftStageDetector(Past([0] * 12 + [1] * 12), **settings)


def test_the_threshold_is_a_quantile_of_the_calibrations_own_distances() -> None:
    # Of 21 distances, 18 are 0; where the expert changes they are .293, 1, .293.
    assert drift(quantile=0.8).threshold == pytest.approx(0, abs=1e-6)
    assert drift(quantile=0.999).threshold == pytest.approx(1, abs=0.02)
    assert drift(quantile=0.9).threshold == pytest.approx(1 - 1 / np.sqrt(2))
    prompt = DriftStageDetector(Past([0] * 12 + [1] * 12, prompt=12), 2, 2, quantile=0.99)
    assert prompt.threshold == pytest.approx(0, abs=1e-6), "prompts do not count"


def test_a_drift_is_seen_one_step_after_it_and_marks_one_boundary() -> None:
    text = [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert play(drift(), text) == [6]  # token 5 is the first of the new kind
    assert play(drift(streak=2), text) == [7]
    assert play(drift(streak=3), text) == [8]
    assert play(drift(streak=4), text) == [], "it is far for three tokens only"
    assert play(drift(distance="jsd"), text) == [6]


def test_the_cooldown_counts_decode_steps_from_the_last_boundary() -> None:
    text = [0] * 6 + [1] * 6 + [2] * 6
    assert play(drift(), text) == [7, 13]
    assert play(drift(cooldown=7), text) == [7]


def test_a_drift_in_any_request_counts_and_windows_are_not_mixed() -> None:
    steady, changing = [3] * 12, [0] * 6 + [1] * 6
    assert play(drift(), steady, steady, changing) == [7]
    assert play(drift(), [0] * 12, [1] * 12) == []


def test_prompts_are_not_watched() -> None:
    detector = drift()
    assert not detector.is_boundary(StepInfo(0, Phase.PREFILL, 6, request_ids=(0,) * 6))
    ids = both_layers([0] * 6)
    detector.observe(Told(0, ids[:, 0]), None)  # type: ignore[arg-type]
    assert play(detector, [1] * 8) == []


def test_more_requests_than_are_followed_do_no_harm() -> None:
    detector = drift()
    for request in range(200):
        detector.is_boundary(decode(request, (request,)))
        for layer in range(LAYERS):
            detector.observe(Told(layer, both_layers([0])[:, layer]), None)  # type: ignore[arg-type]
    assert len(detector._slots) == 64
    assert play(detector, [0] * 5 + [1] * 3) == [6]


def test_a_change_of_certainty_is_found() -> None:
    past = Past([0] * 12 + [1] * 12, logits=True)
    detector = EntropyStageDetector(past, 2, 2, quantile=0.5, streak=1, cooldown=1)
    assert play(detector, [1] * 6 + [0] * 6, logits=True) == [7]
    with pytest.raises(ConfigError, match="no router_logits"):
        play(detector, [0] * 3)
