"""Figures inside the page: as SVG or PNG, whichever is smaller."""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING

from sim.html.elements import Html, element

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PIXELS_PER_INCH = 150
_BROAD_INCHES = 4.5
"""Wider ones are scrolled on a narrow screen, not shrunk until nobody can read them."""
_SMALL_BYTES = 100_000
_UNUSED = re.compile(rb"<\?xml.*?\?>\s*|<!DOCTYPE.*?>\s*|<metadata>.*?</metadata>\s*", re.DOTALL)


def figure(drawn: Figure, name: str, title: str, see: str) -> Html:
    """Return a figure with a caption that says what it shows and what to see in it."""
    inches = drawn.get_size_inches()
    width, height = (round(_PIXELS_PER_INCH * one) for one in inches)
    alt = f"{title}. {see} The numbers are in the tables."
    image = element("img", src=data_uri(drawn), width=width, height=height, alt=alt)
    caption = element("figcaption", element("strong", f"{title}."), " ", see)
    broad = "broad" if inches[0] > _BROAD_INCHES else None
    frame = element("div", image, class_="frame", tabindex=0 if broad else None)
    return element("figure", frame, caption, id=f"figure-{name}", class_=broad)


def data_uri(drawn: Figure) -> str:
    """Return a figure as a data URI: as SVG if that is small, else of SVG and PNG the smaller."""
    from sim.plot_style import rendered

    kind, data = "svg+xml", _UNUSED.sub(b"", rendered(drawn, "svg"))
    if len(data) > _SMALL_BYTES:
        pixels = rendered(drawn, "png")
        kind, data = ("png", pixels) if len(pixels) < len(data) else (kind, data)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
