"""What a machine can do: its parts as figures, each with where it comes from.

A part's file gives rates as the vendor or a plain measurement has them, and beside them derates: the share
that kernels and copies reach. They are applied once, here, so that a part has rates that are achieved.
Three kinds of machine follow from which parts there are: a GPU with its own memory behind a link, a GPU
that shares the host's memory (no link), and a CPU alone (no GPU).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hwmodels.devices import CPU, GPU, Derates, Link, Storage
from hwmodels.errors import figure_error, missing_error, unknown_error
from hwmodels.fields import check_rules, is_figure, read_fields

__all__ = ["CPU", "DERATES", "GPU", "TRUST_CLASSES", "Link", "Machine", "Storage", "numeric_fields"]

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
    "graph_launch_ns",
    "attention_floor_ns",
    "step_overhead_ns",
    "workspace_bytes",
    "copy_setup_ns",
    "copy_gap_ns",
    "copy_issue_ns",
    "hop_ns",
    "expert_setup_ns",
    "handover_ns",
    "launch_issue_ns",
    "dispatch_ns",
    "predict_ns",
    "router_ns",
    "setup_ns",
)
_PARTS: dict[str, type] = {"gpu": GPU, "link": Link, "cpu": CPU, "storage": Storage}
DERATES: dict[str, dict[str, tuple[str, ...]]] = {
    "gpu": {"memory_derate": ("memory_bytes_per_s",), "matmul_derate": ("matmul_flops",)},
    "link": {"rate_derate": ("h2d_bytes_per_s", "d2h_bytes_per_s")},
    "cpu": {
        "memory_derate": ("memory_bytes_per_s",),
        "dram_derate": ("dram_bytes_per_s",),
        "matmul_derate": ("matmul_flops",),
    },
    "storage": {},
}
"""By part and derate, the rates of the file that are multiplied by it."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine; ``sources`` maps each figure (``gpu.launch_ns``) to ``"X: where from"``."""

    name: str
    cpu: CPU
    sources: Mapping[str, str]
    gpu: GPU | None = None
    link: Link | None = None
    storage: Storage | None = None

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], name: str = "machine") -> Machine:
        """Build a machine from plain values, as ``conf/machine/*.yaml`` compose them.

        ``name`` tells the file in messages. A part that the machine lacks is left out or null; every
        figure that is given must be finite, positive and sourced (in its part's ``sources``). Raises
        HardwareError for the first mistake.
        """
        title = _read_title(mapping, name)
        parts = {key: _read_part(key, mapping[key], name) for key in _PARTS if key in mapping}
        if parts.get("link") and not parts.get("gpu"):
            rule = "must be left out, or null, where there is no gpu"
            raise figure_error(name, "link", parts["link"].name, rule)
        gpu, cpu = parts.get("gpu"), parts["cpu"]
        if gpu and not parts.get("link") and gpu.memory_bytes != cpu.memory_bytes:
            rule = f"must be cpu.memory_bytes = {cpu.memory_bytes} without a link: it is the same memory"
            raise figure_error(name, "gpu.memory_bytes", gpu.memory_bytes, rule)
        sources = {
            f"{key}.{field}": text
            for key in _PARTS
            if mapping.get(key) is not None
            for field, text in _read_sources(key, mapping[key], name).items()
        }
        return cls(name=title, sources=sources, **parts)

    @property
    def kind(self) -> str:
        """Say which parts there are: ``discrete``, ``unified`` (no link) or ``cpu_only`` (no GPU)."""
        if self.gpu is None:
            return "cpu_only"
        return "unified" if self.link is None else "discrete"

    @property
    def device(self) -> GPU:
        """The figures of what computes: the GPU, or the CPU written as one."""
        if self.gpu is not None:
            return self.gpu
        cpu = self.cpu
        return GPU(
            name=cpu.name,
            memory_bytes=cpu.memory_bytes,
            memory_bytes_per_s=cpu.expert_bytes_per_s,
            matmul_flops=cpu.expert_flops,
            kernel_floor_ns=cpu.expert_setup_ns,
            launch_ns=0,
            graph_launch_ns=0,
            attention_floor_ns=0,
            step_overhead_ns=0,
            workspace_bytes=0,
        )


def numeric_fields() -> list[str]:
    """Return the dotted names of all figures that a machine's files can give."""
    return [f"{key}.{field}" for key in _PARTS for field in _figures(key)]


def _figures(key: str) -> list[str]:
    """Return the names of a part's figures, derates included."""
    return [*(f.name for f in fields(_PARTS[key]) if is_figure(f)), *DERATES[key]]


def _read_title(mapping: Mapping[str, Any], name: str) -> str:
    """Return the machine's checked name; every key is known and those that must be are there."""
    if not isinstance(mapping, Mapping):
        raise figure_error(name, "(all)", mapping, "must be a mapping")
    for key, value in mapping.items():
        if key not in ("name", *_PARTS):
            raise unknown_error(name, key, value, ("name", *_PARTS))
    for key in ("name", "cpu"):
        if key not in mapping:
            raise missing_error(name, key)
    title = mapping["name"]
    if not isinstance(title, str) or not title:
        raise figure_error(name, "name", title, "must be a text that is not empty")
    return title


def _read_part(key: str, value: object, name: str) -> Any:
    """Return a part's checked dataclass; None where the machine may do without it and does."""
    if value is None and key != "cpu":
        return None
    if not isinstance(value, Mapping):
        raise figure_error(name, key, value, "must be a mapping")
    part, derates = _PARTS[key], DERATES[key]
    known = [*(f.name for f in fields(part)), *derates, "sources"]
    for field, given in value.items():
        if field not in known:
            raise unknown_error(name, f"{key}.{field}", given, (f"{key}.{k}" for k in known))
    figures = {k: v for k, v in value.items() if k != "sources" and k not in derates}
    read = read_fields(part, figures, name, f"{key}.", may_be_zero=_MAY_BE_ZERO)
    scales = {k: value[k] for k in derates if k in value}
    scale = Derates(**read_fields(Derates, scales, name, f"{key}."))
    check_rules(scale, name, f"{key}.")
    for derate, rates in derates.items():
        read |= {rate: max(1, round(read[rate] * getattr(scale, derate))) for rate in rates}
    built = part(**read)
    if isinstance(built, Link | CPU):
        check_rules(built, name, f"{key}.")
    return built


def _read_sources(key: str, part: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return a part's checked sources; every figure that is given has one.

    A source may stand for a figure that is not given, so that an override may take a figure away, or
    give one for which the file says what it would have to be.
    """
    where, known = f"{key}.sources", _figures(key)
    if "sources" not in part:
        raise missing_error(name, where)
    sources = part["sources"]
    if not isinstance(sources, Mapping):
        raise figure_error(name, where, sources, "must map each figure to its source")
    for field, text in sources.items():
        if field not in known:
            raise unknown_error(name, f"{where}.{field}", text, (f"{where}.{k}" for k in known))
        if not isinstance(text, str) or not _SOURCE.fullmatch(text):
            rule = f"must be 'LETTER: where from', LETTER one of {', '.join(TRUST_CLASSES)}"
            raise figure_error(name, f"{where}.{field}", text, rule)
    for field in known:
        if part.get(field) is not None and field not in sources:
            rule = f"needs an entry {field!r} in {where} that says where it comes from"
            raise figure_error(name, f"{key}.{field}", part[field], rule)
    return dict(sources)
