"""Sampling that depends on the seed, the request and the position alone, not on the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from traces.record_calls import Segment


def gumbel(seed: int, request: int, num_tokens: int, size: int) -> np.ndarray:
    """Return float32[size] Gumbel noise for the token after ``num_tokens`` tokens of a request.

    The greatest of logits / temperature + noise is a sample of softmax(logits / temperature).
    """
    draw = np.random.default_rng([seed, request, num_tokens])
    return draw.gumbel(size=size).astype(np.float32)


class SeededNoise:
    """A logits processor that makes greedy choice a sample of softmax(logits / temperature).

    Adds Gumbel noise from a generator seeded by (seed, request, position); see ``Generation``.
    """

    def __init__(self, seed: int, temperature: float, requests: Iterable[int], pads: list[int]):
        self.seed = seed
        self.temperature = temperature
        self.requests = list(requests)
        self.pads = pads

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return noisy scores [batch, vocabulary] for the token after ``input_ids``."""
        length, size = input_ids.shape[1], scores.shape[1]
        noise = [
            gumbel(self.seed, request, length - pad, size)
            for request, pad in zip(self.requests, self.pads, strict=True)
        ]
        drawn = torch.from_numpy(np.stack(noise)).to(scores.device)
        return scores.float() / self.temperature + drawn


class PackedNoise:
    """The same noise on the logits of a model that continuous batching calls, as a forward hook.

    ``segments`` tells whose rows a call has; a request's new token comes from its last row.
    """

    def __init__(
        self, seed: int, temperature: float, segments: Callable[[], Sequence[Segment]]
    ) -> None:
        self.seed = seed
        self.temperature = temperature
        self.segments = segments

    def __call__(self, _model: Any, _args: Any, arguments: Mapping[str, Any], output: Any) -> Any:
        """Return the output with noisy logits [1, rows, vocabulary]."""
        logits = output.logits.float()
        chosen = [segment for segment in self.segments() if segment.yields]
        noise = [gumbel(self.seed, one.request, one.end, logits.shape[-1]) for one in chosen]
        if not noise:
            return output
        rows = arguments["logits_indices"][: len(chosen)].long()
        if arguments.get("logits_to_keep") is not None:  # the model has picked these rows already
            rows = torch.arange(len(chosen), device=logits.device)
        logits = logits / self.temperature
        logits[0, rows] += torch.from_numpy(np.stack(noise)).to(logits.device)
        output.logits = logits
        return output
