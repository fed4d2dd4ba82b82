"""Memory that a machine needs beside the model: what is left of it, and whether that is enough."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hwmodels.predict import Prediction
from hwmodels.units import GB
from sim.predict_answer import memory

GPU_RESERVE_BYTES = 1 << 30
"""Of a GPU: what llama.cpp's ``--fit-target`` and ik_llama.cpp's ``--fit-margin`` leave free by default."""
HOST_RESERVE_BYTES = 4_000_000_000
"""What Windows 11 asks for at least."""
TOLERANCE = 0.1
"""Share of speed that is given up to leave the reserve.

Of the size of what predictions are off by on a machine without published rows (README, "How right it is"):
what is nearer is not known to be slower.
"""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Bytes to leave free: of each GPU, and of host memory, which may be the only one there is."""

    gpu_bytes: int = GPU_RESERVE_BYTES
    host_bytes: int = HOST_RESERVE_BYTES

    @property
    def words(self) -> str:
        """What is little, for a reader of tables."""
        return (
            f"Fits barely: less than {self.gpu_bytes / GB:.2g} GB of a GPU's memory, or less than "
            f"{self.host_bytes / GB:.2g} GB of host memory, is left for the desktop, other programs and what "
            "an engine allocates besides (--reserve, --reserve-host). What leaves more is preferred unless "
            f"it is more than {100 * TOLERANCE:.0f}% slower."
        )


@dataclass(frozen=True, slots=True)
class Left:
    """What a prediction leaves of one memory, in bytes; below 0: it does not suffice."""

    memory: str
    bytes: int
    have_bytes: int
    is_enough: bool


def left_of(found: Prediction, reserve: Reserve) -> list[Left]:
    """Return what is left of each memory there is; of a single one the host's reserve counts."""
    gpu = found.case.costs.machine.gpu
    least = {"gpu": reserve.gpu_bytes * (gpu.count if gpu else 1), "host": reserve.host_bytes}
    lefts = []
    for name, room in memory(found).items():
        left = room["have"] - room["needed"]
        lefts.append(Left(name, left, room["have"], left >= least[name]))
    return lefts


def left_words(left: Iterable[Left]) -> str:
    """Say what is left of each."""
    told = [
        f"{one.bytes / GB:.1f} of {one.have_bytes / GB:.1f} GB of "
        f"{'GPU' if one.memory == 'gpu' else one.memory} memory"
        for one in left
    ]
    return f"{' and '.join(told)} left"
