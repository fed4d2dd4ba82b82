"""What a machine can do: its parts as figures, each with where it comes from.

A figure that had to be scaled from a data sheet says so in its source. Three kinds of machine follow from
which parts there are: a GPU with its own memory behind a link, a GPU that shares the host's memory (no
link), and a CPU alone (no GPU).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hwmodels.devices import CPU, GPU, Link, Storage
from hwmodels.errors import figure_error, missing_error, unknown_error
from hwmodels.fields import check_rules, is_figure, read_fields

__all__ = ["CPU", "GPU", "TRUST_CLASSES", "Link", "Machine", "Storage", "numeric_fields"]

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
    "dispatch_ns",
    "setup_ns",
)
_PARTS: dict[str, type] = {"gpu": GPU, "link": Link, "cpu": CPU, "storage": Storage}


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
        """Build a machine from plain values as in ``conf/machine/*.yaml``.

        ``name`` tells the file in messages. A part that the machine lacks is left out or null; every
        figure that is given must be finite, positive and sourced. Raises HardwareError for the first
        mistake.
        """
        if not isinstance(mapping, Mapping):
            raise figure_error(name, "(all)", mapping, "must be a mapping")
        known = [f.name for f in fields(cls)]
        for key, value in mapping.items():
            if key not in known:
                raise unknown_error(name, key, value, known)
        for key in ("name", "cpu", "sources"):
            if key not in mapping:
                raise missing_error(name, key)
        title = mapping["name"]
        if not isinstance(title, str) or not title:
            raise figure_error(name, "name", title, "must be a text that is not empty")
        parts = {key: _read_part(key, mapping[key], name) for key in _PARTS if key in mapping}
        if parts.get("link") and not parts.get("gpu"):
            rule = "must be left out, or null, where there is no gpu"
            raise figure_error(name, "link", parts["link"].name, rule)
        gpu, cpu = parts.get("gpu"), parts["cpu"]
        if gpu and not parts.get("link") and gpu.memory_bytes != cpu.memory_bytes:
            rule = f"must be cpu.memory_bytes = {cpu.memory_bytes} without a link: it is the same memory"
            raise figure_error(name, "gpu.memory_bytes", gpu.memory_bytes, rule)
        return cls(name=title, sources=_read_sources(mapping, name), **parts)

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
    """Return the dotted names of all figures a machine can have."""
    return [f"{key}.{f.name}" for key, part in _PARTS.items() for f in fields(part) if is_figure(f)]


def _read_part(key: str, value: object, name: str) -> Any:
    """Return a part's checked dataclass; None where the machine may do without it and does."""
    if value is None and key != "cpu":
        return None
    part = _PARTS[key]
    built = part(**read_fields(part, value, name, f"{key}.", may_be_zero=_MAY_BE_ZERO))
    if isinstance(built, Link | CPU):
        check_rules(built, name, f"{key}.")
    return built


def _read_sources(mapping: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return the checked sources; every figure that is given has one.

    A source may stand for a figure that is not given, so that an override may take a part away, or
    give a figure for which the file says what it would have to be.
    """
    sources = mapping["sources"]
    if not isinstance(sources, Mapping):
        raise figure_error(name, "sources", sources, "must map each figure to its source")
    known = numeric_fields()
    for key, text in sources.items():
        if key not in known:
            raise unknown_error(name, f"sources[{key}]", text, known)
        if not isinstance(text, str) or not _SOURCE.fullmatch(text):
            rule = f"must be 'LETTER: where from', LETTER one of {', '.join(TRUST_CLASSES)}"
            raise figure_error(name, f"sources[{key}]", text, rule)
    for key in known:
        part, _, field = key.partition(".")
        given = (mapping.get(part) or {}).get(field)
        if given is not None and key not in sources:
            rule = f"needs an entry {key!r} in sources that says where it comes from"
            raise figure_error(name, key, given, rule)
    return dict(sources)
