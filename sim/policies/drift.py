"""Stage boundaries without text: by a drift of the router's choices, or of its certainty.

RECONSTRUCTION. SAEM names implicit boundaries as future work; published detectors of shifts (JSD of
windowed histograms, Labeeb2339/stratamoe-lab) found every synthetic one, yet acting on them raised
traffic: that a drift is detected does not make it worth acting on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.policies.detectors import GuardedStageDetector, num_decoded
from sim.policies.history import History, PastRequest
from sim.policies.windows import HistogramWindows, MeanWindows, Windows
from sim.types import ConfigError, LayerRouting, Phase, StepInfo, View

_MOST_SLOTS = 64
"""Requests followed at one time, or as many as decode together; the one seen longest ago gives way."""


class WindowedStageDetector(GuardedStageDetector):
    """A boundary is marked when two adjacent windows of a request are far apart, several tokens in a row.

    How far is far is not a number of the user's: it is a quantile of the distances of adjacent windows
    in the calibration requests, at every token they decode. A distance that stays large marks one
    boundary only, until it has been small again.

    Parameters
    ----------
    windows
        The two windows of every request.
    calibration
        The requests from which the threshold comes.
    quantile
        In (0, 1): the share of calibration tokens at which the distance is no larger than the threshold.
    streak
        Decoded tokens in a row at which the distance must exceed the threshold.
    cooldown, max_steps
        The least and the greatest length of a stage in decode steps (None: no bound).
    """

    def __init__(
        self,
        windows: Windows,
        calibration: History,
        quantile: float = 0.95,
        streak: int = 3,
        cooldown: int = 64,
        max_steps: int | None = None,
    ) -> None:
        if cooldown < 1:
            raise ValueError(f"cooldown = {cooldown}: must be >= 1")
        super().__init__(cooldown, max_steps)
        if not 0.0 < quantile < 1.0:
            raise ValueError(f"quantile = {quantile}: must be in (0, 1)")
        if streak < 1:
            raise ValueError(f"streak = {streak}: must be >= 1")
        self.streak = streak
        self._windows = windows
        self._slots: dict[int, int] = {}  # of each request, the one seen longest ago first
        self._streaks: list[int] = []
        self._routings: list[LayerRouting] = []
        self._step: StepInfo | None = None  # the one whose routings these are
        self.threshold = float(np.quantile(self._distances(calibration), quantile))

    def features(self, routings: Sequence[LayerRouting]) -> NDArray:
        """Return what the windows hold of each token of a step, [num_tokens, ...]."""
        raise NotImplementedError

    def past_features(self, request: PastRequest) -> NDArray:
        """Return the same of a calibration request's tokens."""
        raise NotImplementedError

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Keep a decode step's routing until the step is over; once where a layer has several events."""
        kept = self._routings
        if self._step is not None and (not kept or kept[-1].layer != routing.layer):
            kept.append(routing)

    def is_marked(self, step: StepInfo) -> bool:
        """Tell whether the step before this one has shown a drift."""
        marked = bool(self._routings) and self._digest()
        self._step = None if step.phase == Phase.PREFILL else step
        return marked

    def _digest(self) -> bool:
        """Slide the windows over the step that is over; tell whether some streak is now long enough."""
        step, routings, self._routings = self._step, self._routings, []
        assert step is not None
        decoded = num_decoded(step)
        if not decoded:
            return False
        slots = self._slots_of(step.request_ids[:decoded])
        far = self._windows.add(slots, self.features(routings)[:decoded]) > self.threshold
        marked = False
        for slot, is_far in zip(slots.tolist(), far.tolist(), strict=True):
            self._streaks[slot] = streak = self._streaks[slot] + 1 if is_far else 0
            marked = marked or streak == self.streak
        return marked

    def _slots_of(self, requests: Sequence[int]) -> NDArray[np.intp]:
        """Return the slot of each request; one that is new gets a free one."""
        known = self._slots
        for request in requests:
            slot = known.pop(request, None)
            if slot is None:
                slot = self._free_slot(len(requests))
            known[request] = slot
        return np.array([known[request] for request in requests], dtype=np.intp)

    def _free_slot(self, batch: int) -> int:
        if len(self._slots) >= max(_MOST_SLOTS, 2 * batch):
            slot = self._slots.pop(next(iter(self._slots)))
        else:
            slot = len(self._streaks)
            self._streaks.append(0)
        self._windows.clear(slot)
        self._streaks[slot] = 0
        return slot

    def _distances(self, calibration: History) -> NDArray[np.float64]:
        """Return the distances at all tokens that the calibration requests decode, where there are any."""
        decoded = [self.past_features(r)[r.num_prompt :] for r in calibration.requests()]
        found = list(self._slide_over(decoded))
        distances = np.concatenate(found) if found else np.empty(0)
        distances = distances[~np.isnan(distances)]
        if not len(distances):
            raise ValueError(
                f"short = {self._windows.short}: must be smaller, for no calibration request decodes "
                "twice as many tokens"
            )
        for slot in range(len(decoded)):
            self._windows.clear(slot)
        return distances

    def _slide_over(self, requests: Sequence[NDArray]) -> Iterator[NDArray[np.float64]]:
        """Advance all requests together, token by token; yield the distances at each."""
        for slot in range(len(requests)):
            self._windows.clear(slot)
        for place in range(max(map(len, requests), default=0)):
            slots = [slot for slot, tokens in enumerate(requests) if place < len(tokens)]
            tokens = np.stack([requests[slot][place] for slot in slots])
            yield self._windows.add(np.array(slots, dtype=np.intp), tokens)


class DriftStageDetector(WindowedStageDetector):
    """Mark a boundary where the experts of the last tokens differ from those of the tokens before.

    Parameters
    ----------
    calibration, quantile, streak, cooldown, max_steps
        See :class:`WindowedStageDetector`.
    short, long
        Tokens in the recent window and in the one before it.
    distance
        "cosine" or "jsd", see :class:`sim.policies.windows.HistogramWindows`.
    """

    def __init__(
        self,
        calibration: History,
        short: int = 32,
        long: int = 128,
        distance: str = "cosine",
        quantile: float = 0.95,
        streak: int = 3,
        cooldown: int = 64,
        max_steps: int | None = None,
    ) -> None:
        shape = (calibration.num_layers, calibration.num_experts, calibration.top_k)
        windows = HistogramWindows(shape, short, long, distance)
        super().__init__(windows, calibration, quantile, streak, cooldown, max_steps)

    def features(self, routings: Sequence[LayerRouting]) -> NDArray:
        """Return the choices of all layers, int[num_tokens, num_layers, top_k]."""
        ids = [routing.topk_ids for routing in routings]
        if any(one is None for one in ids):
            raise ConfigError("policy.stages: a drift is found token by token: needs topk_ids")
        return np.stack(ids, axis=1)  # type: ignore[arg-type]

    def past_features(self, request: PastRequest) -> NDArray:
        """Return the recorded choices."""
        return request.ids


class EntropyStageDetector(WindowedStageDetector):
    """Mark a boundary where the routers have become more certain, or less, than they were.

    The certainty of a token is the entropy of the softmax of its router logits, as a share of the
    largest possible, averaged over layers. Needs a trace with router logits.

    Parameters
    ----------
    calibration, quantile, streak, cooldown, max_steps
        See :class:`WindowedStageDetector`.
    short, long
        Tokens in the recent window and in the one before it.
    """

    needs: ClassVar[tuple[str, ...]] = ("router_logits",)

    def __init__(
        self,
        calibration: History,
        short: int = 32,
        long: int = 128,
        quantile: float = 0.95,
        streak: int = 3,
        cooldown: int = 64,
        max_steps: int | None = None,
    ) -> None:
        windows = MeanWindows(short, long)
        super().__init__(windows, calibration, quantile, streak, cooldown, max_steps)

    def features(self, routings: Sequence[LayerRouting]) -> NDArray:
        """Return each token's mean entropy, float[num_tokens]."""
        logits = [routing.router_logits for routing in routings]
        if any(one is None for one in logits):
            raise ConfigError("policy.stages: the trace has no router_logits, which this needs")
        return mean_entropy(np.stack(logits, axis=1))  # type: ignore[arg-type]

    def past_features(self, request: PastRequest) -> NDArray:
        """Return the mean entropy of a calibration request's tokens."""
        if request.router_logits is None:
            raise ValueError("calibration has no router_logits, which this needs")
        return mean_entropy(request.router_logits)


def mean_entropy(logits: NDArray) -> NDArray[np.float64]:
    """Return the entropy of softmax(``logits`` [num_tokens, num_layers, num_experts]), in [0, 1], by token.

    As a share of log(num_experts), averaged over layers.
    """
    exact = logits.astype(np.float32)
    exact -= exact.max(axis=-1, keepdims=True)
    np.maximum(exact, -1e4, out=exact)  # an expert that is masked out counts as never chosen
    scores = np.exp(exact)
    total = scores.sum(axis=-1)
    entropy = np.log(total) - (scores * exact).sum(axis=-1) / total
    largest = np.log(max(2, logits.shape[-1]))
    return np.asarray((entropy / largest).mean(axis=-1), dtype=np.float64)
