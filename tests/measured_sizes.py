"""Sizes of pieces of work that are measured in a moment."""

from __future__ import annotations

from real.measure_plan import Sizes
from real.measure_storage import RECORD_BYTES

KIB, MIB = 1 << 10, 1 << 20
SMALL = Sizes(
    experts=((64, 32), (128, 64)),
    tokens=(1, 3, 4),
    in_situ_tokens=(1, 2),
    copies=(64 * KIB, 256 * KIB),
    blocks=(64 * KIB, 256 * KIB),
    kv_tokens=(8, 16),
    matrices=((64, 64), (128, 64)),
    batch=8,
    scratch_bytes=2 * RECORD_BYTES,
)
