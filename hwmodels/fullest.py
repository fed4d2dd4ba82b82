"""How many of a layer's experts the fullest of several GPUs has in the mean: the layer waits for that."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

_MOST_COUNTED = 64
"""Experts above which the largest of normal shares is right to a per cent."""


def fullest(num_experts: float, num_gpus: int) -> float:
    """Return the mean of the largest number of experts on one GPU; linear between whole numbers.

    Each expert used lies on each GPU with equal chance, independently of the others.
    """
    if num_gpus == 1:
        return num_experts
    low = math.floor(num_experts)
    first, last = (_fullest(number, num_gpus) for number in (low, low + 1))
    return first + (num_experts - low) * (last - first)


@lru_cache(maxsize=1024)
def _fullest(num_experts: int, num_gpus: int) -> float:
    if num_experts > _MOST_COUNTED:
        mean = num_experts / num_gpus  # shares differ as independent ones of this variance would
        largest = NormalDist().inv_cdf((num_gpus - 0.375) / (num_gpus + 0.25))  # Blom's rule
        return mean + largest * math.sqrt(mean)
    return sum(1 - _at_most(most, num_experts, num_gpus) for most in range(num_experts))


def _at_most(most: int, num_experts: int, num_gpus: int) -> float:
    """Return the chance that no GPU has more than ``most`` experts.

    The ways to lay n different experts on g GPUs, at most m on each: n! times the coefficient of x^n in
    (sum of x^j / j! up to m)^g; of g^n in all.
    """
    ways = [1] + [0] * num_experts
    for _ in range(num_gpus):
        ways = [
            sum(math.comb(total, own) * ways[total - own] for own in range(min(most, total) + 1))
            for total in range(num_experts + 1)
        ]
    return ways[num_experts] / num_gpus**num_experts
