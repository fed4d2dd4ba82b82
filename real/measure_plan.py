"""What is measured of a machine, and of what size, so that it says all that a machine's file needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from real.device import Device
from real.experts import ExpertFormat
from real.host_memory import pages
from real.kernels import Kernels
from real.measure import Contention, Probe
from real.measure_beside import Beside
from real.measure_copies import DuplexProbe, IssueProbe, ReturnProbe, copy_probe
from real.measure_host import HandoverProbe, InSituProbe
from real.measure_kernels import (
    AttentionProbe,
    KernelProbe,
    LaunchProbe,
    MatmulProbe,
    is_supported,
)
from real.measure_storage import RECORD_BYTES, BlockProbe, blocks_of, read_probe
from real.store_file import FileStore
from real.weight_pool import WeightPool, pool_bytes

KIB, MIB = 1 << 10, 1 << 20
DEPTHS = (1, 2, 4, 8, 16)
"""Of storage's queue; the last one is left out where there are few cores for its threads."""
SECONDS, QUICK_SECONDS = 130, 30
"""How long it takes until all is measured; fits come after it and take some seconds more."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of what size pieces are. Experts are (hidden size, intermediate size)."""

    experts: Sequence[tuple[int, int]]
    tokens: Sequence[int]
    in_situ_tokens: Sequence[int]
    copies: Sequence[int]
    blocks: Sequence[int]
    kv_tokens: Sequence[int]
    matrices: Sequence[tuple[int, int]]
    """(outputs, inputs)."""
    batch: int
    """Rows of a large matrix product."""
    scratch_bytes: int = 1 << 30


FULL = Sizes(
    experts=((128, 64), (512, 256), (1024, 512), (2048, 1024)),
    tokens=(1, 2, 4, 8, 16, 32, 64, 128),
    in_situ_tokens=(1, 4, 16, 64),
    copies=(64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB),
    blocks=(64 * KIB, 256 * KIB, MIB, 4 * MIB),
    kv_tokens=(64, 256, 1024, 4096),
    matrices=((128, 128), (1024, 1024), (2048, 2048), (4096, 2048)),
    batch=512,
)
QUICK = Sizes(
    experts=((128, 64), (512, 256), (1024, 512), (2048, 1024)),
    tokens=(1, 2, 4, 8, 16, 64),
    in_situ_tokens=(1, 8),
    copies=(64 * KIB, MIB, 4 * MIB, 16 * MIB),
    blocks=(64 * KIB, 256 * KIB, MIB),
    kv_tokens=(64, 1024),
    matrices=((128, 128), (1024, 1024), (2048, 2048)),
    batch=256,
)
DTYPES = {"cpu": ("float32", "bfloat16", "int8"), "cuda": ("bfloat16", "float32")}
"""What is measured if nobody says: the first is what a machine's file is about."""


class Setting(NamedTuple):
    """On what it is measured.

    ``threads`` are those of the device where that is a CPU, ``cores`` those that there are;
    ``cpu_threads`` those of in-situ experts.
    """

    device: Device
    sizes: Sizes
    dtypes: Sequence[str]
    cores: int
    cpu_threads: int
    store: FileStore | None


@dataclass(frozen=True, slots=True)
class Pools:
    """Weights in the device's memory, in host memory, and in host memory that is not pinned (CUDA)."""

    device: WeightPool
    host: WeightPool
    pageable: WeightPool | None


def fill_pools(device: Device, sizes: Sizes, cache_bytes: int, free_bytes: int) -> Pools:
    """Return the memory that probes walk through."""
    num_bytes = pool_bytes(cache_bytes, free_bytes, _largest_bytes(sizes))
    pageable = None
    if device.kind == "cuda":
        pageable = WeightPool(pages(3 * sizes.copies[-1]))
    return Pools(
        WeightPool(device.buffer(num_bytes)), WeightPool(device.host_buffer(num_bytes)), pageable
    )


def _largest_bytes(sizes: Sizes) -> int:
    """Return the largest window that a probe wants at one time."""
    blocks = [blocks_of(size, DEPTHS[-1]) * size for size in sizes.blocks]
    return max(2 * sizes.copies[-1], *blocks, RECORD_BYTES)


def plan(setting: Setting, pools: Pools, stack: ExitStack) -> list[Probe | Contention]:
    """Return all pieces of work that are measured; ``stack`` closes their threads.

    A dtype that the device does not compute is left out.
    """

    def kept(probe: Any) -> Any:
        if hasattr(probe, "close"):
            stack.callback(probe.close)
        return probe

    kernels = _kernels(setting, pools)
    found: list[Any] = [
        *_experts(setting, pools, kernels),
        *_dense(setting, pools),
        *_copies(setting, pools),
        *_in_situ(setting, pools, kernels),
        *_storage(setting, pools),
    ]
    found = [kept(probe) for probe in found]
    return found + _contention(setting, pools, kernels, kept)


_ByDtype = dict[str, list[Kernels]]


def _kernels(setting: Setting, pools: Pools) -> _ByDtype:
    """Return kernels by dtype, one a size, of those dtypes that the device computes."""
    found: _ByDtype = {}
    activation = "bfloat16" if setting.device.kind == "cuda" else "float32"
    for dtype in setting.dtypes:
        active = activation if dtype == "int8" else None
        forms = [
            ExpertFormat(*size, dtype, activation_dtype=active) for size in setting.sizes.experts
        ]
        kernels = [Kernels(form) for form in forms]
        if is_supported(setting.device, kernels[0], pools.device):
            found[dtype] = kernels
    return found


def _experts(setting: Setting, pools: Pools, kernels: _ByDtype) -> list[Probe]:
    return [
        KernelProbe(setting.device, one, pools.device, count)
        for own in kernels.values()
        for one in own
        for count in setting.sizes.tokens
    ]


def _dense(setting: Setting, pools: Pools) -> list[Probe]:
    """Return what a layer has beside its experts, in the dtypes that activations have."""
    device, sizes = setting.device, setting.sizes
    floats = dict.fromkeys(_activation(setting, dtype) for dtype in setting.dtypes)
    found: list[Probe] = []
    for dtype in floats:
        for outputs, inputs in sizes.matrices:
            found.append(MatmulProbe(device, pools.device, dtype, 1, outputs, inputs))
        outputs, inputs = sizes.matrices[-1]
        found.append(MatmulProbe(device, pools.device, dtype, sizes.batch, outputs, inputs))
        for count in sizes.kv_tokens:
            found.append(AttentionProbe(device, pools.device, dtype, count))
    modes = ("stream", "issue", "graph") if device.kind == "cuda" else ("stream", "issue")
    return found + [LaunchProbe(device, mode) for mode in modes]


def _activation(setting: Setting, dtype: str) -> str:
    if dtype != "int8":
        return dtype
    return "bfloat16" if setting.device.kind == "cuda" else "float32"


def _copies(setting: Setting, pools: Pools) -> list[Any]:
    device, sizes = setting.device, setting.sizes
    ends = pools.host, pools.device
    found: list[Any] = [IssueProbe(device, *ends, sizes.copies[0])]
    for num_bytes in sizes.copies:
        queued = 4 if num_bytes <= 16 * MIB else 2
        found.append(copy_probe(device, *ends, num_bytes))
        found.append(copy_probe(device, *ends, num_bytes, queued=queued))
        if pools.pageable is not None:
            found.append(copy_probe(device, pools.pageable, pools.device, num_bytes, pinned=False))
            found.append(ReturnProbe(*ends, num_bytes))
    if device.kind == "cuda":
        found.append(DuplexProbe(device, *ends, sizes.copies[-1]))
    return found


def _in_situ(setting: Setting, pools: Pools, kernels: _ByDtype) -> list[Any]:
    """Return experts on the host; their dtypes are those that the CPU computes too."""
    found: list[Any] = []
    for own in kernels.values():
        found += [
            InSituProbe(setting.device, one, pools.host, count, threads)
            for one in own
            for count in setting.sizes.in_situ_tokens
            for threads in _team_sizes(setting)
        ]
    smallest = next(iter(kernels.values()))[0]
    return [*found, HandoverProbe(setting.device, smallest, pools.host)]


def _team_sizes(setting: Setting) -> list[int]:
    """Return 1, 2, 4 ... up to the cores, with the threads in use."""
    powers = [1 << n for n in range(setting.cores.bit_length())]
    sizes = [*powers, setting.cores, setting.cpu_threads]
    return sorted({size for size in sizes if size <= setting.cores})


def _storage(setting: Setting, pools: Pools) -> list[Any]:
    store, sizes = setting.store, setting.sizes
    if store is None:
        return []
    found: list[Any] = [
        BlockProbe(store, pools.host, block, depth, seed=depth)
        for block in sizes.blocks
        for depth in _depths(setting)
    ]
    reads = [(2 * MIB, 4), (8 * MIB, 4), (8 * MIB, 1), (16 * MIB, 4)]
    found += [
        read_probe(store, setting.device, pools.device, num_bytes, sizes.blocks[-2], depth)
        for num_bytes, depth in reads
    ]
    return found


def _depths(setting: Setting) -> tuple[int, ...]:
    return DEPTHS if setting.cores > 2 else DEPTHS[:-1]


def _contention(
    setting: Setting, pools: Pools, kernels: _ByDtype, kept: Callable[[Any], Any]
) -> list[Contention]:
    """Return the work of large experts beside other work: what the machine's memory makes of it."""
    device, form = setting.device, next(iter(kernels.values()))[-1]
    size = form.format.slot_bytes
    kernel = KernelProbe(device, form, pools.device, 1)
    copies = kept(copy_probe(device, pools.host, pools.device, size))
    experts = kept(InSituProbe(device, form, pools.host, 1, setting.cpu_threads))
    found: list[Contention] = [
        Beside(kernel, copies, ("kernels", "copies"), 6),
        Beside(kernel, experts, ("kernels", "cpu_experts"), 6),
        Beside(experts, copies, ("cpu_experts", "copies"), 6),
    ]
    if setting.store is not None:
        ends = setting.store, device, pools.device
        reads = kept(read_probe(*ends, min(size, 16 * MIB), MIB, 4))
        found.append(Beside(kernel, reads, ("kernels", "reads"), 4))
    return found
