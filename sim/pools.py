"""Which GPU and which pool of its memory serves each expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hwmodels.cost import CostModel
from sim.types import ConfigError


@dataclass(frozen=True, slots=True)
class Layout:
    """Where experts and attention are: the GPU of each key and of each layer; empty with one GPU."""

    gpu_of_key: tuple[int, ...] = ()
    home_of_layer: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, num_gpus: int, split: str, num_layers: int, num_experts: int, num_copies: int = 1
    ) -> Layout:
        """Return how an engine splits a model: by ``expert`` (taking turns) or by ``layer`` (in blocks).

        Both copies of an expert belong to the same GPU.
        """
        if num_gpus == 1:
            return cls()
        most, what = (
            (num_experts, "experts a layer") if split == "expert" else (num_layers, "layers")
        )
        if num_gpus > most:
            raise ConfigError(
                f"machine.gpu.count = {num_gpus}: must be <= {most}, the {what} that engine.split = "
                f"{split} deals out"
            )
        layers, experts = range(num_layers), range(num_experts)
        if split == "expert":
            turns = tuple(expert % num_gpus for _ in layers for expert in experts)
            return cls(turns * num_copies, (0,) * num_layers)
        homes = tuple(layer * num_gpus // num_layers for layer in layers)
        owners = tuple(homes[layer] for layer in layers for _ in experts)
        return cls(owners * num_copies, homes)


@dataclass(frozen=True, slots=True)
class Pools:
    """The pools of GPU memory that experts are cached in: one a layer, one a group, or one for all.

    Each GPU has its own, and so have low-precision copies. ``layer_bytes`` are the bytes of an expert by
    bank (see KeySpace). By pool: ``num_keys``, ``largest_bytes`` of one expert, ``all_bytes`` of its
    experts, ``gpu_of_pool``, and whether it ``is_low``.
    """

    scope: str
    layout: Layout
    layer_bytes: tuple[int, ...]
    pool_of_key: tuple[int, ...]
    num_keys: tuple[int, ...]
    largest_bytes: tuple[int, ...]
    all_bytes: tuple[int, ...]
    gpu_of_pool: tuple[int, ...]
    is_low: tuple[bool, ...]

    @classmethod
    def of(
        cls, costs: CostModel, num_experts: int, scope: str, group_layers: int | None = None
    ) -> Pools:
        """Return the pools of a model on a machine.

        ``scope``: a pool a ``layer``; a pool for all (``global``); or a ``group``: ``group_layers``
        consecutive layers a pool, or with None all layers whose experts have the same bytes.
        """
        shape, machine = costs.shape, costs.machine
        num_layers, banks = shape.num_moe_layers, range(shape.num_banks)
        layer_bytes = tuple(shape.expert_bytes(bank) for bank in banks)
        count = machine.gpu.count if machine.gpu is not None else 1
        copies = len(banks) // num_layers
        layout = Layout.of(count, costs.engine.split, num_layers, num_experts, copies)
        share = {"layer": 1, "global": num_layers}.get(scope, group_layers)
        groups = [
            (bank >= num_layers, layer_bytes[bank] if share is None else bank % num_layers // share)
            for bank in banks
        ]
        owners = [
            (*groups[key // num_experts], layout.gpu_of_key[key] if count > 1 else 0)
            for key in range(len(banks) * num_experts)
        ]
        names = list(dict.fromkeys(owners))
        place = {name: pool for pool, name in enumerate(names)}
        pool_of_key = tuple(place[owner] for owner in owners)
        sizes: list[list[int]] = [[] for _ in names]
        for key, pool in enumerate(pool_of_key):
            sizes[pool].append(layer_bytes[key // num_experts])
        return cls(
            scope=scope,
            layout=layout,
            layer_bytes=layer_bytes,
            pool_of_key=pool_of_key,
            num_keys=tuple(map(len, sizes)),
            largest_bytes=tuple(map(max, sizes)),
            all_bytes=tuple(map(sum, sizes)),
            gpu_of_pool=tuple(gpu for *_, gpu in names),
            is_low=tuple(is_low for is_low, *_ in names),
        )

    @property
    def num_gpus(self) -> int:
        """Number of GPUs."""
        return max(self.gpu_of_pool) + 1

    @property
    def num_copies(self) -> int:
        """Copies of each expert: 2 where there are low-precision ones, else 1."""
        return 2 if any(self.is_low) else 1

    @property
    def stored_bytes(self) -> int:
        """Bytes of all copies of all experts: what host memory, or storage, holds."""
        return sum(self.all_bytes)

    @property
    def all_expert_bytes(self) -> int:
        """Bytes of all experts in full precision."""
        pairs = zip(self.all_bytes, self.is_low, strict=True)
        return sum(size for size, is_low in pairs if not is_low)

    @property
    def pool_of_layer(self) -> Sequence[int]:
        """The pool of each bank's first expert."""
        return self.pool_of_key[:: len(self.pool_of_key) // len(self.layer_bytes)]

    def low_pools_of(self, pool: int) -> set[int]:
        """Return the pools of the low-precision copies of a pool's experts."""
        if self.num_copies == 1:
            return set()
        half = len(self.pool_of_key) // 2
        pairs = zip(self.pool_of_key[:half], self.pool_of_key[half:], strict=True)
        return {low for high, low in pairs if high == pool}

    def event_slots(self, top_k: int) -> int:
        """Return how many of a token's experts a pool must hold if they are spread evenly."""
        spread = self.layout.home_of_layer and len(set(self.layout.home_of_layer)) == 1
        return -(-top_k // self.num_gpus) if spread else top_k

    def least_host_bytes(self, prefetch_limit: int, is_exclusive: bool) -> int:
        """Return what host memory must hold above storage: a layer's experts and those on their way.

        Both copies of each, for an event may use both. In exclusive host memory as many again may be on
        their way back from the GPU.
        """
        num_experts = len(self.pool_of_key) // len(self.layer_bytes) * self.num_copies
        slots = (num_experts + prefetch_limit) * (2 if is_exclusive else 1)
        return min(slots, len(self.pool_of_key)) * max(self.layer_bytes)
