"""One budget for KV cache and experts: what KV takes as it grows, the expert pools give."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JointBudget:
    """GPU memory that the expert pools and the KV cache share.

    Parameters
    ----------
    total_bytes
        Both together.
    kv_bytes_per_token
        KV of one token over all layers.
    pool_weights
        Relative size of each pool, [num_pools]; what KV leaves is divided by them.
    least_pool_bytes
        What each pool keeps in any case, [num_pools]: the experts of one event, and copies under way.
    """

    total_bytes: int
    kv_bytes_per_token: int
    pool_weights: tuple[int, ...]
    least_pool_bytes: tuple[int, ...]

    def pool_bytes(self, kv_tokens: int) -> list[int]:
        """Return the capacity of each pool while ``kv_tokens`` tokens are held."""
        left = self.total_bytes - kv_tokens * self.kv_bytes_per_token
        weights = sum(self.pool_weights)
        return [
            max(least, left * weight // weights)
            for weight, least in zip(self.pool_weights, self.least_pool_bytes, strict=True)
        ]

    @property
    def most_kv_tokens(self) -> int:
        """Tokens that may be held while every pool keeps its least."""
        return max(0, self.total_bytes - self.least_bytes) // self.kv_bytes_per_token

    @property
    def least_bytes(self) -> int:
        """What must be left for experts so that every pool has its least."""
        weights = sum(self.pool_weights)
        # left * weight // weights >= least for every pool, solved for left
        return max(
            -(-least * weights // weight)
            for weight, least in zip(self.pool_weights, self.least_pool_bytes, strict=True)
        )
