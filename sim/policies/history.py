"""What policies may learn from before a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PastRequest:
    """One request of the calibration: its tokens in order, of which the first ``num_prompt`` are its prompt.

    Attributes
    ----------
    ids
        Chosen experts, uint16[num_tokens, num_layers, top_k], NO_EXPERT in an unused slot.
    weights
        Their weights, float16 of that shape; None if not recorded.
    router_logits
        Scores of all experts, float16[num_tokens, num_layers, num_experts]; None if not recorded.
    gates_ahead
        By distance: what the gates of later layers say early, shaped like ``ids``.
    texts, stages
        The tokens' text and annotated stages int16[num_tokens]; None if not recorded.
    """

    ids: NDArray[np.uint16]
    num_prompt: int
    weights: NDArray[np.float16] | None = None
    router_logits: NDArray[np.float16] | None = None
    gates_ahead: Mapping[int, NDArray[np.uint16]] = field(default_factory=dict)
    texts: list[str] | None = None
    stages: NDArray[np.int16] | None = None


class History(Protocol):
    """The calibration requests; other text than that of the run, unless the user allows it."""

    @property
    def num_layers(self) -> int:
        """Number of MoE layers."""
        ...

    @property
    def num_experts(self) -> int:
        """Number of experts a layer."""
        ...

    @property
    def top_k(self) -> int:
        """Experts a token uses in a layer."""
        ...

    def popularity(self) -> NDArray[np.float64]:
        """Uses of each expert, float64[num_layers, num_experts]."""
        ...

    def requests(self) -> Iterator[PastRequest]:
        """Yield the requests in order."""
        ...
