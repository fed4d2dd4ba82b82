"""What ``greenroom generate`` shows on stdout: the texts, then one table of what the run did."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from sim.screen import screen

if TYPE_CHECKING:
    from traces.record_rows import Request
    from traces.record_subject import Subject

_MOST_IDS = 32


def print_texts(subject: Subject, requests: Sequence[Request]) -> None:
    """Print what the model wrote for each request; token ids where it has no tokenizer."""
    piece = subject.annotation.piece
    for request in requests:
        new = request.tokens[request.num_prompt_tokens :]
        print(f"--- request {request.request_id} ---")
        if piece is None:
            more = f" ... {len(new) - _MOST_IDS} more" if len(new) > _MOST_IDS else ""
            print(" ".join(map(str, new[:_MOST_IDS])) + more)
        else:
            print("".join(map(piece, new)).strip("\n"))


def print_result(
    summary: dict[str, Any], notes: Sequence[str], folder: Path, record: Path | None
) -> None:
    """Print a run's figures, what must be told of them, and where the files are, the folder last."""
    console = screen()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in _rows(summary):
        table.add_row(name, value)
    console.print(table)
    for note in notes:
        console.print(f"Note: {note}", highlight=False, soft_wrap=True)
    if record is not None:
        console.print(f"Trace: {record}", highlight=False, soft_wrap=True)
    console.print(f"Results: {folder}", highlight=False, soft_wrap=True)


def _rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of the table."""
    lossy = " (lossy)" if summary["lossy"] else ""
    where = f"{summary['device']}, experts in {summary['tier']}"
    rows = [
        ("policy", f"{summary['policy']}{lossy}, {summary['cache_ratio']:.1%} of the experts cached"),
        ("model", f"{summary['model']} on {where}"),
        ("tokens", f"{summary['output_tokens']} in {summary['requests']} requests, "
         f"{_number(summary['tokens_per_s'])} tokens/s"),
        ("TPOT", f"{_milliseconds(summary['tpot_ns_mean'])} mean, "
         f"{_milliseconds(summary['tpot_ns_p95'])} p95; TTFT {_milliseconds(summary['ttft_ns_mean'])}"),
        ("hits", f"{_share(summary['hit_rate'])}, {_share(summary['late_hit_rate'])} late; misses: "
         f"{summary['loads']} loaded, {summary['bypasses']} bypassed, {summary['on_cpu']} on the CPU"),
        ("copied", f"{_bytes(summary['h2d_bytes'])}, {_bytes(summary['prefetch_bytes'])} of it ahead of "
         "its need"),
    ]  # fmt: skip
    return [*rows, *_memory(summary["memory"]), *_quality(summary)]


def _memory(memory: dict[str, Any]) -> list[tuple[str, str]]:
    kind = "budget" if memory["is_budget_set"] else "budget (by the cache's size)"
    parts = f"{_bytes(memory['dense_bytes'])} dense + {_bytes(memory['arena_bytes'])} expert slots"
    rows = [
        (
            kind,
            f"{_bytes(memory['budget_bytes'])}; all experts take {_bytes(memory['expert_bytes'])}",
        ),
        ("peak", f"{_bytes(memory['peak_device_bytes'])} of the device ({parts})"),
    ]
    if memory.get("peak_process_bytes") is not None:
        rows.append(
            (
                "process",
                f"{_bytes(memory['peak_process_bytes'])} at most, beyond itself without the model",
            )
        )
    return rows


def _quality(summary: dict[str, Any]) -> list[tuple[str, str]]:
    found = summary.get("quality")
    if found is None:
        return [("unmodified model", "not compared")]
    rows = [("unmodified model", f"{found['same_texts']} of {found['texts']} texts are the same")]
    if "token_agreement" in found:
        rows += [
            ("agreement", f"{_share(found['token_agreement'])} of {found['agreement_tokens']} greedy tokens "
             "along its texts"),
            ("perplexity", f"{_number(found['perplexity'])}, unmodified "
             f"{_number(found['unmodified_perplexity'])} ({found['perplexity_tokens']} tokens, "
             f"{found['perplexity_text']})"),
        ]  # fmt: skip
    return rows


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _milliseconds(value_ns: float | None) -> str:
    return "-" if value_ns is None else f"{value_ns / 1e6:.3g} ms"


def _bytes(value: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value} B"
