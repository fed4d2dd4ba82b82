"""Rows of routing joined with the tokens of their request, by the rule that the last token has no row."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.importers.routed import Routed
from traces.trace import TraceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What is known of a request's tokens; None: nobody told.

    Attributes
    ----------
    num_prompt, num_output
        How many; they follow from the ids where there are some.
    prompt_ids, output_ids
        Token ids.
    """

    num_prompt: int | None = None
    num_output: int | None = None
    prompt_ids: NDArray[np.int64] | None = None
    output_ids: NDArray[np.int64] | None = None


def token_ids(value: object, where: str) -> NDArray[np.int64] | None:
    """Return a list or array of token ids as int64[num_tokens], None as None.

    Raises TraceError for anything else, and for negative ids.
    """
    if value is None:
        return None
    flat = isinstance(value, (list, tuple, np.ndarray))
    try:
        ids = np.asarray(value) if flat else None
    except ValueError:
        ids = None
    if ids is None or ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        shown = f"{ids.dtype}{list(ids.shape)}" if ids is not None else type(value).__name__
        raise TraceError(f"{where} is {shown}: must be a list of token ids")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < 2**31:
        wrong = int(np.argmax((ids < 0) | (ids >= 2**31)))
        raise TraceError(f"{where} holds {ids[wrong]} at {wrong}: must lie in 0..{2**31 - 1}")
    return ids.astype(np.int64)


def count(value: object, where: str) -> int | None:
    """Return a number of tokens, None as None; raises TraceError for anything but a whole number >= 0."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TraceError(f"{where} is {value!r}: must be a whole number >= 0")
    return value


def request_of_rows(
    name: str,
    ids: NDArray[np.integer],
    tokens: Tokens,
    *,
    first: int = 0,
    last_may_have_row: bool = False,
) -> Routed:
    """Return the request of routing rows, the first of which is the token at position ``first``.

    An engine routes the prompt and all sampled tokens but the last, which no forward pass has seen: T - 1
    rows for T tokens. If only one of the two counts is known, the other follows from that.

    Parameters
    ----------
    name
        What errors call the request.
    ids
        Expert ids [rows, layers, k].
    last_may_have_row
        Whether T rows are possible, too.

    Raises
    ------
    TraceError
        If neither count is known, or the rows are not as many as the tokens make them.
    """
    end = first + len(ids)
    num_prompt = _length(tokens.num_prompt, tokens.prompt_ids, f"{name}: prompt tokens")
    num_output = _length(tokens.num_output, tokens.output_ids, f"{name}: sampled tokens")
    if num_prompt is None:
        if num_output is None:
            raise TraceError(f"{name}: does not tell its prompt tokens: give --prompt-tokens")
        num_prompt = end + 1 - num_output
    if num_output is None:
        num_output = end + 1 - num_prompt if end >= num_prompt else 0
    expected = max(0, num_prompt + num_output - 1)
    room = expected + last_may_have_row
    if num_prompt < 0 or not expected <= end <= room:
        sum_of = f"{max(0, num_prompt)} prompt + {num_output} sampled - 1"
        sum_of += f" - the first {first}" if first else ""
        raise TraceError(
            f"{name}: {len(ids)} rows of routing: must be {max(0, expected - first)} ({sum_of})"
        )
    return Routed(
        name,
        ids,
        min(len(ids), max(0, num_prompt - first)),
        token_id=_ids_of_rows(tokens, num_prompt, first, end),
        first_position=first,
    )


def _length(told: int | None, ids: NDArray[np.int64] | None, where: str) -> int | None:
    if ids is None:
        return told
    if told is not None and told != len(ids):
        raise TraceError(f"{where} are {told}: must be {len(ids)}, as many as their ids")
    return len(ids)


def _ids_of_rows(tokens: Tokens, num_prompt: int, first: int, end: int) -> NDArray[np.int64] | None:
    """Return the token id of each row, -1 where unknown; None if none is known."""
    parts = ((0, tokens.prompt_ids), (num_prompt, tokens.output_ids))
    if all(part is None for _, part in parts):
        return None
    known = [(at, part) for at, part in parts if part is not None]
    whole = np.full(max(end, *(at + len(part) for at, part in known)), -1, dtype=np.int64)
    for at, part in known:
        whole[at : at + len(part)] = part
    return whole[first:end]


def is_blank(rows: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Tell of each row [rows, layers, k] whether all of it is 0 or a mark of absence."""
    return np.asarray((rows <= 0).all(axis=(1, 2)))


def without_last_blank(ids: NDArray[np.integer], num_tokens: int | None) -> NDArray[np.integer]:
    """Return T rows without the last where that was made up for the token that nothing routed."""
    made_up = len(ids) > 0 and len(ids) == num_tokens and bool(is_blank(ids[-1:])[0])
    return ids[:-1] if made_up else ids


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts ``f2`` before ``f10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
