"""How an inference engine schedules its work: choices of its authors, not figures of a machine.

The same machine runs a model twice as fast under an engine that copies beside its kernels as under one
that waits for each copy, so a prediction names its engine (``conf/engine/*.yaml``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hwmodels.fields import Rule, check_rules, read_fields

_MAY_BE_ZERO = (
    "dense_launches",
    "shared_launches",
    "dense_only_launches",
    "head_launches",
    "expert_launches",
    "expert_launches_packed",
    "pack_launches",
    "launch_issue_ratio",
    "cpu_setup_ratio",
    "handover_ratio",
    "latent_launches",
    "linear_launches",
)


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine. Kernel counts are launches of one MoE layer unless a field says otherwise.

    The counts of the ``overlapped`` preset are a model assumption: the kernels that such a layer has
    when none are fused. An engine that fuses launches 27 to 28 a layer for Qwen3-30B-A3B, those of its
    experts included (1341 a token: kekzl/imp PR 1377); unfused it is 10 + 8 x 5 = 50, 34 packed.
    """

    name: str
    copies_overlap: bool
    """Copies run beside kernels; else a layer's kernels wait until all its copies have come."""
    cpu_overlaps: bool
    """The CPU's experts run beside the GPU's; else they begin when the GPU has done its part."""
    order: str = field(metadata={"choices": ("ready", "routing")})
    """Experts compute as soon as they are there, or in the order of the plan, resident or not."""
    chunks: int
    """Copies an expert is split into: 1, or 3 (gate, up, down)."""
    chunk_compute: bool
    """A third of an expert's kernels may begin when its chunk is there."""
    kernels: str = field(metadata={"choices": ("per_expert", "grouped")})
    """Kernels of each expert, or one set of kernels for all experts that are ready together."""
    graph: bool
    """Kernels are launched from a CUDA graph, not from a stream."""
    cpu_experts_at_once: int
    """Teams of CPU threads, each with an expert of its own; 1: all threads on one after another."""
    numa_local: bool
    """Each NUMA node's threads compute the experts that lie there; else all run on the first node."""
    split: str = field(metadata={"choices": ("expert", "layer")})
    """How several GPUs share the experts: expert % count, or consecutive blocks of layers."""
    storage_access: str = field(metadata={"choices": ("direct", "page_cache")})
    """Storage is read past the operating system's cache (O_DIRECT), or through it (an LRU)."""
    storage_block_bytes: int
    storage_queue_depth: int
    exclusive_host: bool
    """An expert on the GPU is not kept in host memory as well, and goes back there when evicted."""
    dense_launches: int
    """Norm, QKV, rotary, KV write, attention, output, norm, router, top-k, combine."""
    shared_launches: int
    """Gate-up, activation, down and addition of shared experts."""
    dense_only_launches: int
    """A layer without experts: as above up to the second norm, then gate-up, activation, down."""
    head_launches: int
    """Once a step: embedding, last norm, LM head, sampling."""
    expert_launches: int
    """One expert, or one group of them: gather, gate-up, activation, down, scatter."""
    expert_launches_packed: int
    """The same when its tokens lie together already: gate-up, activation, down."""
    pack_launches: int
    """Permute and unpermute of a layer's tokens."""
    group_block_tokens: int
    """Grouped kernels compute the tokens of each expert in blocks of so many, the last one padded."""
    latent_launches: int
    """A layer with latent attention (MLA): what it has more than one with grouped heads."""
    linear_launches: int
    """A layer with linear attention: what it has more than one with grouped heads."""
    launch_issue_ratio: float
    """Host time of a launch from a stream over the machine's ``cpu.launch_issue_ns``.

    0: the host runs ahead of the GPU, so that only the GPU's own distance of kernels counts; 1: an engine
    in C++ whose host thread is the limit; more: eager PyTorch.
    """
    handover_ratio: float
    """What a layer's handover to the CPU takes over the machine's ``cpu.handover_ns``.

    That is measured as all time in which neither computes; an engine whose launches are counted by
    themselves (``launch_issue_ratio``) has the less of it left.
    """
    launch_waits: bool
    """A launch waits until the kernel before it has ended, so that each costs a kernel's floor as well."""
    upload_by_expert: bool
    """``Placement.upload_tokens`` counts the tokens of an expert in the mean, not those of the step."""
    attention_vector_ratio: float | None
    """Share of the GPU's ``vector_flops`` that attention of single new tokens reaches without matrix units.

    None: it uses them, so that its bytes bind. Grouped heads only.
    """
    matmul_ratio: float
    """Share of the GPU's matrix multiplication rate that the kernels for the model's format reach."""
    cpu_decode_ratio: float
    """Share of the CPU's decoding rates that the engine reaches: 1 with weights repacked for its kernels."""
    cpu_setups: str = field(metadata={"choices": ("expert", "layer")})
    """Each expert on the CPU is set up by itself, or a layer's are one piece of work."""
    cpu_setup_ratio: float
    """Such a setup over the machine's ``cpu.expert_setup_ns``."""
    cpu_matmul_ratio: float
    """Share of the CPU's matrix multiplication rate that the kernels reach."""
    tensor_parallel: bool
    """All GPUs share each matrix outside the experts; each layer then has two sums over the link."""
    releases_memory: bool
    """The thread that drives a layer gives the memory of dropped experts back to the operating system."""
    speculation: str = field(metadata={"choices": ("beside", "before")})
    """When reads that nobody waits for go: beside all other work, or only between a layer's attention
    and its routing; what has not come by then is thrown away (one memory, read from storage)."""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], name: str = "engine") -> Engine:
        """Build an engine from plain values as in ``conf/engine/*.yaml``.

        ``name`` tells the file in messages; raises HardwareError for the first mistake.
        """
        engine = cls(**read_fields(cls, mapping, name, may_be_zero=_MAY_BE_ZERO))
        check_rules(engine, name)
        return engine

    def rules(self) -> list[Rule]:
        """Return what fields demand of each other."""
        computes = self.chunk_compute
        return [
            ("chunks", self.chunks in (1, 3), "must be 1 or 3 (gate, up, down)"),
            ("chunks", not computes or self.chunks == 3, "must be 3 with chunk_compute"),
            (
                "attention_vector_ratio",
                (self.attention_vector_ratio or 0) <= 1,
                "must be <= 1",
            ),
            ("matmul_ratio", self.matmul_ratio <= 1, "must be <= 1"),
            ("cpu_decode_ratio", self.cpu_decode_ratio <= 1, "must be <= 1"),
            ("cpu_matmul_ratio", self.cpu_matmul_ratio <= 1, "must be <= 1"),
            (
                "speculation",
                self.speculation == "beside" or self.copies_overlap,
                "must be beside without copies_overlap, which waits for all reads",
            ),
            (
                "order",
                not computes or self.order == "ready",
                "must be 'ready' with chunk_compute: a chunk computes as soon as it is there",
            ),
            (
                "copies_overlap",
                not computes or self.copies_overlap,
                "must be true with chunk_compute: kernels run while later chunks are copied",
            ),
        ]
