"""A small predictor for every layer, trained on the calibration requests before the run.

    inputs    the experts that the token uses in the layer under way, 0/1
              the experts that the target layer used for the token before it, 0/1 (nothing for a prompt's
              tokens, all of which a layer sees at one time)
    output    for each expert of the target layer the probability that the token uses it

One hidden layer of rectified units beside a direct connection; logistic loss; Adam (arXiv 1412.6980). ProMoE
(arXiv 2410.22134) trains such a network a layer on hidden states, which traces do not hold, so this one knows
less than theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.policies.base import Predictor
from sim.policies.history import History
from sim.policies.predictors import LastTokens, chosen_ids
from sim.types import NO_EXPERT, ConfigError, LayerRouting, View

_BATCH = 256
_DECAYS = 0.9, 0.999  # of Adam's moments, as in its paper
_SMALL = 1e-8
_MOST_WORK = 1.5e11  # multiplications that training may take in all: some ten seconds on one core
_LARGE_STEP = 512  # tokens of a step that are looked at together


@dataclass(slots=True)
class _Past:
    """Calibration tokens in order, and for each where it comes from.

    ids          uint16[num_tokens, num_layers, top_k]
    request      int[num_tokens]
    follows      bool[num_tokens]: a decoded token, so that the one before it was seen earlier
    """

    ids: NDArray[np.uint16]
    request: NDArray[np.intp]
    follows: NDArray[np.bool_]


class _Network:
    """The predictor of one layer: ``weights`` are hidden, hidden bias, output, direct, output bias."""

    def __init__(
        self, num_experts: int, hidden: int, mean: NDArray[np.float32], rng: np.random.Generator
    ) -> None:
        inputs = 2 * num_experts
        scale = (1.0 / inputs) ** 0.5
        odds = np.clip(mean, 1e-4, 1.0 - 1e-4)
        self.weights: list[NDArray[np.float32]] = [
            rng.normal(0.0, scale, (inputs, hidden)).astype(np.float32),
            np.zeros(hidden, dtype=np.float32),
            np.zeros((hidden, num_experts), dtype=np.float32),
            np.zeros((inputs, num_experts), dtype=np.float32),
            np.log(odds / (1.0 - odds)).astype(np.float32),
        ]
        self._first = [np.zeros_like(w) for w in self.weights]
        self._second = [np.zeros_like(w) for w in self.weights]
        self._both = self.weights[0]
        self._steps = 0

    def logits(self, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the output before the logistic function, float32[num_rows, num_experts]."""
        hidden, bias, output, direct, output_bias = self.weights
        units = np.maximum(inputs @ hidden + bias, 0.0)
        found: NDArray[np.float32] = units @ output + inputs @ direct + output_bias
        return found

    def train(self, inputs: NDArray[np.float32], truth: NDArray[np.float32], rate: float) -> None:
        """Take one step of Adam down the slope of the mean logistic loss."""
        hidden, bias, output, direct, output_bias = self.weights
        units = np.maximum(inputs @ hidden + bias, 0.0)
        slope = _logistic(units @ output + inputs @ direct + output_bias) - truth
        slope /= len(inputs)
        inner = (slope @ output.T) * (units > 0.0)
        slopes = [
            inputs.T @ inner,
            inner.sum(axis=0),
            units.T @ slope,
            inputs.T @ slope,
            slope.sum(axis=0),
        ]
        self._steps += 1
        rate *= (1.0 - _DECAYS[1] ** self._steps) ** 0.5 / (1.0 - _DECAYS[0] ** self._steps)
        moments = zip(self.weights, slopes, self._first, self._second, strict=True)
        for weight, gradient, first, second in moments:
            first += (1.0 - _DECAYS[0]) * (gradient - first)
            second += (1.0 - _DECAYS[1]) * (gradient**2 - second)
            weight -= rate * first / (np.sqrt(second) + _SMALL)

    def finish(self) -> None:
        """Forget what only training needs; put what inputs lead to side by side, for single tokens."""
        self._first = self._second = []
        self._both = np.concatenate([self.weights[0], self.weights[3]], axis=1)

    def logits_of_one(self, inputs: list[int]) -> NDArray[np.float32]:
        """Return the output for one token whose inputs are 1 at these places, float32[num_experts]."""
        hidden_bias, output, output_bias = self.weights[1], self.weights[2], self.weights[4]
        sums = self._both[inputs].sum(axis=0)
        num_hidden = len(hidden_bias)
        units = np.maximum(sums[:num_hidden] + hidden_bias, 0.0)
        found: NDArray[np.float32] = units @ output + sums[num_hidden:] + output_bias
        return found


class LearnedPredictor(Predictor):
    """Expect what a small network, trained on the calibration requests, says.

    The last fifth of the calibration tokens is held out: ``held_out`` tells what share of their experts
    the network names among its ``top_k`` likeliest, by target layer.

    Parameters
    ----------
    calibration
        What to train on.
    rng
        Of the first weights and the order of tokens.
    distance
        Layers ahead that are predicted, >= 1; beyond the last come the first ones of the next token.
    hidden
        Hidden units, >= 1.
    epochs
        Times that the tokens are seen, >= 1.
    rate
        Step size, > 0.
    max_tokens
        Tokens trained on at most, >= 1. Fewer are taken where the work would exceed some ten seconds.
    """

    def __init__(
        self,
        calibration: History,
        rng: np.random.Generator,
        distance: int = 1,
        hidden: int = 64,
        epochs: int = 4,
        rate: float = 0.01,
        max_tokens: int = 8192,
    ) -> None:
        counts = {
            "distance": distance,
            "hidden": hidden,
            "epochs": epochs,
            "max_tokens": max_tokens,
        }
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name} = {count}: must be >= 1")
        if not rate > 0.0:
            raise ValueError(f"rate = {rate}: must be > 0")
        self.distance = distance
        self._num_experts, self._top_k = calibration.num_experts, calibration.top_k
        num_layers = calibration.num_layers
        work = 6.0 * num_layers * epochs * 2 * self._num_experts * (hidden + self._num_experts)
        past = _read(calibration, min(max_tokens, max(_BATCH, int(_MOST_WORK / work))))
        self._last = LastTokens()
        self._networks: list[_Network] = []
        self.held_out: list[float | None] = []
        for target in range(num_layers):
            network, accuracy = self._fit(past, target, num_layers, (hidden, epochs, rate), rng)
            self._networks.append(network)
            self.held_out.append(accuracy)

    def begin_step(self, view: View) -> None:
        """Learn which requests are in the step."""
        self._last.begin_step(view.step)

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Keep the choices of the last tokens."""
        self._last.learn(routing.layer, chosen_ids(routing, view.num_experts), view.step.phase)

    def scores(self, layer: int, view: View) -> NDArray[np.floating]:
        """Return how many of the step's tokens are expected at each expert, float[num_experts].

        Raises
        ------
        ConfigError
            For another distance than the one trained for.
        """
        ahead = (layer - view.layer) % view.num_layers or view.num_layers
        if ahead != self.distance:
            raise ConfigError(
                f"LearnedPredictor: asked for {ahead} layers ahead: must be distance = {self.distance}"
            )
        now = chosen_ids(view.routing, view.num_experts)
        before = self._last.rows(layer, layer > view.layer)
        if before is not None and (len(before) != len(now) or before.shape != now.shape):
            before = None
        network, num_experts = self._networks[layer], view.num_experts
        if len(now) == 1:
            places = [expert for expert in now[0].tolist() if expert != NO_EXPERT]
            if before is not None:
                places += [num_experts + e for e in before[0].tolist() if e != NO_EXPERT]
            return _logistic(network.logits_of_one(places))
        found = np.zeros(num_experts)
        for first in range(0, len(now), _LARGE_STEP):
            some = slice(first, first + _LARGE_STEP)
            inputs = _inputs(now[some], None if before is None else before[some], num_experts)
            found += _logistic(network.logits(inputs)).sum(axis=0)
        return found

    def _fit(
        self,
        past: _Past,
        target: int,
        num_layers: int,
        how: tuple[int, int, float],
        rng: np.random.Generator,
    ) -> tuple[_Network, float | None]:
        """Train the network of one target layer; return it and its accuracy on what is held out."""
        hidden, epochs, rate = how
        now, before, after, known = self._examples(past, target, num_layers)
        num_train = len(now) - len(now) // 5
        truth = _many_hot(after, self._num_experts)
        mean = truth[:num_train].mean(axis=0) if num_train else np.zeros(self._num_experts)
        network = _Network(self._num_experts, hidden, mean.astype(np.float32), rng)
        inputs = np.concatenate(
            [
                _many_hot(now, self._num_experts),
                _many_hot(before, self._num_experts) * known[:, None],
            ],
            axis=1,
        )
        num_batches = -(-num_train // _BATCH)
        for epoch in range(epochs):
            order = rng.permutation(num_train)
            for batch in range(num_batches):
                rows = order[batch * _BATCH : (batch + 1) * _BATCH]
                left = 1.0 - (epoch * num_batches + batch) / (epochs * num_batches)
                network.train(inputs[rows], truth[rows], rate * left)
        network.finish()
        if num_train == len(now):
            return network, None
        return network, _overlap(network.logits(inputs[num_train:]), truth[num_train:])

    def _examples(
        self, past: _Past, target: int, num_layers: int
    ) -> tuple[NDArray[np.uint16], NDArray[np.uint16], NDArray[np.uint16], NDArray[np.bool_]]:
        """Return for each token: experts now, the target's of the token before, the truth, is that known."""
        source, ids = (target - self.distance) % num_layers, past.ids
        if target - self.distance >= 0:
            before = np.concatenate([ids[:1, target], ids[:-1, target]])
            return ids[:, source], before, ids[:, target], past.follows
        rows = np.flatnonzero(past.request[1:] == past.request[:-1])
        return ids[rows, source], ids[rows, target], ids[rows + 1, target], np.ones(len(rows), bool)


def _read(calibration: History, max_tokens: int) -> _Past:
    """Return the first calibration tokens."""
    ids, requests, follows, left = [], [], [], max_tokens
    for number, past in enumerate(calibration.requests()):
        some = past.ids[:left]
        ids.append(some)
        requests.append(np.full(len(some), number))
        follows.append(np.arange(len(some)) >= max(1, past.num_prompt))
        left -= len(some)
        if not left:
            break
    return _Past(np.concatenate(ids), np.concatenate(requests), np.concatenate(follows))


def _many_hot(ids: NDArray[np.integer], num_experts: int) -> NDArray[np.float32]:
    """Return float32[num_rows, num_experts], 1 for each expert that int[num_rows, num_slots] names."""
    found = np.zeros((len(ids), num_experts + 1), dtype=np.float32)
    columns = np.where(ids == NO_EXPERT, num_experts, ids).astype(np.intp)
    found[np.arange(len(ids))[:, None], columns] = 1.0
    return found[:, :num_experts]


def _inputs(
    now: NDArray[np.integer], before: NDArray[np.integer] | None, num_experts: int
) -> NDArray[np.float32]:
    """Return a network's inputs, float32[num_rows, 2 * num_experts]."""
    first = _many_hot(now, num_experts)
    second = np.zeros_like(first) if before is None else _many_hot(before, num_experts)
    return np.concatenate([first, second], axis=1)


def _logistic(values: NDArray[np.float32]) -> NDArray[np.float32]:
    found = 1.0 / (1.0 + np.exp(-np.clip(values, -30.0, 30.0)))
    return found.astype(np.float32, copy=False)


def _overlap(logits: NDArray[np.float32], truth: NDArray[np.float32]) -> float:
    """Return the share of the true experts that are among each row's likeliest, as many as are true."""
    places = np.argsort(np.argsort(-logits, axis=1, kind="stable"), axis=1)
    named = places < truth.sum(axis=1, keepdims=True)
    return float((truth * named).sum() / max(1.0, float(truth.sum())))
