"""The report of a validation: predicted against measured, from the file that it leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from sim.figures import source as figure_source
from sim.html.drawing import figures_of
from sim.html.elements import Html, code, element, folded, join, listing, paragraph, section
from sim.html.grid import grid, pairs
from sim.html.page import Asked, page
from sim.html.provenance import writer_table
from sim.html.words import listed, percent
from sim.results import flatten, read_json
from sim.types import ConfigError

VALIDATION = "validation.json"


def validation_page(path: Path, asked: Asked) -> str:
    """Return the report of a validation's folder.

    Raises ConfigError where its file is damaged, or a baseline is asked for.
    """
    if asked.baseline is not None:
        raise ConfigError(f"--baseline {asked.baseline}: a validation compares with measured runs")
    found = read_json(path / VALIDATION)
    try:
        return _page(path, found, asked)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path / VALIDATION}: is no validation, or one of another version"
        ) from error


def _page(path: Path, found: Mapping[str, Any], asked: Asked) -> str:
    machine, bars = found["machine"], found["verdict"]
    title = asked.title or f"Predicted against measured: {machine['cpu']}"
    head = element(
        "header",
        element("h1", title),
        paragraph(asked.question or _question(found), class_="question"),
        paragraph(element("strong", "Verdict: "), _sentence(found), class_="verdict"),
        element("div", listing(found["notes"]), class_="warning", role="note")
        if found["notes"]
        else "",
    )
    rows = [(b["name"], b["rule"], b["words"], "met" if b["is_met"] else "missed") for b in bars]
    demands = grid(("demand", "bar", "found", "result"), rows, "What was demanded", words=4)
    return page(
        title,
        [
            head,
            section("Demands", "demands", demands, _errors(found["errors"])),
            section("Figure", "figures", _figure(path)),
            section("Runs", "runs", _runs(found["runs"])),
            section("Limits", "limits", _limits(found["limits"])),
            section("Configuration", "configuration", _asked(found["asked"])),
            section(
                "Provenance", "provenance", _plain(machine, "The machine"), writer_table(asked.date)
            ),
        ],
    )


def _question(found: Mapping[str, Any]) -> str:
    asked, scored = found["asked"], _scored(found["runs"])
    policies = len({run["policy"] for run in scored})
    return (
        f"How far from measured are predicted times of {policies} policies in {len(scored)} runs "
        f"({listed(asked['tiers'])}; batch {listed([str(size) for size in asked['batch_sizes']])})?"
    )


def _sentence(found: Mapping[str, Any]) -> str:
    scored = _scored(found["runs"])
    errors = [abs(run["error"]) for run in scored]
    worst = max(scored, key=lambda run: abs(run["error"]))
    missed = [bar["name"] for bar in found["verdict"] if not bar["is_met"]]
    state = "All demands are met" if not missed else f"Missed: {listed(missed)}"
    return (
        f"{state}: predicted times of a decode step are {percent(median(errors))} off in the median of "
        f"{len(scored)} runs and {percent(abs(worst['error']))} at worst ({worst['policy']}, "
        f"{worst['tier']}, batch {worst['batch_size']}); Kendall's tau of the order of policies is "
        f"{found['ranking']['tau']:.2f}."
    )


def _scored(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [run for run in runs if not run["is_reference"]]


def _errors(blocks: Sequence[Mapping[str, Any]]) -> Html:
    rows = [
        (
            b["name"],
            str(b["num_runs"]),
            percent(b["median"]),
            percent(b["worst"]),
            b["worst_policy"],
        )
        for b in blocks
    ]
    heads = ("block", "runs", "median error", "worst", "policy of the worst")
    caption = "Absolute error of the time of a decode step, by block"
    return grid(heads, rows, caption, words={0, 4})


def _figure(path: Path) -> Html:
    source = figure_source.open_source(path)
    return figures_of(source, None, ["predicted_by_measured"])


def _runs(runs: Sequence[Mapping[str, Any]]) -> Html:
    rows = [
        (
            run["policy"],
            f"{run['tier']}, batch {run['batch_size']}, cache {percent(run['ratio'])}",
            "reference" if run["is_reference"] else "scored",
            f"{run['measured_ns'] / 1e6:.2f}",
            f"{run['predicted_ns'] / 1e6:.2f}",
            f"{100 * run['error']:+.1f}%",
            percent(run["noise"]),
        )
        for run in runs
    ]
    heads = ("policy", "setting", "kind", "measured ms", "predicted ms", "error", "noise")
    caption = "Time of a decode step; error: predicted / measured - 1; noise: standard error of the measured"
    return grid(heads, rows, caption, words=3, sortable=True)


def _limits(limits: Sequence[Mapping[str, Any]]) -> Html:
    rows = [
        (
            one["name"],
            "met" if one["is_met"] else "missed",
            one["note"],
            f"{one['measured_ns'] / 1e6:.2f}",
            f"{one['limit_ns'] / 1e6:.2f}",
            f"{one['ratio']:.2f}",
            f"{one['bar']:.2f}",
        )
        for one in limits
    ]
    heads = ("run", "result", "limit", "measured ms", "limit ms", "ratio", "bar")
    caption = "Runs against the limit that the machine's resources set"
    return grid(heads, rows, caption, words=3) if rows else Html("")


def _asked(asked: Mapping[str, Any]) -> Html:
    lines = [f"{key}: {value}" for key, value in flatten(asked).items()]
    return join([folded("What was asked for, and chosen", code("\n".join(lines)))])


def _plain(values: Mapping[str, Any], caption: str) -> Html:
    lines = [
        (key.replace("_", " ").replace(".", ": "), str(v)) for key, v in flatten(values).items()
    ]
    return pairs(lines, caption)
