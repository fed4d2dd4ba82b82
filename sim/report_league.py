"""How a league table looks: on stdout, and as a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sim.labels import Row
from sim.league import CLASSES, Standing, title_of
from sim.results import write_csv

LEAGUE = "league.csv"


def print_league(
    console: Console, rows: Sequence[Row], baseline: str, standings: Sequence[Standing]
) -> None:
    """Print a table for each class that has members; ``rows`` are the runs, some maybe synthetic."""
    of = " (a SYNTHETIC trace)" if _any_synthetic(rows) else ""
    for kind in CLASSES:
        members = [standing for standing in standings if standing.kind == kind]
        if members:
            title = f"League{of}, speed over {baseline}'s: {title_of(kind)}."
            console.print(title, highlight=False)
            console.print(standings_table(members))


def _any_synthetic(rows: Sequence[Row]) -> bool:
    return any(row["provenance"]["trace_kind"] == "synthetic" for row in rows)


def standings_table(members: Sequence[Standing]) -> Table:
    """Return the standings of a class, a line a policy."""
    lossy = any(member.given_up is not None for member in members)
    table = Table()
    table.add_column("policy", no_wrap=True)
    names = ["mean", "worst", "best", "settings", "wins", "hit rate", "bytes moved"]
    for name in [*names, *(["mass given up"] if lossy else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for member in members:
        cells = [f"{ratio:.2f}x" for ratio in (member.mean, member.worst, member.best)]
        cells += [str(member.settings), str(member.wins), _share(member.hit_rate)]
        cells += ["-" if member.moved is None else f"{member.moved:.2f}x"]
        table.add_row(member.policy, *cells, *([_share(member.given_up)] if lossy else []))
    return table


def write_league(folder: Path, baseline: str, standings: Sequence[Standing]) -> Path:
    """Write the standings as CSV; return its path."""
    columns = ["baseline", *(field.name for field in fields(Standing))]
    rows = ({"baseline": baseline, **asdict(standing)} for standing in standings)
    write_csv(folder / LEAGUE, rows, columns)
    return folder / LEAGUE


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"
