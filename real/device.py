"""The one seam to hardware: memory, copies and the order of kernels, on a CPU or on a CUDA device.

The same executor runs on both. On a CPU kernels run in the thread that asks for them, a copy is a memcpy by
the thread that makes it, and a stamp is a time. On CUDA kernels go to the compute stream, copies to a stream
of their own, and stamps are events that have a time once the device has come to them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from real.errors import RealError
from real.host_memory import pages
from sim.settings import did_you_mean
from sim.types import ConfigError


def open_device(name: str = "auto") -> Device:
    """Return the device of a name: ``auto`` (CUDA where there is one), ``cpu``, ``cuda`` or ``cuda:N``.

    Raises ConfigError for another name, RealError where there is no such device.
    """
    kind, _, index = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdigit())):
        hint = did_you_mean(kind, ("auto", "cpu", "cuda"))
        raise ConfigError(f"device = {name}: must be auto, cpu, cuda or cuda:N{hint}")
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return CPUDevice()
    if reason := why_not_cuda():
        raise RealError(f"device = {name}: {reason}")
    count = torch.cuda.device_count()
    if index and int(index) >= count:
        raise RealError(f"device = {name}: must be below cuda:{count}, as there are {count}")
    from real.cuda_device import CUDADevice  # which needs this module

    return CUDADevice(int(index or 0))


def why_not_cuda() -> str | None:
    """Return why there is no CUDA device; None if there is one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA; docs/cuda.md tells how to get one"
    built = torch.version.cuda
    return (
        f"torch for CUDA {built} finds no device, or no driver that is new enough; see docs/cuda.md"
    )


class Device:
    """Memory and order of work of one device; what a CPU does, which CUDA overrides.

    ``kind`` is "cpu" or "cuda". Buffers are uint8 and aligned to pages.
    """

    kind = "cpu"

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.held_bytes = 0
        """What :meth:`buffer` has given out and is not given back yet."""
        self.why_not_locked = ""
        """Why CUDA does not know memory of :meth:`host_buffer`; empty if it does, or need not."""
        self._peak_bytes = 0

    @property
    def name(self) -> str:
        """What the device is called."""
        return "cpu"

    # -- memory -----------------------------------------------------------------------------------

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Return uint8[num_bytes] of host memory that copies to the device are made from."""
        return pages(num_bytes)

    def buffer(self, num_bytes: int) -> Tensor:
        """Return uint8[num_bytes] of the device's memory; RealError if it has no more."""
        found = pages(num_bytes)
        self.held_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self.held_bytes)
        return found

    def give_back(self, num_bytes: int) -> None:
        """Learn that a buffer is no longer used."""
        self.held_bytes -= num_bytes

    def peak_bytes(self) -> int:
        """Return the most that was held since :meth:`reset_peak`: what :meth:`buffer` gave out."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        """Let :meth:`peak_bytes` begin with what is held now."""
        self._peak_bytes = self.held_bytes

    # -- copies, by the thread that makes them --------------------------------------------------------

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy bytes of host memory to the device; returns when they are there."""
        target.copy_(source)

    def fence(self) -> Any:
        """Return a point: all kernels asked for so far; None where they have ended already."""
        return None

    def copies_wait_for(self, fence: Any) -> None:
        """Let copies that are asked for from now on wait for a fence."""

    # -- kernels and their times ----------------------------------------------------------------------

    def stamp(self) -> Any:
        """Return a mark in the order of kernels, which :meth:`time_ns` turns into a time."""
        return time.perf_counter_ns()

    def time_ns(self, stamp: Any) -> int:
        """Return the time of a stamp on the clock of ``perf_counter_ns``; kernels before it have ended."""
        when: int = stamp
        return when

    def synchronize(self) -> None:
        """Wait until all kernels have ended."""

    def to_host(self, values: Tensor) -> Tensor:
        """Return a tensor in host memory, when the kernels that make it have ended."""
        return values

    def to_device(self, values: Tensor) -> Tensor:
        """Return a tensor in the device's memory."""
        return values

    @contextmanager
    def faults(self, what: str = "what was asked for") -> Iterator[None]:
        """Raise what the device reports as RealError of one line; a CPU reports nothing."""
        yield


class CPUDevice(Device):
    """The CPU as the device that computes."""
