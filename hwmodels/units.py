"""Units and the two roundings: nanoseconds are whole, and work never takes less than its exact time."""

from __future__ import annotations

import math

GB = 10**9
NS_PER_S = 10**9


def transfer_ns(num_bytes: int, bytes_per_s: int) -> int:
    """Return the time to move ``num_bytes`` at a constant rate, rounded up."""
    return -(-num_bytes * NS_PER_S // bytes_per_s)


def compute_ns(num_flops: int, flops: int) -> int:
    """Return the time of ``num_flops`` operations at ``flops`` operations a second, rounded up."""
    return -(-num_flops * NS_PER_S // flops)


def weight_bytes(num_params: int, bits: float) -> int:
    """Return the bytes of ``num_params`` weights of ``bits`` bits each, rounded up."""
    return math.ceil(num_params * bits / 8)
