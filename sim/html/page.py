"""The whole file: head with a strict policy, sections in order, style and script inline."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources

from sim.figures import source as figure_source
from sim.html.bottlenecks import changes, rooflines, where_time_goes
from sim.html.definitions import definitions_table
from sim.html.drawing import figures_of, names_of_figures
from sim.html.elements import (
    Html,
    code,
    element,
    folded,
    join,
    listing,
    paragraph,
    section,
)
from sim.html.provenance import provenance_table, warnings, writer_table
from sim.html.question import question_of, title_of
from sim.html.results import (
    BATCH_COLUMNS,
    LEDGER_COLUMNS,
    batches,
    bound_line,
    failed_table,
    league_tables,
    ledger,
    results,
    winners,
)
from sim.html.source import RUN, Source
from sim.html.verdict import verdict_of
from sim.labels import origin
from sim.report_table import wanted_columns
from sim.results import TABLE


@dataclass(frozen=True, slots=True)
class Asked:
    """What the reader of a report asked for; None leaves it to the results.

    Attributes
    ----------
    title, question
        In words.
    baseline
        The policy that others are compared with.
    date
        To be printed; None for none, so that the same results give the same file.
    """

    title: str | None = None
    question: str | None = None
    baseline: str | None = None
    date: str | None = None


def report_page(source: Source, asked: Asked) -> str:
    """Return the HTML of a report on a run or a sweep.

    Raises ConfigError for a baseline that did not run.
    """
    title = asked.title or title_of(source.rows)
    answer, sections = (
        _answer(source, asked, title),
        [one for one in _sections(source, asked) if one],
    )
    return page(title, [answer, contents(sections), *sections])


def page(title: str, parts: list[Html]) -> str:
    """Return a whole HTML file of these parts."""
    style = (resources.files("sim.html") / "page.css").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(SCRIPT)}; "
        "base-uri 'none'; form-action 'none'"
    )
    head = join(
        [
            element("meta", charset="utf-8"),
            element("meta", http_equiv="Content-Security-Policy", content=policy),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", name="color-scheme", content="light dark"),
            element("meta", name="generator", content="greenroom"),
            element("title", title),
            element("style", Html(style)),
        ]
    )
    body = [element("main", "\n", join(parts), "\n"), element("script", Html(SCRIPT))]
    whole = element("html", element("head", "\n", head, "\n"), element("body", *body), lang="en")
    return f"<!DOCTYPE html>\n{whole}\n"


def contents(sections: Sequence[Html]) -> Html:
    """Return links to sections."""
    found = [_SECTION.match(one) for one in sections]
    links = [element("a", Html(one["title"]), href=f"#{one['anchor']}") for one in found if one]
    return element("nav", join(links), aria_label="Contents")


_SECTION = re.compile(r'<section id="(?P<anchor>[a-z]+)"[^>]*><h2[^>]*>(?P<title>[^<]*)</h2>')


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _answer(source: Source, asked: Asked, title: str) -> Html:
    """Return title, question, verdict and warnings."""
    found = verdict_of(source.rows, asked.baseline)
    failed = len(source.failed)
    notes = list(found.notes)
    total = len(source.rows) + failed + source.num_waiting
    if failed:
        notes.append(f"{failed} of {total} points of the sweep failed.")
    warned = warnings(source.rows)
    if source.num_waiting:
        told = f"{source.num_waiting} of {total} points have not been run yet"
        warned.insert(0, f"The sweep is not finished: {told}; `greenroom sweep --resume` goes on.")
    return element(
        "header",
        element("h1", title),
        paragraph(asked.question or question_of(source.rows), class_="question"),
        paragraph(element("strong", "Verdict: "), found.sentence, class_="verdict"),
        listing(notes),
        element("div", listing(warned), class_="warning", role="note") if warned else "",
        paragraph(f"{origin(source.rows)}.", class_="note"),
    )


def _sections(source: Source, asked: Asked) -> Iterator[Html]:
    rows, baseline = source.rows, asked.baseline
    where = TABLE if source.path.is_dir() else source.path.name
    yield section("Failed points", "failed", failed_table(source.failed))
    yield section("Figures", "figures", _figures(source, baseline))
    yield section("Results", "results", winners(rows), results(rows, where))
    yield section("League", "league", league_tables(rows, baseline))
    times = where_time_goes(rows)
    told = paragraph(bound_line(rows)) if len(rows) > 1 and times else ""
    yield section("Bottlenecks", "bottlenecks", told, times, rooflines(rows), changes(rows))
    given_up, shared = ledger(rows), batches(rows)
    yield section("Changed answers", "ledger", given_up)
    yield section("Batches", "batches", shared)
    columns = ["cache", *wanted_columns(rows)]
    columns += LEDGER_COLUMNS if given_up else ()
    columns += BATCH_COLUMNS if shared else ()
    yield section(
        "Definitions", "definitions", folded("What the columns mean", definitions_table(columns))
    )
    yield section("Configuration", "configuration", *_configuration(source))
    yield section("Provenance", "provenance", provenance_table(source), writer_table(asked.date))


def _figures(source: Source, baseline: str | None) -> Html:
    is_run = source.kind == RUN
    kind = figure_source.RUN if is_run else figure_source.SWEEP
    drawable = figure_source.Source(kind, source.rows, source.folder)
    return figures_of(drawable, baseline, names_of_figures(is_run))


def _configuration(source: Source) -> Iterator[Html]:
    if source.command is not None:
        yield paragraph("To make these results again:")
        yield code(source.command)
    yield from (folded(title, code(text)) for title, text in source.texts)
    for number, row in enumerate(source.rows[:1] if source.command is None else []):
        given = [f"{key}={value}" for key, value in row.get("overrides", {}).items()]
        if given:
            yield folded(f"Overrides of row {number}", code("\n".join(given)))


SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[column].textContent;
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [parseFloat(key(a)), parseFloat(key(b))];
        const order = isNaN(x) || isNaN(y) ? isNaN(x) - isNaN(y) || key(b).localeCompare(key(a)) : y - x;
        return down || isNaN(x) !== isNaN(y) ? order : -order;
      });
      table.tBodies[0].append(...rows);
      table.classList.add("sorted");
    });
  });
}
"""
"""Sorts a table by the column whose head is pressed; rows without a number come last."""
