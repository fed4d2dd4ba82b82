"""A tiny Mixture-of-Experts language model that reasons in stages, and its training."""

from __future__ import annotations

from pathlib import Path

CHECKPOINT_DIR = Path(__file__).resolve().parent / "checkpoint"
