"""What the tests of predictors share: asking one at every event of a run, and how right it is."""

from __future__ import annotations

from collections.abc import Sequence

from sim.calibration import Calibration
from sim.lockstep import run_lockstep
from sim.policies.base import PolicySet, Predictor, PrefetchPolicy
from sim.policies.classic import LRU
from sim.policies.prefetch import expected
from sim.types import LayerRouting, Phase, View
from sim.workload import Workload
from tests.strategies import FREE, Memory, Token, build, make_trace


class Witness(PrefetchPolicy):
    """Loads nothing; keeps the scores that a predictor gives at each event to layers ahead."""

    def __init__(self, predictor: Predictor, distances: Sequence[int], width: int) -> None:
        self.scores: dict[tuple[int, int], list[float]] = {}
        self.names: dict[tuple[int, int], list[int]] = {}
        self._predictor = predictor
        self._distances = distances
        self._width = width

    def propose(self, routing: LayerRouting, view: View) -> Sequence[int]:
        for ahead in self._distances:
            layer = (view.layer + ahead) % view.num_layers
            said = self._predictor.scores(layer, view)
            self.scores[view.event, ahead] = [round(float(score), 6) for score in said]
            self.names[view.event, ahead] = list(
                expected(self._predictor, layer, self._width, view)
            )
        return ()


def ask(
    workload: Workload, predictor: Predictor, *distances: int, width: int | None = None
) -> Witness:
    """Replay a workload and return what the predictor said at each event, by (event, distance)."""
    witness = Witness(predictor, distances or (1,), width or workload.trace.meta.top_k)
    policies = PolicySet([LRU()], prefetch=witness, predictor=predictor)
    everything = Memory(workload.num_layers * workload.num_experts)
    run_lockstep(workload, build(workload, policies, everything, FREE))
    return witness


def slot_overlap(workload: Workload, predictor: Predictor, distance: int = 1) -> float:
    """Return the share of decoded tokens' experts that were named ``distance`` layers before, in their step.

    As many experts are named as a token uses; batch size 1.
    """
    witness = ask(workload, predictor, distance)
    right = slots = event = 0
    for step in workload.steps():
        routings = workload.routings(step)
        for layer in range(distance, workload.num_layers):
            if step.info.phase == Phase.DECODE:
                truth = {key % workload.num_experts for key in routings[layer].experts}
                named = witness.names[event + layer - distance, distance]
                right += len(truth.intersection(named))
                slots += len(truth)
        event += workload.num_layers
    return right / slots


def past(requests: Sequence[Sequence[Token]], num_experts: int = 4, prompt: int = 1) -> Calibration:
    """Return calibration requests made of tokens, of which the first ``prompt`` are prompt."""
    trace = make_trace([(tokens[:prompt], tokens[prompt:]) for tokens in requests], num_experts)
    workload = Workload(trace)
    return Calibration(trace, (0, len(requests)), workload.requests)
