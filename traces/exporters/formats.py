"""The formats that a trace can be written in, by name: what each is and which module writes it.

A writer is ``write(chunks, out) -> notes``; ``chunks`` are those of one trace in file order, at least one,
``out`` is the file to make (whole or not at all), and the notes say what of the trace the format has no
place for. It raises ``TraceError`` for a trace that the format cannot hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from traces.trace import Trace, TraceError, near_match

Writer = Callable[[Iterable[Trace], Path], tuple[str, ...]]


class Export(NamedTuple):
    """A format: its name, the module in ``traces.exporters`` that writes it, its suffix, a line on it."""

    name: str
    module: str
    suffix: str
    what: str

    def writer(self) -> Writer:
        """Return the writer; imports its module."""
        write: Writer = import_module(f"traces.exporters.{self.module}").write
        return write


EXPORTS = tuple(
    Export(*row)
    for row in (
        (
            "moe-policylang",
            "moe_policylang",
            ".parquet",
            "moe-policylang trace: a row a token and layer",
        ),
        (
            "experts-npz",
            "experts_npz",
            ".npz",
            "llama-moe-trace archive: `experts` [layers, tokens, k]",
        ),
        (
            "sglang-logical-count",
            "sglang_logical_count",
            ".json",
            "SGLang --init-expert-location: uses of each expert by layer",
        ),
    )
)


def export_named(name: str) -> Export:
    """Return the format called ``name``; raises TraceError with a near match."""
    for known in EXPORTS:
        if known.name == name:
            return known
    names = [known.name for known in EXPORTS]
    hint = near_match(name, names) or f" (known: {', '.join(names)})"
    raise TraceError(f"format {name!r}: no such format to write{hint}")
