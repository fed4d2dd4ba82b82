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
    def of(cls, num_gpus: int, split: str, num_layers: int, num_experts: int) -> Layout:
        """Return how an engine splits a model: by ``expert`` (taking turns) or by ``layer`` (in blocks)."""
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
            return cls(turns, (0,) * num_layers)
        homes = tuple(layer * num_gpus // num_layers for layer in layers)
        return cls(tuple(homes[layer] for layer in layers for _ in experts), homes)


@dataclass(frozen=True, slots=True)
class Pools:
    """The pools of GPU memory that experts are cached in: one a layer, or one for all; by GPU in either case.

    By pool: ``num_keys``, ``largest_bytes`` of one expert, ``all_bytes`` of its experts, ``gpu_of_pool``.
    """

    is_global: bool
    layout: Layout
    layer_bytes: tuple[int, ...]
    pool_of_key: tuple[int, ...]
    num_keys: tuple[int, ...]
    largest_bytes: tuple[int, ...]
    all_bytes: tuple[int, ...]
    gpu_of_pool: tuple[int, ...]

    @classmethod
    def of(cls, costs: CostModel, num_experts: int, is_global: bool) -> Pools:
        """Return the pools of a model on a machine."""
        shape, machine = costs.shape, costs.machine
        layers = range(shape.num_moe_layers)
        layer_bytes = tuple(shape.expert_bytes(layer) for layer in layers)
        count = machine.gpu.count if machine.gpu is not None else 1
        layout = Layout.of(count, costs.engine.split, len(layers), num_experts)
        owners = [
            (0 if is_global else key // num_experts, layout.gpu_of_key[key] if count > 1 else 0)
            for key in range(len(layers) * num_experts)
        ]
        names = list(dict.fromkeys(owners))
        place = {name: pool for pool, name in enumerate(names)}
        pool_of_key = tuple(place[owner] for owner in owners)
        sizes: list[list[int]] = [[] for _ in names]
        for key, pool in enumerate(pool_of_key):
            sizes[pool].append(layer_bytes[key // num_experts])
        return cls(
            is_global=is_global,
            layout=layout,
            layer_bytes=layer_bytes,
            pool_of_key=pool_of_key,
            num_keys=tuple(map(len, sizes)),
            largest_bytes=tuple(map(max, sizes)),
            all_bytes=tuple(map(sum, sizes)),
            gpu_of_pool=tuple(gpu for _, gpu in names),
        )

    @property
    def num_gpus(self) -> int:
        """Number of GPUs."""
        return max(self.gpu_of_pool) + 1

    @property
    def pool_of_layer(self) -> Sequence[int]:
        """The pool of each layer's first expert."""
        return self.pool_of_key[:: len(self.pool_of_key) // len(self.layer_bytes)]

    def event_slots(self, top_k: int) -> int:
        """Return how many of a token's experts a pool must hold if they are spread evenly."""
        spread = self.layout.home_of_layer and len(set(self.layout.home_of_layer)) == 1
        return -(-top_k // self.num_gpus) if spread else top_k

    def least_host_bytes(self, prefetch_limit: int, is_exclusive: bool) -> int:
        """Return what host memory must hold above storage: a layer's experts and those on their way.

        In exclusive host memory as many again may be on their way back from the GPU.
        """
        num_experts = len(self.pool_of_key) // len(self.layer_bytes)
        slots = (num_experts + prefetch_limit) * (2 if is_exclusive else 1)
        return min(slots, len(self.pool_of_key)) * max(self.layer_bytes)
