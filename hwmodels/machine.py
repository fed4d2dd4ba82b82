"""What a machine can do: GPU, host link and CPU as figures, each with where it comes from.

Rates are what kernels and copies *achieve*, not what a data sheet promises; a figure that had to be
scaled from one says so in its source.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hwmodels.errors import figure_error, missing_error, unknown_error
from hwmodels.fields import is_numeric, read_fields

TRUST_CLASSES = {
    "S": "vendor specification, found in a source file",
    "M": "vendor specification, from memory",
    "X": "measured, source named",
    "F": "fitted to measured data",
    "I": "inferred; the inference is written out",
}
_SOURCE = re.compile(rf"[{''.join(TRUST_CLASSES)}]: \S.*", re.DOTALL)
_MAY_BE_ZERO = (
    "kernel_floor_ns",
    "launch_ns",
    "step_overhead_ns",
    "workspace_bytes",
    "copy_setup_ns",
    "expert_setup_ns",
    "handover_ns",
)


@dataclass(frozen=True, slots=True)
class GPU:
    """A GPU: rates are for large buffers and large matrices, times for one kernel."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: int
    """Rate at which weights stream from memory into matrix-vector kernels."""
    matmul_flops: int
    """Dense 16-bit matrix multiplication."""
    kernel_floor_ns: int
    """What the smallest matrix kernel takes."""
    launch_ns: int
    """Distance of kernels launched one after another (about half in a CUDA graph)."""
    step_overhead_ns: int
    """Fixed cost of a step beside its kernels: sampling, synchronisation, the engine's own work."""
    workspace_bytes: int
    """Memory neither weights nor KV can have: context, activations, library buffers."""


@dataclass(frozen=True, slots=True)
class Link:
    """The link between host and GPU memory, each direction for itself."""

    name: str
    h2d_bytes_per_s: int
    """Host to GPU, large pinned buffers."""
    d2h_bytes_per_s: int
    """GPU to host, large pinned buffers."""
    pageable_bytes_per_s: int
    """Either direction when host memory is not pinned."""
    copy_setup_ns: int
    """Time before the first byte of an isolated asynchronous copy."""
    pinned: bool
    """Whether expert weights lie in pinned host memory."""

    @property
    def load_bytes_per_s(self) -> int:
        """Rate of an expert's copy to the GPU, pinned or not."""
        if self.pinned:
            return self.h2d_bytes_per_s
        return min(self.h2d_bytes_per_s, self.pageable_bytes_per_s)


@dataclass(frozen=True, slots=True)
class CPU:
    """The host: its memory, and what its cores achieve in expert kernels."""

    name: str
    cores: int
    threads_used: int
    memory_bytes: int
    memory_bytes_per_s: int
    """Rate at which all cores together stream expert weights."""
    thread_bytes_per_s: int
    """The most one thread adds to that rate."""
    matmul_flops: int
    """Matrix multiplication by all cores."""
    expert_setup_ns: int
    """Cost of one expert before its first byte: dispatch, fork and join of threads."""
    handover_ns: int
    """Cost of a layer that uses the CPU: activations there and back, synchronisation."""

    @property
    def expert_bytes_per_s(self) -> int:
        """Weight streaming by the threads in use: min(threads * one thread, all)."""
        return min(self.memory_bytes_per_s, self.threads_used * self.thread_bytes_per_s)

    @property
    def expert_flops(self) -> int:
        """Matrix multiplication by the threads in use: their share of the cores, at most all."""
        return max(1, self.matmul_flops * min(self.threads_used, self.cores) // self.cores)


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine; ``sources`` maps each numeric field (``gpu.launch_ns``) to ``"X: where from"``."""

    name: str
    gpu: GPU
    link: Link
    cpu: CPU
    sources: Mapping[str, str]

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], name: str = "machine") -> Machine:
        """Build a machine from plain values as in ``conf/machine/*.yaml``.

        ``name`` tells the file in messages. Every field must be there, every number must be finite,
        positive and sourced; raises HardwareError for the first that is not.
        """
        if not isinstance(mapping, Mapping):
            raise figure_error(name, "(all)", mapping, "must be a mapping")
        known = [f.name for f in fields(cls)]
        for key, value in mapping.items():
            if key not in known:
                raise unknown_error(name, key, value, known)
        for key in known:
            if key not in mapping:
                raise missing_error(name, key)
        title = mapping["name"]
        if not isinstance(title, str) or not title:
            raise figure_error(name, "name", title, "must be a text that is not empty")
        gpu, link, cpu = (
            part(**read_fields(part, mapping[key], name, f"{key}.", may_be_zero=_MAY_BE_ZERO))
            for key, part in _PARTS.items()
        )
        sources = _read_sources(mapping, name)
        return cls(name=title, gpu=gpu, link=link, cpu=cpu, sources=sources)


_PARTS: dict[str, type] = {"gpu": GPU, "link": Link, "cpu": CPU}


def numeric_fields() -> list[str]:
    """Return the dotted names of all figures of a machine."""
    return [
        f"{key}.{f.name}" for key, part in _PARTS.items() for f in fields(part) if is_numeric(f)
    ]


def _read_sources(mapping: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return the checked sources; every figure has one, and nothing else has."""
    sources = mapping["sources"]
    if not isinstance(sources, Mapping):
        raise figure_error(name, "sources", sources, "must map each numeric field to its source")
    known = numeric_fields()
    for key, text in sources.items():
        if key not in known:
            raise unknown_error(name, f"sources[{key}]", text, known)
        if not isinstance(text, str) or not _SOURCE.fullmatch(text):
            rule = f"must be 'LETTER: where from', LETTER one of {', '.join(TRUST_CLASSES)}"
            raise figure_error(name, f"sources[{key}]", text, rule)
    for key in known:
        if key not in sources:
            part, _, field = key.partition(".")
            rule = f"needs an entry {key!r} in sources that says where it comes from"
            raise figure_error(name, key, mapping[part][field], rule)
    return dict(sources)
