"""Data-parallel training over processes of one thread each.

Processes meet once per step, threads of one process in every operation: on cores that other
programs use too, processes lose far less time waiting for each other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn


def _join(rank: int, count: int, meeting: str) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=count
    )


def _worker(rank: int, count: int, meeting: str, work: Callable[..., None], given: Any) -> None:
    _join(rank, count, meeting)
    work(rank, given)


def place() -> tuple[int, int]:
    """Return this process's rank and the size of the team."""
    if not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


@contextmanager
def team(count: int, work: Callable[..., None], given: Any) -> Iterator[None]:
    """Start ``count - 1`` processes that call ``work(rank, given)``; the caller is rank 0."""
    if count == 1:
        yield
        return
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting = folder + "/meeting"
        others = [
            context.Process(target=_worker, args=(rank, count, meeting, work, given), daemon=True)
            for rank in range(1, count)
        ]
        for process in others:
            process.start()
        _join(0, count, meeting)
        yield
        for process in others:
            process.join()
        distributed.destroy_process_group()


def average(model: nn.Module, numbers: dict[str, Tensor]) -> dict[str, float]:
    """Average the gradients over the team in place, and return the averaged ``numbers``."""
    extra = torch.stack([number.detach() for number in numbers.values()])
    if distributed.is_initialized():
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        flat = torch.cat([*(grad.flatten() for grad in grads), extra])
        distributed.all_reduce(flat)
        flat /= distributed.get_world_size()
        start = 0
        for grad in grads:
            grad.copy_(flat[start : start + grad.numel()].view_as(grad))
            start += grad.numel()
        extra = flat[start:]
    return dict(zip(numbers, extra.tolist(), strict=True))
