"""Is there stage structure beyond token locality? The whole test of a trace's stages.

Pairs of tokens at equal distance and windows of equal length are compared with the same of random cuts
(sim/stage_draws.py); then stages of a kind across requests, and what a cache of stages would hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.stage_capture import Capture, capture
from sim.stage_cuts import StagedText, window_texts
from sim.stage_draws import Draws, draw_cuts, mean_length
from sim.stage_findings import Findings, PairResult
from sim.stage_kinds import Stages, contrast_kinds, stages_of, unrelated_overlap
from sim.stage_pair_test import PairTest
from sim.stage_split_test import SplitTest
from sim.stage_usual import UsualUse
from sim.types import ConfigError
from traces.schema import NO_EXPERT, Trace

EDGES = (0, 8, 16, 32, 64, 128)
_RATIOS = (0.125, 0.25, 0.5)
"""Shares of a layer's experts that a cache holds."""


@dataclass(frozen=True, slots=True)
class TestSettings:
    """How stages are tested.

    Attributes
    ----------
    draws
        Random cuts of each kind, >= 1.
    seed
        Of all that is drawn.
    edges
        Bounds of the bands of distances, in tokens, ascending from 0.
    """

    __test__ = False  # the name is no test's

    draws: int = 1000
    seed: int = 0
    edges: tuple[int, ...] = EDGES


def examine(
    trace: Trace,
    texts: Sequence[StagedText],
    by: str,
    settings: TestSettings,
    on_layer: Callable[[], None] | None = None,
) -> Findings:
    """Test the stages of some texts; ``by`` names who cut them, ``on_layer`` is told of each layer done.

    Raises ConfigError where no text has two stages.
    """
    if all(len(text.kinds) < 2 for text in texts):
        raise ConfigError(f"{by}: no request has two stages: there is nothing to test")
    pairs, beyond, splits = _test(trace, texts, settings, on_layer)
    meta, rng = trace.meta, np.random.default_rng([settings.seed, 1])
    stages, length = stages_of(trace, texts), mean_length(texts)
    has_kinds = len(texts) > 1 and len(np.unique(stages.kind)) > 1
    windows = stages_of(trace, window_texts(texts, length))
    sizes = sorted({max(meta.top_k, round(ratio * meta.num_experts)) for ratio in _RATIOS})

    def captured(some: Stages) -> tuple[Capture, ...]:
        """Nothing can be learnt from other requests where there is one only."""
        return tuple(capture(some, size, rng) for size in sizes) if len(texts) > 1 else ()

    return Findings(
        f"{meta.provenance.kind} trace of {meta.model}",
        by,
        num_texts=len(texts),
        num_stages=len(stages.kind),
        num_tokens=int(stages.tokens.sum()),
        mean_length=length,
        draws=settings.draws,
        unrelated=unrelated_overlap(stages, meta.top_k),
        pairs=pairs,
        beyond=beyond,
        splits=tuple(split.tell() for split in splits),
        kinds=contrast_kinds(stages, meta.top_k, settings.draws, rng) if has_kinds else None,
        captures=captured(stages),
        window_captures=captured(windows),
    )


def _test(
    trace: Trace,
    texts: Sequence[StagedText],
    settings: TestSettings,
    on_layer: Callable[[], None] | None,
) -> tuple[PairResult, PairResult | None, list[SplitTest]]:
    """Go through the layers; only one is unpacked at a time."""
    draws: Draws = draw_cuts(texts, settings.draws, settings.seed)
    top_k, ids, length = trace.meta.top_k, trace.token_id, mean_length(texts)
    plain, beyond = (PairTest(texts, draws, settings.edges, settings.seed) for _ in range(2))
    windows = sorted({max(1, length // part) for part in (8, 4, 2)})
    splits = [SplitTest(texts, draws, window, settings.seed) for window in windows]
    usual = None
    if ids is not None and len(texts) > 1:  # what is usual is learnt from the other texts
        usual = UsualUse([ids[text.rows] for text in texts])
    for layer in range(trace.meta.num_layers):
        uses = [_uses(trace, text, layer) for text in texts]
        plain.add(uses, top_k)
        for split in splits:
            split.add(uses)
        if usual is not None:
            usual.learn(uses)
            beyond.add([usual.beyond(text, one) for text, one in enumerate(uses)], top_k)
        if on_layer is not None:
            on_layer()
    return plain.tell(), None if usual is None else beyond.tell(), splits


def _uses(trace: Trace, text: StagedText, layer: int) -> NDArray[np.float32]:
    """Return which experts of a layer each token uses, 0 or 1, float32[num_tokens, num_experts]."""
    ids = trace.expert_ids[text.rows, layer].astype(np.int64)
    found = np.zeros((len(ids), trace.meta.num_experts + 1), np.float32)
    np.put_along_axis(found, np.where(ids == NO_EXPERT, found.shape[1] - 1, ids), 1.0, axis=1)
    return np.ascontiguousarray(found[:, :-1])
