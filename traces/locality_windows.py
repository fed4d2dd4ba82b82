"""How alike the experts of adjacent windows of a text are (what SAEM calls temporal coherence).

The paper's formula is not public; the cosine of adjacent histograms, and the share of the most used
experts that both have, are those of the project's own measurements.
"""

from __future__ import annotations

from collections.abc import Iterable

from traces.locality_histograms import Coherence, Histograms, PairMeans
from traces.schema import Trace, TraceMeta


class WindowCoherence:
    """Compares each window of ``length`` tokens of a request with its next one, chunk by chunk.

    Windows begin with the request's first row; what is left at its end is dropped.

    Parameters
    ----------
    meta
        The header of the trace.
    length
        Tokens a window, >= 1.
    top
        How many of the most used experts are compared; None: an eighth of a layer's.
    phase
        Only rows of this phase; None: all.
    """

    def __init__(
        self, meta: TraceMeta, length: int, top: int | None = None, phase: int | None = None
    ) -> None:
        self._windows = Histograms(meta, length, 1, phase)
        self._means = PairMeans(meta, top)

    def add(self, chunk: Trace) -> None:
        """Take the next rows of the trace."""
        for _, counts in self._windows.cut(chunk):
            if len(counts) > 1:
                self._means.add(counts[:-1], counts[1:])

    def result(self) -> Coherence:
        """Return the means so far."""
        return self._means.result()


def window_coherence(
    chunks: Iterable[Trace],
    meta: TraceMeta,
    length: int,
    top: int | None = None,
    phase: int | None = None,
) -> Coherence:
    """Return the likeness of adjacent windows of a trace that comes in chunks."""
    counter = WindowCoherence(meta, length, top, phase)
    for chunk in chunks:
        counter.add(chunk)
    return counter.result()
