"""Turn problems and drills into batches of token ids and loss weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from traces.tiny.config import TrainConfig
from traces.tiny.data import Problem, sample_problem
from traces.tiny.drill import result_spans, sample_drill
from traces.tiny.tokenizer import CharTokenizer


@dataclass(frozen=True)
class Batch:
    """Token ids (B, L) padded on the right; for each target (B, L - 1) its loss weight.

    ``results`` (B, L - 1) marks the characters of the sums that a step must compute. ``total`` is
    what the weighted losses are divided by.
    """

    ids: Tensor
    weights: Tensor
    results: Tensor
    total: float

    def part(self, rank: int, count: int) -> Batch:
        """Return every ``count``-th row; the parts' losses average to the loss of the whole."""
        ids, weights, results = (
            rows[rank::count] for rows in (self.ids, self.weights, self.results)
        )
        return Batch(ids, weights, results, self.total / count)


@dataclass(frozen=True)
class Weights:
    """Loss weights of a question's characters, of a step's result, and of the rest."""

    question: float = 0.1
    result: float = 1.0


def make_batch(
    texts: list[Problem], drills: list[str], tokenizer: CharTokenizer, weigh: Weights
) -> Batch:
    """Encode problems, and drills of which only the results count; padding has weight 0."""
    everything = [problem.text for problem in texts] + drills
    rows = [tokenizer.encode(text, bos=True, eos=True) for text in everything]
    length = max(map(len, rows))
    ids = torch.full((len(rows), length), tokenizer.pad_id)
    weights, results = torch.zeros(2, len(rows), length)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        if index < len(texts):
            weights[index, : len(row)] = 1.0
            weights[index, : len(texts[index].prompt) + 1] = weigh.question
        for start, stop in result_spans(everything[index]):
            # BOS shifts every character by one place.
            weights[index, start + 1 : stop + 1] = weigh.result
            results[index, start + 1 : stop + 1] = 1.0
    return Batch(ids, weights[:, 1:], results[:, 1:], float(weights[:, 1:].sum()))


def batches(config: TrainConfig, tokenizer: CharTokenizer, start: int) -> Iterator[Batch]:
    """Yield the batches of steps ``start``, ``start + 1``, ... of a run."""
    step = start
    while True:
        pool, skip = divmod(step, config.pool)
        rng = np.random.default_rng([config.seed, pool])
        focus = pool * config.pool >= config.focus_from
        drills = config.drills if focus and pool * config.pool < config.focus_until else 0
        weigh = Weights(config.question_weight, config.result_weight if focus else 1.0)
        count = config.batch - drills
        texts = [sample_problem(rng) for _ in range(config.pool * count)]
        texts.sort(key=lambda problem: len(problem.text))
        for group in rng.permutation(config.pool)[skip:]:
            chosen = texts[group * count : (group + 1) * count]
            extra = [
                sample_drill(np.random.default_rng([config.seed, 1, step, number]))
                for number in range(drills)
            ]
            yield make_batch(chosen, extra, tokenizer, weigh)
            step += 1
