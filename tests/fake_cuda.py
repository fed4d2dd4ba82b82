"""A CUDA without a device: streams whose work is done only when somebody waits for it, in a chosen order.

What is not ordered by an event comes in the order that hurts. An event that is waited for before it was
recorded, which CUDA lets pass, is an error here; so is asking for a time between events in the wrong order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock, local
from typing import Any

import numpy as np
import pytest
import torch

DRIFT = 30e-6
"""How much faster the device's clock runs than the host's."""
LATENCY_NS = 2_000
"""What the host's clock advances while the device does one thing."""
REFUSED = 2  # cudaErrorMemoryAllocation


class Mark:
    """One recording of an event."""

    done = False
    device_ns = 0.0


class FakeEvent:
    cuda: FakeCUDA

    def __init__(self, enable_timing: bool = False) -> None:
        self.has_time = enable_timing
        self.mark: Mark | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        with self.cuda.lock:
            self.mark = Mark()
            (stream or self.cuda.current_stream()).push(self.cuda.done, self.mark)

    def recorded(self) -> Mark:
        assert self.mark is not None, "an event is waited for that was never recorded"
        return self.mark

    def synchronize(self) -> None:
        self.cuda.run_until(self.recorded())

    def query(self) -> bool:
        return self.recorded().done

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.has_time, "an event without a time is asked for it"
        assert end.has_time, "an event without a time is asked for it"
        elapsed_ns = end.recorded().device_ns - self.recorded().device_ns
        assert elapsed_ns >= 0, "a time is asked for from a later event to an earlier one"
        return float(np.float32(elapsed_ns / 1e6))


class FakeStream:
    cuda: FakeCUDA

    def __init__(self, device: Any = None) -> None:
        self.work: deque[tuple[Callable[..., Any], tuple[Any, ...], Mark | None]] = deque()
        self.cuda.streams.append(self)

    def push(self, function: Callable[..., Any], *args: Any, after: Mark | None = None) -> None:
        with self.cuda.lock:
            self.work.append((function, args, after))

    def wait_event(self, event: FakeEvent) -> None:
        self.push(lambda: None, after=event.recorded())

    def wait_stream(self, other: FakeStream) -> None:
        event = FakeEvent()
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        event = FakeEvent()
        event.record(self)
        event.synchronize()

    def step(self) -> bool:
        """Do the first thing, unless there is none or it has to wait."""
        if not self.work or (self.work[0][2] is not None and not self.work[0][2].done):
            return False
        function, args, _ = self.work.popleft()
        self.cuda.host_ns += LATENCY_NS
        function(*args)
        return True


class FakeCudart:
    """Locks pages of this process: checks that they are mapped, whole and not locked twice."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.refuse_after: int | None = None
        self.has_error = False

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address % 4096 == 0
        assert _is_mapped(address)
        assert all(address + size <= at or at + used <= address for at, used in self.locked.items())
        if self.refuse_after is not None and len(self.locked) >= self.refuse_after:
            self.has_error = True
            return REFUSED
        self.locked[address] = size
        return 0

    def check_copy(self, address: int, size: int) -> None:
        """Raise as CUDA does where a copy begins in what one call locked and ends elsewhere."""
        for begin, length in self.locked.items():
            if begin <= address < begin + length < address + size:
                raise RuntimeError("CUDA error: invalid argument")

    def cudaHostUnregister(self, address: int) -> int:
        assert _is_mapped(address), "memory was unmapped before it was unlocked"
        del self.locked[address]
        return 0


class FakeCUDA:
    """Installs itself in the place of ``torch.cuda``.

    ``copies_first``: of what may happen now, copies come before kernels; else after them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, copies_first: bool = True) -> None:
        self.lock = RLock()
        self.copies_first = copies_first
        self.host_ns = 1_000_000_000
        self.streams: list[FakeStream] = []
        self.free_blocks: list[torch.Tensor] = []
        self.used_by: list[FakeStream] = []
        self.fault: Exception | None = None
        self.cudart = FakeCudart()
        self._thread = local()
        event, stream = (
            type("Event", (FakeEvent,), {"cuda": self}),
            type("Stream", (FakeStream,), {}),
        )
        FakeEvent.cuda = FakeStream.cuda = self
        self.kernels = stream()
        self._install(monkeypatch, event, stream)

    def _install(self, monkeypatch: pytest.MonkeyPatch, event: Any, stream: Any) -> None:
        names = {
            "Event": event,
            "Stream": stream,
            "current_stream": self.current_stream,
            "stream": self.stream,
            "synchronize": lambda device=None: [each.synchronize() for each in self.streams],
            "set_device": lambda device: None,
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_name": lambda device: "a fake",
            "mem_get_info": lambda device: (1000, 4000),
            "cudart": lambda: self.cudart,
        }
        for name, value in names.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "empty", self._allocating(torch.empty))
        monkeypatch.setattr(torch, "ones", self._launching(torch.ones))
        monkeypatch.setattr("real.cuda_clock.perf_counter_ns", self.perf_counter_ns)

    def _allocating(self, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def empty(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
            if device is None or torch.device(device).type == "cpu":
                return plain(*size, device=device, **options)
            if self.fault is not None:
                raise self.fault
            found = self.free_blocks.pop() if self.free_blocks else plain(*size, **options)
            return found.as_subclass(DeviceTensor)

        return empty

    def _launching(self, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def ones(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
            if device is not None and self.cudart.has_error:  # a launch reports what was left
                self.cudart.has_error = False
                raise RuntimeError("CUDA error: out of memory\nand more lines")
            return plain(*size, **options)

        return ones

    # -- what tests do ----------------------------------------------------------------------------

    def launch(self, kernel: Callable[..., Any], *args: Any) -> None:
        """Ask for a kernel on the current stream."""
        self.current_stream().push(kernel, *args)

    def pass_time(self, ns: int) -> None:
        self.host_ns += ns

    # -- what streams do ----------------------------------------------------------------------------

    def current_stream(self, device: Any = None) -> FakeStream:
        found: FakeStream = getattr(self._thread, "stream", self.kernels)
        return found

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    def run_until(self, mark: Mark) -> None:
        with self.lock:
            order = list(reversed(self.streams)) if self.copies_first else self.streams
            while not mark.done:
                assert any(stream.step() for stream in order), "all streams wait for each other"

    def done(self, mark: Mark) -> None:
        mark.done = True
        mark.device_ns = 5e11 + self.host_ns * (1 + DRIFT)

    def perf_counter_ns(self) -> int:
        self.host_ns += 100
        return self.host_ns


class DeviceTensor(torch.Tensor):
    """Memory of the device: what is copied into it comes when its stream comes to that."""

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> DeviceTensor:
        assert non_blocking
        cuda = FakeEvent.cuda
        if cuda.fault is not None:
            raise cuda.fault
        cuda.cudart.check_copy(source.data_ptr(), source.numel())
        cuda.current_stream().push(self.as_subclass(torch.Tensor).copy_, source)
        return self

    def record_stream(self, stream: FakeStream) -> None:
        FakeEvent.cuda.used_by.append(stream)


def _is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        ranges = [line.split(" ", 1)[0].split("-") for line in maps]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)
