"""Hand-made summary rows for reports, and a reader of their HTML."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

_VOID = {"meta", "img", "rect", "br", "col"}


def row(
    policy: str = "lru", speed: float | None = 100.0, ratio: float = 0.25, **other: Any
) -> dict[str, Any]:
    """Return a summary row; ``link`` is the share of the time that goes to waiting for the link."""
    link = other.pop("link", 0.75)
    provenance = {
        "trace_kind": "recorded", "trace_source": "somewhere", "trace_model": "m", "trace_sha256": "ab",
        "priced_as": "m: 8 layers, 16 experts, top-2", "requests_made": "as recorded",
        "calibration_requests": [0, 24], "calibration_overlaps_workload": False, "inputs_sha256": "cd",
        "greenroom_version": "1", **other.pop("provenance", {}),
    }  # fmt: skip
    return {
        "policy": policy, "oracle": policy.startswith("belady"), "lossy": policy.startswith("lossy"),
        "assumed": False, "baseline": None, "trace": "tiny", "model": "m", "machine": "box",
        "machine_kind": "discrete", "engine": "overlapped", "batch_size": 1, "cache_ratio": ratio,
        "tokens_per_s": speed, "tpot_ns_p50": None if speed is None else 1e9 / speed,
        "ttft_ns_p50": 1_500_000, "hit_rate": 0.3456, "belady_hit_rate": 0.5, "belady_gap": 0.1544,
        "h2d_bytes": 12_345_000_000, "read_bytes": 0, "prefetch_useful_rate": None,
        "gpu_share": 1 - link, "link_stall_share": link, "storage_stall_share": 0.0,
        "dram_stall_share": 0.0, "host_stall_share": 0.0, "cpu_stall_share": 0.0,
        "bottleneck": None if speed is None else "link" if link > 0.5 else "gpu",
        "total_ns": 0 if speed is None else 1_000_000_000, "idle_ns": 0, "gpu_utilisation": 1 - link,
        "h2d_utilisation": link, "d2h_utilisation": 0.0, "cpu_utilisation": 0.0,
        "storage_utilisation": None, "dram_utilisation": 0.4, "requests": 7,
        "refused": 7 if speed is None else 0, "prompt_tokens": 70, "output_tokens": 100,
        "gpu_bytes": 2_000_000_000, "cache_bytes": 1_000_000_000, "notes": [],
        "overrides": {"policy": policy, "cache.ratio": str(ratio)}, "provenance": provenance, **other,
    }  # fmt: skip


class Page(HTMLParser):
    """A page that was read: its elements, and where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.mismatched: list[str] = []
        self.texts: list[tuple[tuple[str, ...], str]] = []
        self._open: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        self.mismatched += [name for name, _ in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append((tag, dict(attrs).get("class") or ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1][0] != tag:
            self.mismatched.append(f"/{tag}")
        else:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append(
            (tuple(f"{tag}.{kind}" if kind else tag for tag, kind in self._open), data)
        )

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of each element of a kind."""
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self, within: str = "body") -> str:
        """Return the text inside elements of a kind, as ``p.verdict``; style and script apart."""
        found = [
            t for path, t in self.texts if within in path and path[-1] not in ("style", "script")
        ]
        return re.sub(r"\s+", " ", "".join(found)).strip()
