"""What ``greenroom predict`` shows on stdout: one answer in full, or a table of many."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from hwmodels.units import GB
from sim.screen import screen
from sim.trust import WEAK

Answer = Mapping[str, Any]
_MOST_GAINS = 3
_LEAST_GAIN = 0.005
_MOST_WEAK = 8


def new_console() -> Console:
    """Return a console that keeps tables whole when stdout is a file or a pipe."""
    return screen()


def print_answer(found: Answer) -> None:
    """Print one answer: speeds, where the time goes, memory, what it rests on, what would help."""
    console = new_console()
    for line in (title(found), *_loud(found)):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(_speeds(found))
    for stage in ("decode", "prefill"):
        console.print(_parts(found, stage))
    for line in (*_facts(found), *_memory(found), *_assumed(found), *_advice(found)):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def title(found: Answer) -> str:
    """Say in one line what was asked."""
    asked, work = found["asked"], found["asked"]["work"]
    names = asked["names"]
    chunk = work.get("prefill_chunk")
    steps = "" if chunk is None or chunk >= work["prompt_tokens"] else f" in steps of {chunk}"
    return (
        f"{names['model']} (experts {asked['expert_bits']:.4g} bits a weight, the rest "
        f"{asked['dense_bits']:.4g}) on {names['machine']}, engine {names['engine']}: {asked['placement']}. "
        f"{work['batch_size']} sequence{'s' * (work['batch_size'] > 1)}, {work['context_tokens']} tokens of "
        f"context, prompt of {work['prompt_tokens']}{steps}."
    )


def _loud(found: Answer) -> list[str]:
    lines = [f"DOES NOT FIT: {problem}" for problem in found["problems"]]
    return [*lines, "The speeds below are those it would have if it did."] if lines else []


def _speeds(found: Answer) -> Table:
    table = Table()
    for name in ("", "predicted", "80% interval"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for stage, time in (("decode", "tpot_ms"), ("prefill", "ttft_ms")):
        row = found[stage]
        label = {"tpot_ms": "time a token (TPOT)", "ttft_ms": "time to first token (TTFT)"}[time]
        speeds = row["tokens_per_s"], row["tokens_per_s_interval"]
        table.add_row(stage, f"{number(speeds[0])} tokens/s", _interval(speeds[1], "tokens/s"))
        table.add_row(label, f"{number(row[time])} ms", _interval(row[f"{time}_interval"], "ms"))
    return table


def _interval(ends: Sequence[float] | None, unit: str) -> str:
    return "-" if ends is None else f"{number(ends[0])} to {number(ends[1])} {unit}"


def number(value: float) -> str:
    """Return a number with three digits that mean something, without exponent."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def _parts(found: Answer, stage: str) -> Table:
    """Return the critical path of a decode step, or of a prompt."""
    what = {"decode": "critical path of a decode step", "prefill": "critical path of a prompt"}
    table = Table()
    table.add_column(what[stage], no_wrap=True, min_width=30)
    for name in ("ms", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found[f"{stage}_parts"]:
        table.add_row(row["part"], f"{row['ms']:.2f}", f"{100 * row['share']:.1f}%")
    return table


def _facts(found: Answer) -> list[str]:
    limit, context = found["bottleneck"], found["context"]
    moved = ", ".join(
        f"{where} {num_bytes / GB:.3f} GB" for where, num_bytes in found["bytes_per_token"].items()
    )
    fits = "" if context["fits"] else "; that does not fit"
    return [
        f"Bottleneck: {limit['part']}: {limit['words']}.",
        f"Bytes a decoded token: {moved}.",
        f"Context: {context['ms_per_1000_tokens']:.3f} ms more a step for 1000 more tokens; TPOT at "
        f"{context['tokens']}: {number(context['tpot_ms'])} ms{fits}.",
    ]


def _memory(found: Answer) -> list[str]:
    lines = []
    for name, room in found["memory"].items():
        uses = ", ".join(f"{use} {size / GB:.2f}" for use, size in room["uses"].items())
        who = "GPU memory" if name == "gpu" else "Host memory"
        fits = "fits" if room["fits"] else "DOES NOT FIT"
        lines.append(
            f"{who}: {room['needed'] / GB:.2f} of {room['have'] / GB:.2f} GB ({uses}): {fits}."
        )
    return lines


def _assumed(found: Answer) -> list[str]:
    asked = found["asked"]
    lines = [
        f"Expert use: {asked['names']['usage']} ({asked['usage_source']})." + _if_used_alike(found),
        *(f"Interval, {found[stage]['interval_from']}." for stage in ("decode", "prefill")),
        *(f"Note: {note}." for note in found["notes"]),
    ]
    weak = found["weak_figures"]
    if weak:
        lines.append("Figures of the machine that this rests on and nobody measured on it:")
    for row in weak[:_MOST_WEAK]:
        lines.append(f"  {row['figure']} ({WEAK[row['trust']]}): {row['source']}")
    if len(weak) > _MOST_WEAK:
        lines.append(f"  and {len(weak) - _MOST_WEAK} more (--json has all)")
    return lines


def _if_used_alike(found: Answer) -> str:
    """Say how far the speed hangs on how experts are used."""
    if found["hangs_on_use"] and found["asked"]["names"]["usage"] == "uniform":
        return " Experts are taken to be used alike, the worst for a cache."
    speed, alike = found["decode"]["tokens_per_s"], found["used_alike_tokens_per_s"]
    if abs(alike / speed - 1) < _LEAST_GAIN:
        return " The decode speed does not hang on it."
    return f" If all experts were used alike: {number(alike)} tokens/s."


def _advice(found: Answer) -> list[str]:
    lines, full = [], found["fill"]
    gains = [row for row in found["gains"] if row["gain"] > _LEAST_GAIN][:_MOST_GAINS]
    if full is not None:
        lines.append(
            f"{full['settings']} would fill the GPU memory there is: {number(full['tokens_per_s'])} tokens/s."
        )
    if not gains:
        return [*lines, "What would help most: nothing of what was tried brings half a per cent."]
    told = "; ".join(
        f"{row['change']} {100 * row['gain']:+.0f}% ({number(row['tokens_per_s'])} tokens/s)"
        for row in gains
    )
    return [*lines, f"What would help most: {told}."]


# -- many -------------------------------------------------------------------------------------------


def print_answers(answers: Sequence[Answer]) -> None:
    """Print a line an answer, with the overrides in which they differ."""
    console = new_console()
    differing = varying(answers)
    table = Table()
    for key in differing:
        table.add_column(key, no_wrap=True)
    for name in (
        "tokens/s",
        "80% interval",
        "TPOT ms",
        "prefill t/s",
        "TTFT ms",
        "GPU GB",
        "host GB",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fits")
    table.add_column("bottleneck", no_wrap=True)
    for found in answers:
        given = settings(found)
        table.add_row(*(_plain(given.get(key, "-")) for key in differing), *_cells(found))
    console.print(table)
    froms = dict.fromkeys(found["decode"]["interval_from"] for found in answers)
    for line in froms:
        console.print(f"Interval, {line}.", highlight=False, soft_wrap=True)


def _plain(value: str) -> str:
    """Return a setting's value, a whole number without the ``.0`` that Hydra gives 68.6e9."""
    return value.removesuffix(".0") if re.fullmatch(r"-?\d+\.0", value) else value


def settings(found: Answer) -> dict[str, str]:
    """Return the overrides of an answer by key."""
    pairs = (text.partition("=") for text in found["asked"]["overrides"])
    return {key: value for key, _, value in pairs}


def varying(answers: Sequence[Answer]) -> list[str]:
    """Return the overrides in which answers differ."""
    given = [settings(found) for found in answers]
    keys = dict.fromkeys(key for one in given for key in one)
    return [key for key in keys if len({one.get(key) for one in given}) > 1]


def _cells(found: Answer) -> list[str]:
    decode, prefill, memory = found["decode"], found["prefill"], found["memory"]
    around = decode["tokens_per_s_interval"]
    sizes = [
        f"{memory[name]['needed'] / GB:.1f}" if name in memory else "-" for name in ("gpu", "host")
    ]
    lacking = [name for name, room in memory.items() if not room["fits"]]
    return [
        number(decode["tokens_per_s"]),
        "-" if around is None else f"{number(around[0])} to {number(around[1])}",
        number(decode["tpot_ms"]),
        number(prefill["tokens_per_s"]),
        number(prefill["ttft_ms"]),
        *sizes,
        "no: " + ", ".join(lacking) if lacking else "yes",
        found["bottleneck"]["part"],
    ]
