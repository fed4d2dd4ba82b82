"""Tables: of cells, and of what rich prints on a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from rich.table import Table

from sim.html.elements import Html, element, join

Cells = Sequence[object]


def grid(
    heads: Sequence[str],
    rows: Iterable[Cells],
    caption: str,
    *,
    words: int | Collection[int] = 1,
    ends: Iterable[int] = (),
    sortable: bool = False,
) -> Html:
    """Return a table; its first column heads the rows.

    Parameters
    ----------
    heads
        Of the columns.
    rows
        Texts, which are escaped, or HTML.
    caption
        Says what it shows.
    words
        Which columns are words, or how many of the first ones; the others are numbers and stand to the
        right.
    ends
        Rows, by number, below which a line separates groups.
    sortable
        A reader may sort it by any column.
    """
    told = range(words) if isinstance(words, int) else words
    sides = [None if place in told else "n" for place in range(len(heads))]
    head = [
        element("th", name, scope="col", class_=side)
        for name, side in zip(heads, sides, strict=True)
    ]
    last = set(ends)
    body = [
        element("tr", *_cells(cells, sides), class_="end" if number in last else None)
        for number, cells in enumerate(rows)
    ]
    kinds = ["sortable"] if sortable and len(body) > 1 else []
    kinds += ["many"] if len(heads) > _MANY else []
    made = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *head)),
        element("tbody", "\n", join(body)),
        class_=" ".join(kinds) or None,
    )
    return element("div", made, class_="wide", tabindex=0, role="group", aria_label=caption)


def _cells(cells: Cells, sides: Sequence[str | None]) -> Iterator[Html]:
    for place, (cell, side) in enumerate(zip(cells, sides, strict=True)):
        if place:
            yield element("td", cell, class_=side)
        else:
            short = "short" if len(str(cell)) <= _SHORT else None
            yield element("th", cell, scope="row", class_=side or short)


_MANY = 10
_SHORT = 32
"""Names up to so many characters are not broken."""


def from_rich(table: Table, caption: str, *, sortable: bool = False) -> Html:
    """Return a table made for the terminal."""
    heads = [str(column.header) or "note" for column in table.columns]
    rows = list(zip(*(map(str, column.cells) for column in table.columns), strict=True))
    words = {place for place, column in enumerate(table.columns) if column.justify != "right"}
    ends = [number for number, row in enumerate(table.rows[:-1]) if row.end_section]
    return grid(heads, rows, caption, words=words, ends=ends, sortable=sortable)


def pairs(rows: Iterable[tuple[object, object]], caption: str) -> Html:
    """Return a table of names and what they are."""
    return grid(("what", "value"), rows, caption, words=2)
