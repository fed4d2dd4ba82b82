"""Hyper-parameters of a training run and its learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainConfig:
    """Hyper-parameters of a run; they are written beside the checkpoint."""

    seed: int = 0
    steps: int = 1200
    batch: int = 16  # texts per step
    pool: int = 16  # batches drawn together and grouped by length
    warmup: int = 60  # steps
    decay: float = 0.5  # share of the run over which the rate falls to zero
    muon_lr: float = 0.015
    adam_lr: float = 4e-3
    weight_decay: float = 0.05
    clip: float = 1.0
    balance: float = 0.01  # weight of the load-balance loss
    question_weight: float = 0.1  # loss weight of a question character; a solution's has 1
    # The form of the texts is learned first; then the results of the sums get more weight, and
    # drills take a part of each batch until the last part of the run.
    focus_from: int = 400  # step; a multiple of ``pool``, as is the next
    focus_until: int = 960  # step
    result_weight: float = 4.0
    drills: int = 6  # per batch
    log_every: int = 20
    eval_every: int = 200
    eval_size: int = 32
    save_every: int = 50


def rate(config: TrainConfig, step: int) -> float:
    """Return the factor of the learning rates: warm-up, a plateau, a linear fall to zero."""
    left = (config.steps - step) / (config.decay * config.steps)
    return min(1.0, (step + 1) / config.warmup, left)
