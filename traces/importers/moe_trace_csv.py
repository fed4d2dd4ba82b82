"""Reads what ``llama-moe-trace`` of llama.cpp's pull request 28544 and of its forks writes as text.

All name a line after MoE layers and chosen experts, in the order of computation, without the model:

- ``layer,expert``: a line a choice (the pull request itself); the number of choices a token follows from the
  shortest run of a layer, for a pass of one token has just those;
- ``phase,token,layer,rank,expert`` below a line with these names (a later fork), phase prefill or decode;
- ``pos,layer,id0,id1,...``: a line a token and layer, negative positions are the prompt's (thecodacus);
- ``prompt step layer id0 id1 ...``: the same with spaces, decode only, of several prompts (ArifiLabs).

Early builds read the strided view of the choices flat, so that prompts hold whole rankings.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from traces.importers.assemble import assemble
from traces.importers.cells import EMPTY, Cells, pivot
from traces.importers.passes import passes_of, requests_of, without_flat_prompts
from traces.importers.routed import Origin, Routed
from traces.importers.sources import read_text
from traces.importers.told import Told, needed
from traces.trace import Trace, TraceError

_HEADING = "phase,token,layer,rank,expert"
_PROMPT, _DECODE = "prefill", "decode"


@dataclass(frozen=True, slots=True)
class _Rows:
    """One row a token and layer, in file order: layer [num_rows], ids [num_rows, k], what else is told."""

    layer: NDArray[np.int64]
    ids: NDArray[np.int32]
    is_prompt: NDArray[np.bool_] | None = None
    token: NDArray[np.int64] | None = None


def read(path: Path, told: Told) -> Trace:
    """Return the trace; ``told`` must say the number of experts.

    Raises
    ------
    TraceError
        For lines of another shape, passes that do not fit together, and a model nobody tells.
    """
    lines = _lines(path)
    num_experts = needed(
        str(path), "the number of experts", told.num_experts, "--num-experts, --model or --config"
    )
    if " " in lines[0]:
        return _decode_only(path, lines, told)
    if lines[0] == _HEADING:
        rows, what = _ranked(path, lines), "llama-moe-trace CSV with phases"
    elif lines[0].count(",") == 1:
        rows, what = _single(path, lines, told), "llama-moe-trace CSV"
    else:
        rows, what = _wide(path, lines), "llama-moe-trace CSV with positions"
    passes, layers, found = passes_of(
        rows.layer, rows.ids, str(path), is_prompt=rows.is_prompt, token=rows.token
    )
    requests = requests_of(passes)
    requests, dropped = without_flat_prompts(requests, passes, num_experts, str(path))
    return assemble(requests, told, _origin(path, what, layers, [*_NOTES, *found, *dropped]))


_NOTES = (
    "tokens derived: the layers of a pass follow one another, a pass of one token is decode",
    "ids only: no weights, token ids or text; the order of the slots is the file's",
)


def _origin(path: Path, what: str, layers: tuple[int, ...], notes: Sequence[str]) -> Origin:
    return Origin(
        file=str(path),
        what=what,
        recorder="llama-moe-trace",
        layer_indices=layers,
        notes=tuple(notes),
    )


def _lines(path: Path) -> list[str]:
    lines = read_text(path).split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise TraceError(f"{path}: no rows: a trace has at least one")
    return [line.rstrip("\r") for line in lines]


def _numbers(
    path: Path, lines: list[str], rule: str, delimiter: str | None = ","
) -> NDArray[np.int64]:
    """Return the lines' whole numbers [lines, columns], as many in each as in the first."""
    width = len(lines[0].split(delimiter))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of a blank line
            numbers = np.loadtxt(lines, dtype=np.int64, delimiter=delimiter, ndmin=2, comments=None)
        if numbers.shape == (len(lines), width):
            return numbers
    except (ValueError, UserWarning):
        pass
    for at, line in enumerate(lines, 1):
        words = line.split(delimiter)
        if len(words) != width or not all(word.strip().lstrip("-").isdigit() for word in words):
            cut = " (cut short?)" if at == len(lines) else ""
            raise TraceError(f"{path}: line {at} is {line[:60]!r}: must be {rule}{cut}")
    raise TraceError(f"{path}: {len(lines)} lines: must be {rule} each")


def _refuse(path: Path, wrong: ArrayLike, lines: list[str], rule: str, first: int = 1) -> None:
    if np.any(wrong):
        at = int(np.argmax(wrong))
        raise TraceError(f"{path}: line {first + at} is {lines[at][:60]!r}: {rule}")


# -- a line a choice -------------------------------------------------------------------------------


def _single(path: Path, lines: list[str], told: Told) -> _Rows:
    numbers = _numbers(path, lines, "layer,expert")
    _refuse(path, (numbers < 0).any(axis=1), lines, "must be >= 0")
    layer, expert = numbers.T
    edges = np.concatenate([[0], np.flatnonzero(np.diff(layer)) + 1, [len(layer)]])
    lengths = np.diff(edges)
    # the last run may have broken off; a file of one run alone says nothing
    whole = lengths[:-1] if len(lengths) > 1 else lengths
    top_k = told.top_k or _fewest(int(whole.min()), told)
    wrong = np.flatnonzero(whole % top_k)
    if len(wrong):
        start, count = int(edges[wrong[0]]), int(whole[wrong[0]])
        rule = f"must be a multiple of {top_k}, the choices a token has (--top-k tells them)"
        raise TraceError(
            f"{path}: line {start + 1}: layer {layer[start]} has {count} choices in a row: {rule}"
        )
    end = int(edges[-1]) - int(lengths[-1] % top_k)
    return _Rows(layer[:end:top_k], expert[:end].reshape(-1, top_k).astype(np.int32))


def _fewest(shortest: int, told: Told) -> int:
    """Return the choices of a token; without any decode the shortest run may be of several tokens."""
    native = told.native_top_k
    return native if native is not None and shortest > native else shortest


# -- a line a choice, with phase, token and rank ---------------------------------------------------


def _ranked(path: Path, lines: list[str]) -> _Rows:
    body = [line for line in lines if line != _HEADING]  # joined files repeat it
    if not body:
        raise TraceError(f"{path}: no rows: a trace has at least one")
    words = [line.partition(",") for line in body]
    unknown = np.array([word[0] not in (_PROMPT, _DECODE) for word in words])
    _refuse(path, unknown, body, f"must be {_HEADING}, phase prefill or decode", 2)
    numbers = _numbers(
        path, [word[2] for word in words], "token,layer,rank,expert behind the phase"
    )
    _refuse(path, (numbers < 0).any(axis=1), body, "must be >= 0", 2)
    token, layer, rank, expert = numbers.T
    starts = np.flatnonzero(rank == 0)
    if not len(starts) or starts[0]:
        raise TraceError(f"{path}: line 2 is {body[0][:60]!r}: must begin with rank 0")
    row = np.cumsum(rank == 0) - 1
    _refuse(path, np.arange(len(rank)) - starts[row] != rank, body, "ranks must count from 0", 2)
    _refuse(path, layer != layer[starts][row], body, "must be the layer of its rank 0", 2)
    ids = np.full((len(starts), int(rank.max()) + 1), EMPTY, dtype=np.int32)
    ids[row, rank] = expert
    is_prompt = np.array([word[0] == _PROMPT for word in words])
    return _Rows(layer[starts], ids, is_prompt[starts], token[starts])


# -- a line a token and layer ----------------------------------------------------------------------


def _wide(path: Path, lines: list[str]) -> _Rows:
    numbers = _numbers(path, lines, "pos,layer and the experts")
    if numbers.shape[1] < 3:
        raise TraceError(f"{path}: line 1 is {lines[0][:60]!r}: must be pos, layer and the experts")
    _refuse(path, (numbers[:, 1:] < 0).any(axis=1), lines, "layer and experts must be >= 0")
    return _Rows(numbers[:, 1], numbers[:, 2:].astype(np.int32), numbers[:, 0] < 0)


def _decode_only(path: Path, lines: list[str], told: Told) -> Trace:
    numbers = _numbers(path, lines, "prompt, step, layer and the experts", None)
    if numbers.shape[1] < 4:
        raise TraceError(
            f"{path}: line 1 is {lines[0][:60]!r}: must be prompt, step, layer and the experts"
        )
    _refuse(path, (numbers < 0).any(axis=1), lines, "must be >= 0")
    prompts, request = np.unique(numbers[:, 0], return_inverse=True)
    cells = Cells(
        request=request.astype(np.int64),
        token=numbers[:, 1],
        layer=numbers[:, 2],
        expert_ids=numbers[:, 3:].astype(np.int32),
    )
    found, layers = pivot(cells, str(path), lambda number: f"prompt {prompts[number]}")
    requests: list[Routed] = [replace(one.routed, num_prompt=0) for one in found]
    notes = ("decode only: position 0 is the first sampled token", _NOTES[1])
    return assemble(
        requests, told, _origin(path, "llama-moe-trace text, decode only", layers, notes)
    )
