"""Experts on the CPU beside the device as pieces of work to be timed: through the executor's own threads."""

from __future__ import annotations

import time
from concurrent.futures import Future

from real.device import Device
from real.insitu import Computed, InSitu
from real.kernels import Kernels
from real.measure import Facts
from real.measure_kernels import OneExpert, activations, expert_facts
from real.store import RAMStore, StoreShape
from real.weight_pool import WeightPool


class InSituProbe:
    """One expert where its weights wait: computed by a team of host threads.

    Parameters
    ----------
    device
        Whose activations it gets; they are handed over outside of the time that counts.
    kernels
        Of the expert.
    host
        Weights in host memory.
    num_tokens
        Tokens of the expert.
    threads
        Threads of the team.
    """

    def __init__(
        self, device: Device, kernels: Kernels, host: WeightPool, num_tokens: int, threads: int
    ) -> None:
        form = kernels.format
        facts = expert_facts("expert_cpu", form, num_tokens)
        self.facts: Facts = {**facts, "threads": threads}
        self._host = host
        count = host.buffer.numel() // form.slot_bytes
        self._slot_bytes = form.slot_bytes
        store = RAMStore(StoreShape(1, count, (form,)), host.buffer[: count * form.slot_bytes])
        self._insitu = InSitu(store, {form: kernels}, device, 1, threads)
        self._tokens = OneExpert(activations(form, num_tokens, device))
        self._under_way: list[Future[Computed]] = []
        self._wakes = threads > 1

    def run(self) -> float:
        """Compute, and return the ns that the team took for it."""
        self.start(2 if self._wakes else 1)
        last = self._computed()[-1]
        return last.end_ns - last.begin_ns

    def handed_over_ns(self) -> float:
        """Compute, and return what the way there and back took beside it, in ns."""
        begin_ns = time.perf_counter_ns()
        self.start(1)
        (one,) = self._computed()
        return max(1, time.perf_counter_ns() - begin_ns - (one.end_ns - one.begin_ns))

    def start(self, count: int) -> None:
        """Hand over so many experts, which are computed one after another."""
        size = self._slot_bytes
        keys = [self._host.place(size, size) // size for _ in range(count)]
        self._under_way = self._insitu.begin(keys, self._tokens)

    def is_running(self) -> bool:
        """Tell whether some are not computed yet."""
        return not all(part.done() for part in self._under_way)

    def finish(self) -> float:
        """Wait for them, and return the ns that each took in the mean."""
        found = self._computed()
        return sum(one.end_ns - one.begin_ns for one in found) / len(found)

    def _computed(self) -> list[Computed]:
        return self._insitu.put_back(self._under_way, self._tokens)

    def close(self) -> None:
        """End the threads; harmless twice."""
        self._insitu.close()


class HandoverProbe:
    """Activations to the threads of in-situ experts and back: all that a layer waits beside computing."""

    def __init__(
        self, device: Device, kernels: Kernels, host: WeightPool, num_tokens: int = 1
    ) -> None:
        self.facts: Facts = {"kind": "handover", "num_tokens": num_tokens}
        self._device = device
        self._expert = InSituProbe(device, kernels, host, num_tokens, threads=1)

    def run(self) -> float:
        """Hand over and back, and return the ns."""
        self._device.synchronize()
        return self._expert.handed_over_ns()

    def close(self) -> None:
        """End the threads."""
        self._expert.close()
