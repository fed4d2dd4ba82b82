"""A stand-in for an SGLang server with its expert recorder on; it knows which request a row is of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

EXTEND, DECODE, MIXED, IDLE = 1, 2, 3, 4
WIDTH = 8  # the recorder's own number of slots


@dataclass
class Job:
    """A request: its lengths, how many prompt tokens the prefix cache has, and when it arrives."""

    prompt: int
    output: int
    cached: int = 0
    arrival: int = 0
    done: int = 0  # tokens whose keys are in the cache
    rows: list[tuple[int, int, int, np.ndarray]] = field(default_factory=list)
    """(position, forward pass, token id, experts [layers, k]) of each row, as it was."""

    def __post_init__(self) -> None:
        self.done = self.cached


class Engine:
    """Runs jobs on one rank: prompts first, in chunks, then one token a pass of every running request."""

    def __init__(
        self, jobs, *, chunk=8, mixed=False, layers=3, experts=6, top_k=2, dense=1, seed=0
    ):
        self.jobs, self.chunk, self.mixed = list(jobs), chunk, mixed
        self.shape, self.dense, self.experts = (layers, top_k), dense, experts
        self.rng = np.random.default_rng(seed)
        self.table = np.tile(np.arange(experts), (layers, 1))
        self.records: list[dict] = []
        self.waiting, self.running, self.partial = [], [], None

    def with_copies(self, copies: int) -> Engine:
        """Place the experts anew, some of them twice."""
        everything = np.append(np.arange(self.experts), np.arange(copies))
        self.table = np.stack([self.rng.permutation(everything) for _ in self.table])
        return self

    def run(self, rank: int = 0, first_pass: int = 0) -> list[dict]:
        number, arriving = first_pass, sorted(self.jobs, key=lambda job: job.arrival)
        while arriving or self.waiting or self.running or self.partial:
            while arriving and arriving[0].arrival <= number:
                self.waiting.append(arriving.pop(0))
            self._step(number, rank)
            number += 1
        return self.records

    def _step(self, number: int, rank: int) -> None:
        parts, budget = [], self.chunk
        queue = [self.partial] if self.partial else []
        queue += self.waiting
        for job in queue:
            tokens = min(budget, job.prompt - job.done)
            if tokens == 0:
                break
            parts.append((job, tokens))
            budget -= tokens
        if parts:
            self.waiting = [job for job in self.waiting if all(job is not one for one, _ in parts)]
            mode, running = (MIXED, self.running) if self.mixed and self.running else (EXTEND, [])
            self._record(mode, [*parts, *((job, 1) for job in running)], number, rank)
            last = parts[-1][0]
            self.partial = last if last.done < last.prompt else None
            whole = [job for job, _ in parts if job is not self.partial]
            old = [job for job in self.running if job not in whole]
            self.running = [*whole, *old] if mode == MIXED else [*old, *whole]
        elif self.running:
            self._record(DECODE, [(job, 1) for job in self.running], number, rank)
        else:
            self._record(IDLE, [], number, rank)
        self.running = [job for job in self.running if job.done < job.prompt + job.output - 1]

    def _record(self, mode, parts, number, rank) -> None:
        tokens, positions, ids = [], [], []
        for job, length in parts:
            for position in range(job.done, job.done + length):
                tokens.append(int(self.rng.integers(1000)))
                positions.append(position)
                ids.append(self._experts())
                job.rows.append((position, number, tokens[-1], ids[-1]))
            job.done += length
        layers, top_k = self.shape
        slots = np.full((layers, len(tokens), WIDTH), -1, dtype=np.int32)
        for row, experts in enumerate(ids):
            slots[self.dense :, row, :top_k] = [
                [self._physical(layer + self.dense, expert) for expert in chosen]
                for layer, chosen in enumerate(experts)
            ]
        count = np.zeros(self.table.shape, dtype=np.int32)
        for layer, row, slot in np.argwhere(slots >= 0):
            count[layer, slots[layer, row, slot]] += 1
        self.records.append(
            {
                "forward_pass_id": number,
                "rank": rank,
                "gatherer_key": "primary",
                "input_ids": tokens,
                "positions": positions,
                "extend_seq_lens": [n for _, n in parts] if mode in (EXTEND, MIXED) else None,
                "forward_mode": mode,
                "topk_ids_of_layer": torch.from_numpy(slots),
                "misc_objects": [],
                "global_physical_count": torch.from_numpy(count),
            }
        )

    def _experts(self) -> np.ndarray:
        layers, top_k = self.shape
        return self.rng.random((layers - self.dense, self.experts)).argsort(axis=1)[:, :top_k]

    def _physical(self, layer: int, expert: int) -> int:
        return int(self.rng.choice(np.flatnonzero(self.table[layer] == expert)))


def save(path: Path, records: list[dict], table: np.ndarray) -> Path:
    """Write a dump as the recorder does."""
    dump = {"records": records, "last_physical_to_logical_map": torch.from_numpy(table)}
    torch.save(dump, path)
    return path


def per_pass(records: list[dict]) -> list[dict]:
    """What mode per_pass keeps of them."""
    kept = ("forward_pass_id", "rank", "gatherer_key", "global_physical_count")
    return [{key: record[key] for key in kept} for record in records]
