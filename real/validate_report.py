"""A validation's report, for a reader who knows nothing of it yet: Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from real.limits import LimitResult
from real.validate_predict import Compared
from real.validate_result import Played, Validation
from real.validate_score import (
    NOISES,
    Bar,
    Errors,
    Ranking,
    depends_on_arrivals,
    different_counts,
    errors,
    errors_by,
    ranking,
    resource_errors,
    verdict,
)

FIGURE = "validation"
_MOST_DIFFERENT = 12


def is_met(found: Validation) -> bool:
    """Tell whether every bar of the verdict is met."""
    return all(bar.is_met for bar in verdict(found.rows, found.parity))


def report(found: Validation) -> str:
    """Return the report; the figure is ``validation.png`` beside it."""
    parts = [
        "# Predicted against measured on this machine",
        *_verdict(verdict(found.rows, found.parity)),
        *_intent(found),
        *_machine(found),
        f"![Predicted against measured time of a decode step, and errors by policy]({FIGURE}.png)",
        *_summary(found.rows),
        *_resources(found.rows),
        *_limits(found.limits),
        *_runs(found),
        *_decisions(found),
        *_references(found),
        *_files(),
    ]
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int = 1) -> str:
    """Return a Markdown table whose columns are right-aligned from one on."""
    rule = ["---" if place < numbers_from else "--:" for place in range(len(head))]
    lines = [head, rule, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _signed(value: float) -> str:
    return f"{100 * value:+.1f} %"


def _ms(time_ns: float) -> str:
    return f"{time_ns / 1e6:.2f}"


# -- verdict and intent ------------------------------------------------------------------------------


def _verdict(bars: Sequence[Bar]) -> Iterator[str]:
    missed = [bar.name for bar in bars if not bar.is_met]
    yield "**Verdict: met.**" if not missed else f"**Verdict: missed** ({'; '.join(missed)})."
    rows = [(bar.name, bar.rule, bar.words, "met" if bar.is_met else "missed") for bar in bars]
    yield table(("demand", "bar", "found", ""), rows, 4)


def _intent(found: Validation) -> Iterator[str]:
    matrix, asked = found.matrix, found.asked
    yield "## What was done"
    yield (
        "The same policy objects ran twice on the same recorded routing: on this machine, with actual "
        "weights, copies and kernels (`real/`), and in the simulator (`sim/`). What the simulator knows "
        f"of the machine comes from *reference* runs ({', '.join(matrix.references)}) that took turns "
        "with all others in the same minutes: times of kernels and of Python, rate and delays of copies. "
        "No run that is scored lent a figure to its own prediction, but for the time that its decisions "
        "take, which is taken without anything beside them. A *block* is a tier and a batch size; in it "
        "all runs play a few steps in turn, in an order drawn anew each round, and all end at the same "
        "step."
    )
    yield (
        f"Layers: {asked['num_layers']} of {asked['num_experts']} experts, top-{asked['top_k']}, as the "
        f"trace has them, of the sizes of model `{asked['model']}` with random weights in {asked['dtype']}: "
        f"hidden size {asked['hidden_size']}, intermediate size {asked['intermediate_size']}, "
        f"{asked['expert_bytes']:,} bytes an expert. Engine file: `{asked['engine']}`. Requests begin "
        f"with {matrix.prompt_tokens} prompt tokens, which are run and not scored."
    )
    yield (
        "TPOT is the mean time of a decode step, error is predicted over measured less 1, noise the "
        "standard error of the measured time over the predicted one, turn by turn. Kendall's tau counts "
        f"pairs of policies of one block and ratio whose measured times differ by more than {NOISES:g} "
        "combined standard errors."
    )
    yield "\n".join(f"- {line}" for line in _said(found))


def _said(found: Validation) -> Iterator[str]:
    tiers = {
        "ram": "**ram**: experts wait in host memory and are copied to slots in the device's memory.",
        "storage": "**storage**: experts wait in a file and are read into slots past the page cache.",
        "link": "**link**: as ram, but copies are held back to "
        f"{found.matrix.link_bytes_per_s / 1e9:g} GB/s and {found.matrix.link_setup_ns / 1e3:g} us: this "
        "link is **emulated**.",
    }
    yield from (tiers[tier] for tier in found.matrix.tiers)
    if found.facts["device"]["kind"] == "cpu":
        yield (
            "The device that computes is the **CPU**: one thread computes, another one copies, further ones "
            "compute what policies place on the host. Slots are a bounded part of the same memory."
        )
    yield from found.notes


# -- the machine -------------------------------------------------------------------------------------


def _machine(found: Validation) -> Iterator[str]:
    yield "## The machine"
    facts, asked = found.facts, found.asked
    device = facts["device"]
    lines: list[tuple[str, Any]] = [
        (
            "CPU",
            f"{facts['cpu']}, {facts['cores']} cores, {asked['threads']} thread(s) for kernels",
        ),
        ("memory", f"{facts['memory_bytes'] / 2**30:.1f} GiB"),
        ("device", f"{device['name']}, {device['memory_bytes'] / 2**30:.1f} GiB"),
        ("system", facts["system"]),
    ]
    if "storage" in facts:
        storage = facts["storage"]
        how = "O_DIRECT" if storage["is_direct"] else "through the page cache"
        names = [storage[name] for name in ("kind", "device", "model") if storage[name]]
        lines.append(("storage", f"{', '.join(names)}; read {how}"))
    versions = [f"{name} {facts[name]}" for name in ("greenroom", "python", "torch")]
    versions += [f"CUDA {facts['cuda']}"] if "cuda" in facts else []
    lines.append(("versions", ", ".join(versions)))
    lines.append(("duration", f"{found.seconds / 60:.1f} minutes"))
    yield table(("", ""), [(name, str(value)) for name, value in lines], 2)


# -- summaries ---------------------------------------------------------------------------------------


def _summary(rows: Sequence[Compared]) -> Iterator[str]:
    yield "## Error of TPOT, and rank agreement"
    groups: list[tuple[Errors, Ranking]] = []
    for key in (lambda row: row.tier, lambda row: f"{row.tier}, batch {row.batch_size}"):
        for one in errors_by(rows, key):
            groups.append((one, ranking([row for row in rows if key(row) == one.name])))
    groups.append((errors("all", rows), ranking(rows)))
    head = ("", "runs", "median", "worst", "worst run", "tau", "pairs", "crossed", "within noise")
    yield table(head, [_summary_row(*group) for group in groups])
    yield "By policy, over all blocks:"
    found = errors_by(rows, lambda row: row.policy)
    cells = [
        (
            *(f"`{one.name}`", str(one.num_runs), _percent(one.median), _percent(one.worst)),
            f"{one.worst_run.tier}, batch {one.worst_run.batch_size}, {one.worst_run.ratio:g}",
        )
        for one in found
    ]
    yield table(("policy", "runs", "median", "worst", "worst run"), cells)


def _summary_row(one: Errors, ranks: Ranking) -> tuple[str, ...]:
    tau = "-" if ranks.tau is None else f"{ranks.tau:.3f}"
    return (
        *(one.name, str(one.num_runs), _percent(one.median), _percent(one.worst)),
        f"`{one.worst_run.policy}` {one.worst_run.ratio:g}",
        *(tau, str(ranks.num_pairs), str(ranks.num_crossed), str(ranks.num_close)),
    )


def _resources(rows: Sequence[Compared]) -> Iterator[str]:
    yield "## Where the time goes, and errors by resource"
    yield (
        "Every moment of a step is kernels (`gpu_busy`), waiting for copies (`link_stall`, `storage_stall`), "
        "waiting for experts that the host computes (`cpu_stall`), or the host's own time (`host_stall`: "
        "decisions and Python). Mean over the runs of a tier; errors are shares of the whole measured step."
    )
    cells = [
        (
            *(one.tier, f"`{one.resource}`", _ms(one.measured_ns), _ms(one.predicted_ns)),
            *(_percent(one.median), _percent(one.worst)),
        )
        for one in resource_errors(rows)
    ]
    head = ("tier", "resource", "measured ms", "predicted ms", "median error", "worst error")
    yield table(head, cells, 2)


def _limits(limits: Sequence[LimitResult]) -> Iterator[str]:
    if not limits:
        return
    yield "## Distance to the limit"
    yield (
        "Loading on demand from storage, against what storage and kernels allow: with overlap the longer "
        "of both, without it their sum. The peer is a plain transformers model with accelerate's disk "
        "offload, at equal memory, in the same minutes; there the bar is how much faster this backend "
        "must be."
    )
    cells = [
        (
            *(one.name, _ms(one.measured_ns), _ms(one.limit_ns), f"{one.ratio:.2f}"),
            *(f"{one.bar:.2f}", "met" if one.is_met else "missed", one.note),
        )
        for one in limits
    ]
    head = ("run", "measured ms", "limit or peer ms", "ratio", "bar", "", "of what")
    yield table(head, cells)


# -- run by run --------------------------------------------------------------------------------------


def _runs(found: Validation) -> Iterator[str]:
    yield "## Run by run"
    yield "Times are ms a decode step. References are predicted from their own figures, and not scored."
    head = ("tier", "batch", "ratio", "policy", "measured", "predicted", "error", "noise", "steps")
    rows = [_run_cells(row, "") for row in found.rows]
    rows += [_run_cells(row, " (reference)") for row in found.references]
    yield table((*head, "hits and bytes"), rows, 4)


def _run_cells(row: Compared, mark: str) -> tuple[str, ...]:
    counts = "same" if row.counts_equal else "differ"
    if depends_on_arrivals(row):
        counts += ", by arrival times"
    return (
        *(row.tier, str(row.batch_size), f"{row.ratio:g}", f"`{row.policy}`{mark}"),
        *(_ms(row.measured_ns), _ms(row.predicted_ns), _signed(row.error), _percent(row.noise)),
        *(str(row.num_steps), counts),
    )


def _decisions(found: Validation) -> Iterator[str]:
    yield "## Decisions"
    wrong = [one for one in found.parity if one.difference is not None]
    yield (
        f"Before anything was timed, {len(found.parity)} runs ({sum(one.num_plans for one in found.parity)} "
        "plans) were carried out by the executor as if copies took no time, over tiny weights, and compared "
        f"with the driver without time, plan by plan in all that a plan says: {len(wrong)} differ."
    )
    if wrong:
        cells = [
            (one.tier, str(one.batch_size), f"{one.ratio:g}", one.policy, str(one.difference))
            for one in wrong
        ]
        yield table(("tier", "batch", "ratio", "policy", "first difference"), cells, 5)
    timed = [row for row in (*found.rows, *found.references) if not row.counts_equal]
    if timed:
        yield (
            "In the timed runs these counts differ from the predicted ones; where decisions depend on when "
            "copies come, a copy that is a little sooner or later changes them:"
        )
        yield "\n".join(_differences(timed))


def _differences(rows: Sequence[Compared]) -> Iterator[str]:
    for row in rows[:_MOST_DIFFERENT]:
        where = f"{row.tier}, batch {row.batch_size}, {row.ratio:g}"
        yield f"- `{row.policy}` ({where}): {'; '.join(different_counts(row))}"
    if len(rows) > _MOST_DIFFERENT:
        yield f"- and {len(rows) - _MOST_DIFFERENT} more, in `results.csv`"


def _references(found: Validation) -> Iterator[str]:
    yield "## What the reference runs showed"
    head = ("block", "turns", "copies GB/s", "setup us", "wake us", "expert us", "expert on host us",
            "decision us", "Python us a layer")  # fmt: skip
    yield table(head, [_reference_cells(one) for one in found.played])
    yield (
        "Setup: from asking an idle tier for a copy until it begins. Wake: from its end until the computing "
        "thread knows. Experts: mean over the numbers of tokens that came."
    )


def _reference_cells(one: Played) -> tuple[str, ...]:
    seen = one.observed
    times = [seen.setup.value(), seen.wake.value()]
    for kernels in (seen.kernels, seen.cpu_kernels):
        count = sum(mean.count for mean in kernels.values())
        times.append(sum(mean.total for mean in kernels.values()) / count if count else 0.0)
    times += [seen.decide.value(), seen.python.value()]
    cells = [f"{time_ns / 1e3:.0f}" if time_ns else "-" for time_ns in times]
    return one.block.name, str(one.num_rounds), f"{seen.copy_bytes_per_s / 1e9:.2f}", *cells


def _files() -> Iterator[str]:
    yield "## Files"
    yield (
        "`results.csv` has a row a run with all counts and resources, `validation.json` all that stands "
        "here and what was asked. Made by `greenroom validate`; docs/validation.md tells how to read and "
        "repeat it."
    )
