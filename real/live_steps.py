"""From the calls of a model's decoder to steps: which tokens a call processes, and what is known of them.

Rows of padding and of sequences that have ended are no tokens: nobody reads what comes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from real.errors import RealError
from sim.schedule import Admitted, WorkStep
from sim.types import Phase, StepInfo
from traces.record_calls import Rows, to_host

Piece = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class LiveStep:
    """One call of the decoder.

    ``rows`` are the rows of the model's tensors that are tokens, int64 on the device; None: all of them.
    ``num_rows`` counts all. ``yields`` are the requests that get a token from it.
    """

    info: StepInfo
    rows: Tensor | None
    num_rows: int
    yields: tuple[int, ...]


class LiveBatch:
    """Follows the sequences of one batch through the calls of the decoder.

    Parameters
    ----------
    request_ids, num_prompt
        Of each sequence: its request, and how many tokens its prompt has.
    eos
        Tokens that end a sequence.
    piece
        What a token reads as; None where there is no tokenizer.
    """

    def __init__(
        self,
        request_ids: Sequence[int],
        num_prompt: Sequence[int],
        eos: Sequence[int] = (),
        piece: Piece | None = None,
    ) -> None:
        self._request_ids = np.asarray(request_ids, dtype=np.int64)
        self._num_prompt = np.asarray(num_prompt, dtype=np.int64)
        self._eos = list(eos)
        self._piece = piece
        self._ended = np.zeros(len(self._request_ids), dtype=bool)

    def step(self, number: int, rows: Rows) -> LiveStep:
        """Return what one call of the decoder is; ``number`` counts them."""
        found = {"position": rows.position.contiguous(), "real": rows.real.contiguous()}
        if rows.token_id is not None:
            found["token_id"] = rows.token_id.contiguous()
        host = to_host(found)
        real = host["real"].astype(bool)
        if len(real) != len(self._request_ids):
            raise RealError(
                f"the model was called with {len(real)} sequences, must be {len(self._request_ids)}: beams "
                "and several sequences a prompt are unsupported"
            )
        self._find_ended(host, real)
        real &= ~self._ended[:, None]
        flat = np.flatnonzero(real)
        if not len(flat):
            raise RealError("the model was called without a single token that counts")
        kept = None if len(flat) == real.size else torch.from_numpy(flat).to(rows.position.device)
        info, yields = self._info(number, real, host)
        return LiveStep(info, kept, real.size, yields)

    def _find_ended(self, host: dict[str, NDArray[np.generic]], real: NDArray[np.bool_]) -> None:
        """Note the sequences whose generated text ends with what this call processes, or has ended."""
        tokens = host.get("token_id")
        if tokens is None or not self._eos:
            return
        new = np.asarray(host["position"]) >= self._num_prompt[:, None]
        self._ended |= (np.isin(tokens, self._eos) & new & real).any(axis=1)

    def _info(
        self, number: int, real: NDArray[np.bool_], host: dict[str, NDArray[np.generic]]
    ) -> tuple[StepInfo, tuple[int, ...]]:
        sequence, _ = np.nonzero(real)
        position = np.asarray(host["position"])[real].astype(np.int64)
        is_new = position >= self._num_prompt[sequence]
        present = np.flatnonzero(real.any(axis=1))
        seen = np.array([position[sequence == row].max() + 1 for row in present])
        requests = tuple(self._request_ids[present].tolist())
        num_decoding = int(is_new.sum())
        phase = Phase.MIXED if 0 < num_decoding < len(is_new) else Phase.PREFILL
        if num_decoding == len(is_new):
            phase = Phase.DECODE
        info = StepInfo(
            step=number,
            phase=phase,
            num_tokens=len(position),
            num_sequences=len(present),
            kv_tokens=int(seen.sum()),
            request_ids=tuple(self._request_ids[sequence].tolist()),
            texts=self._texts(host, real),
            attention_pairs=int((position + 1).sum()),
            held_kv_tokens=int(seen.sum()),
            num_outputs=len(present),
            num_decoding=num_decoding,
        )
        return info, requests

    def _texts(
        self, host: dict[str, NDArray[np.generic]], real: NDArray[np.bool_]
    ) -> tuple[str, ...] | None:
        tokens = host.get("token_id")
        if tokens is None or self._piece is None:
            return None
        return tuple(map(self._piece, tokens[real].tolist()))

    def work_steps(
        self, steps: Sequence[tuple[LiveStep, int, int]], arrival_ns: int
    ) -> list[tuple[WorkStep, int, int]]:
        """Return the batch's finished steps as the request table reads them, with their times.

        ``steps`` are all its steps with begin and end. Call when the batch has ended: a request is done
        with its last step.
        """
        last = {
            request: place for place, (step, _, _) in enumerate(steps) for request in step.yields
        }
        found = []
        for place, (step, begin_ns, end_ns) in enumerate(steps):
            admitted = tuple(
                Admitted(int(request), arrival_ns, int(prompt))
                for request, prompt in zip(self._request_ids, self._num_prompt, strict=True)
                if place == 0
            )
            finished = tuple(request for request in step.yields if last[request] == place)
            no_rows = np.empty(0, dtype=np.intp)
            work = WorkStep(step.info, no_rows, admitted, step.yields, finished)
            found.append((work, begin_ns, end_ns))
        return found
