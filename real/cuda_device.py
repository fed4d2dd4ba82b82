"""A CUDA device: kernels on the current stream, copies on one of their own, locked host memory.

What must hold, and where it does:
- a copy into a slot waits for the kernels that read what was there, by its fence: an event after them;
- a kernel reads a slot only when the host has seen the copy's own event, so it needs no event of its own;
- memory that torch gives out anew may still be written by kernels that were asked for before: the stream of
  copies waits for them once (:meth:`CUDADevice.buffer`);
- memory that is given back is not given out again before copies into it have ended (``record_stream``).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from real.cuda_clock import CUDAClock, Stamp
from real.device import Device
from real.errors import RealError
from real.host_memory import chunks, cuts, locked_pages


class CUDADevice(Device):
    """One CUDA device; its compute stream is the one that is current where kernels are asked for."""

    kind = "cuda"

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.torch_device = torch.device("cuda", index)
        self._chunked: list[tuple[int, int]] = []  # (address, bytes) of what several calls locked
        with self.faults():
            torch.cuda.set_device(self.torch_device)
            self._copies = torch.cuda.Stream(self.torch_device)
            self._clock = CUDAClock(self._kernels)

    @property
    def name(self) -> str:
        """What the device is called."""
        return torch.cuda.get_device_name(self.torch_device)

    @property
    def _kernels(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.torch_device)

    # -- memory -----------------------------------------------------------------------------------

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Return locked memory; if CUDA refuses, warn and return memory that is not."""
        cudart = torch.cuda.cudart()
        found, code = locked_pages(num_bytes, cudart)
        if code:
            self.why_not_locked = f"CUDA error {code}"
            self._forget_error()
            warnings.warn(
                f"{num_bytes} bytes of host memory cannot be locked ({self.why_not_locked}): copies from "
                "them are slower, and go through memory of the driver's",
                stacklevel=2,
            )
        elif len(list(chunks(num_bytes))) > 1:
            self._chunked.append((found.data_ptr(), num_bytes))
        return found

    def _forget_error(self) -> None:
        # A refusal stays in CUDA's record until somebody asks, and the next launch would be blamed for it.
        with suppress(RuntimeError):
            torch.ones(1, device=self.torch_device)

    def buffer(self, num_bytes: int) -> Tensor:
        """Return memory of the device; RealError if it has no more."""
        with self.faults(f"{num_bytes} bytes for experts"):
            found = torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
            self._copies.wait_stream(self._kernels)
            found.record_stream(self._copies)
        self.held_bytes += num_bytes
        return found

    def peak_bytes(self) -> int:
        """Return the most that torch held on the device since :meth:`reset_peak`, all tensors counted."""
        return torch.cuda.max_memory_allocated(self.torch_device)

    def reset_peak(self) -> None:
        """Let :meth:`peak_bytes` begin with what is held now."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    # -- copies -----------------------------------------------------------------------------------

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy on the stream of copies and wait for it; the GIL is free meanwhile.

        Several threads may copy: what they ask for goes over the link one after another, so that a second
        copy is set up while the first is on its way.
        """
        with self.faults():
            with torch.cuda.stream(self._copies):
                for begin, end in self._parts(source):
                    target[begin:end].copy_(source[begin:end], non_blocking=True)
                done = torch.cuda.Event()
                done.record(self._copies)
            done.synchronize()

    def _parts(self, source: Tensor) -> list[tuple[int, int]]:
        """Return parts that each lie in memory that one call locked: no copy may cross two."""
        address = source.data_ptr()
        for base, num_bytes in self._chunked:
            if base <= address < base + num_bytes:
                return cuts(address - base, source.numel())
        return [(0, source.numel())]

    def fence(self) -> torch.cuda.Event:
        """Return an event after all kernels asked for so far."""
        event = torch.cuda.Event()
        event.record(self._kernels)
        return event

    def copies_wait_for(self, fence: torch.cuda.Event | None) -> None:
        """Let the stream of copies wait for a fence."""
        if fence is not None:
            self._copies.wait_event(fence)

    # -- kernels and their times --------------------------------------------------------------------

    def stamp(self) -> Stamp:
        """Return a mark in the compute stream."""
        return self._clock.stamp(self._kernels)

    def time_ns(self, stamp: Stamp) -> int:
        """Return when the compute stream came to a stamp."""
        with self.faults():
            return self._clock.time_ns(stamp)

    def synchronize(self) -> None:
        """Wait until all kernels have ended; copies go on."""
        with self.faults():
            self._kernels.synchronize()
            self._clock.idle(self._kernels)

    def to_host(self, values: Tensor) -> Tensor:
        """Return a tensor in host memory, when the kernels that make it have ended."""
        with self.faults():
            return values.to("cpu")

    def to_device(self, values: Tensor) -> Tensor:
        """Return a tensor in the device's memory; the host does not wait.

        ``values`` may be changed at once if they are not in locked memory: the driver has taken a copy.
        """
        return values.to(self.torch_device, non_blocking=True)

    # -- errors -----------------------------------------------------------------------------------

    @contextmanager
    def faults(self, what: str = "what was asked for") -> Iterator[None]:
        """Raise CUDA's errors as RealError of one line."""
        try:
            yield
        except torch.cuda.OutOfMemoryError as error:
            raise RealError(f"{self.torch_device}: {what}: {self._room()}") from error
        except RuntimeError as error:
            first = str(error).splitlines()[0] if str(error) else ""
            if not _is_from_cuda(error, first):
                raise
            raise RealError(f"{self.torch_device}: {first}") from error

    def _room(self) -> str:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return f"out of memory, {free} of {total} bytes are free; lower cache.ratio or workload.batch_size"


def _is_from_cuda(error: RuntimeError, first: str) -> bool:
    kind: Any = getattr(torch, "AcceleratorError", ())
    return isinstance(error, kind) or first.startswith(("CUDA", "No CUDA", "Found no NVIDIA"))
