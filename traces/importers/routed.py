"""What a reader of a foreign format hands over: requests with their routing, and where they are from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.trace import NO_EXPERT

STEPS_DERIVED = (
    "step derived: a prompt is one step, then one token a step, requests one after another"
)
"""The note of formats that do not tell their engine's steps."""


@dataclass(slots=True)
class Routed:
    """One request as a source gives it; ``name`` is what errors call it ("request 3", "rid a7").

    Attributes
    ----------
    expert_ids
        Integers [num_tokens, num_layers, slots] over the source's layers; negative, or ``NO_EXPERT`` in
        uint16, where a slot holds no expert.
    num_prompt
        How many of the rows are the prompt's.
    expert_weights
        Floats like ``expert_ids``.
    token_id
        Integers [num_tokens], -1 where unknown.
    step
        Integers [num_tokens], the engine's own; None: derived, requests one after another.
    first_position
        Position of the first row in the request's sequence.
    """

    name: str
    expert_ids: NDArray[np.integer]
    num_prompt: int
    expert_weights: NDArray[np.floating] | None = None
    token_id: NDArray[np.integer] | None = None
    text: list[str] | None = None
    step: NDArray[np.integer] | None = None
    router_logits: NDArray[np.floating] | None = None  # [num_tokens, num_layers, num_experts]
    first_position: int = 0

    def __len__(self) -> int:
        return len(self.expert_ids)

    @property
    def is_empty_slot(self) -> NDArray[np.bool_]:
        """Where no expert is, bool like ``expert_ids``."""
        ids = self.expert_ids
        return ids == NO_EXPERT if ids.dtype == np.uint16 else ids < 0

    def without_first(self, count: int) -> Routed:
        """Return the request without its first rows."""
        kept = slice(count, None)
        return Routed(
            self.name,
            self.expert_ids[kept],
            max(0, self.num_prompt - count),
            None if self.expert_weights is None else self.expert_weights[kept],
            None if self.token_id is None else self.token_id[kept],
            None if self.text is None else self.text[kept],
            None if self.step is None else self.step[kept],
            None if self.router_logits is None else self.router_logits[kept],
            self.first_position + count,
        )

    def of_layers(self, layers: NDArray[np.intp], slots: int) -> Routed:
        """Return the request with these layers only, and its first ``slots`` slots."""
        weights, logits = self.expert_weights, self.router_logits
        return Routed(
            self.name,
            self.expert_ids[:, layers, :slots],
            self.num_prompt,
            None if weights is None else weights[:, layers, :slots],
            self.token_id,
            self.text,
            self.step,
            None if logits is None else logits[:, layers],
            self.first_position,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a format and its file say of themselves.

    Attributes
    ----------
    file
        The path that errors name.
    what
        The format in words, for the provenance.
    zero_means_dense
        Whether a layer without experts is written as zeros (buffers that began as zeros).
    layer_indices
        Absolute indices where the file names them, one for each of its layers.
    notes
        What holds of every file of this format.
    """

    file: str
    what: str
    recorder: str
    recorder_version: str | None = None
    detail: str = ""
    weight_semantics: str = "none"
    zero_means_dense: bool = False
    model: str | None = None
    num_experts: int | None = None
    top_k: int | None = None
    layer_indices: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()
