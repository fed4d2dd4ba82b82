"""Experts computed where their weights lie: threads of the host, beside the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import local
from typing import NamedTuple

import torch
from torch import Tensor

from real.device import Device
from real.experts import ExpertFormat
from real.kernels import Kernels
from real.store import RAMStore
from real.tokens import LayerTokens


class Computed(NamedTuple):
    """What came of one expert: its results by micro-batch, on the host, and which team computed it when."""

    key: int
    team: int
    results: list[Tensor]
    handed_ns: int
    begin_ns: int
    end_ns: int


class InSitu:
    """Teams of host threads, each with an expert of its own.

    Parameters
    ----------
    store
        Where the weights are: host memory.
    kernels
        By format.
    device
        Whose activations come and whose results go back.
    num_teams, threads
        Teams, and threads of each.
    """

    def __init__(
        self,
        store: RAMStore,
        kernels: dict[ExpertFormat, Kernels],
        device: Device,
        num_teams: int = 1,
        threads: int = 1,
    ) -> None:
        self.busy_ns = 0
        self.num_teams = num_teams
        self._threads = threads
        self._store = store
        self._kernels = kernels
        self._device = device
        self._last: Future[Computed] | None = None
        self._own = local()
        self._teams = iter(range(num_teams))
        self._pool = ThreadPoolExecutor(num_teams, "insitu", initializer=self._form_team)

    def _form_team(self) -> None:
        """Begin the thread of a team."""
        self._own.team = next(self._teams)
        torch.set_num_threads(self._threads)

    def close(self) -> None:
        """End the threads; harmless twice."""
        self._pool.shutdown(cancel_futures=True)

    def begin(self, keys: Sequence[int], tokens: LayerTokens) -> list[Future[Computed]]:
        """Hand experts over, in order."""
        rows = {key: [self._device.to_host(part) for part in tokens.rows(key)] for key in keys}
        handed_ns = time.perf_counter_ns()
        parts = [self._pool.submit(self._compute, key, rows[key], handed_ns) for key in keys]
        self._last = parts[-1] if parts else self._last
        return parts

    @property
    def is_busy(self) -> bool:
        """Tell whether something that was handed over is not computed yet."""
        return self._last is not None and not self._last.done()

    def _compute(self, key: int, rows: Sequence[Tensor], handed_ns: int) -> Computed:
        begin_ns = time.perf_counter_ns()
        form = self._store.format_of(key)
        weights, kernels = form.view(self._store.bytes_of(key)), self._kernels[form]
        with torch.no_grad():
            results = [kernels.expert(weights, part) for part in rows]
        return Computed(key, self._own.team, results, handed_ns, begin_ns, time.perf_counter_ns())

    def put_back(self, parts: Sequence[Future[Computed]], tokens: LayerTokens) -> list[Computed]:
        """Wait for what was handed over, and give the results to the tokens."""
        found = [part.result() for part in parts]
        for one in found:
            self.busy_ns += one.end_ns - one.begin_ns
            tokens.put(one.key, [self._device.to_device(part) for part in one.results])
        return found
