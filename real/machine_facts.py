"""What this machine is, as far as it tells: what a measurement is worth nothing without."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from real.device import Device

_SIZES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class FileSystem(NamedTuple):
    """Where a folder lies: kind of file system, block device, its model; empty where not known."""

    kind: str
    device: str
    model: str


def machine_facts(device: Device) -> dict[str, Any]:
    """Return what is known of the machine, as plain values; sizes in bytes."""
    found: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": num_cores(),
        "cache_bytes": cache_bytes(),
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "greenroom": version("greenroom"),
        "device": {"kind": device.kind, "name": device.name, "memory_bytes": memory_bytes()},
    }
    if device.kind == "cuda":
        free, total = torch.cuda.mem_get_info(device.torch_device)
        own = torch.cuda.memory_reserved(device.torch_device)
        found["device"] |= {"memory_bytes": total, "context_bytes": max(0, total - free - own)}
        found["cuda"] = torch.version.cuda
    return found


def storage_facts(path: Path) -> dict[str, Any]:
    """Return what is known of the storage that a folder lies on."""
    system = file_system_of(path)
    usage = shutil.disk_usage(path)
    return {**system._asdict(), "capacity_bytes": usage.total}


def cpu_name() -> str:
    """Return what the processor calls itself."""
    for key in ("model name", "Hardware", "cpu model"):
        for name, value in _pairs(Path("/proc/cpuinfo")):
            if name == key and value:
                return value
    return platform.processor() or platform.machine()


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """Return the memory of the machine, or of the container that this process is in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _text(Path("/sys/fs/cgroup/memory.max"))
    return min(total, int(limit)) if limit.isdigit() else total


def free_bytes() -> int:
    """Return the memory that can be had without swapping."""
    for name, value in _pairs(Path("/proc/meminfo")):
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return memory_bytes() // 2


def cache_bytes() -> int:
    """Return the largest cache of a core; 32 MiB where the system does not say."""
    found = [_text(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    sizes = [int(text[:-1]) * _SIZES[text[-1]] for text in found if text[-1:] in _SIZES]
    return max(sizes, default=32 << 20)


def file_system_of(path: Path) -> FileSystem:
    """Return where a folder or file lies."""
    try:
        number = path.stat().st_dev
    except OSError:
        return FileSystem("", "", "")
    major_minor = f"{os.major(number)}:{os.minor(number)}"
    for line in _text(Path("/proc/self/mountinfo")).splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == major_minor:
            kind, source = after.split()[:2]
            return FileSystem(kind, source, _model(major_minor))
    return FileSystem("", "", _model(major_minor))


def _model(major_minor: str) -> str:
    """Return the model of a block device, or of the disk that a partition is of."""
    place = Path("/sys/dev/block") / major_minor
    for folder in (place, place / ".."):
        model = _text(folder / "device" / "model")
        if model:
            return model
    return ""


def _pairs(path: Path) -> Iterator[tuple[str, str]]:
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        yield name.strip(), value.strip()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError):
        return ""
