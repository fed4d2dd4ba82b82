"""HTML from Python: a tree of elements whose texts are escaped unless they are HTML already."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

_VOID = {"img", "meta", "col", "br", "rect"}
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""What no HTML file may hold: control characters, and halves of names that are no text."""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(text: object) -> Html:
    """Return any text as HTML; what is HTML already stays as it is."""
    if isinstance(text, Html):
        return text
    return Html(html.escape(_CONTROL.sub("\ufffd", str(text)), quote=True))


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """Return an element with these children.

    Attributes are named as in HTML, with ``_`` for ``-`` and at the end of Python's words (``class_``);
    those that are None or False are left out, True is one without a value.
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Html(f"<{name}{written}>" if name != "rect" else f"<{name}{written}/>")
    return Html(f"<{name}{written}>{''.join(map(escape, children))}</{name}>")


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(value)}"'


def join(parts: Iterable[object], between: str = "\n") -> Html:
    """Return parts one after another; empty ones are left out."""
    return Html(between.join(text for part in parts if (text := escape(part))))


def paragraph(*children: object, class_: str | None = None) -> Html:
    """Return a paragraph."""
    return element("p", *children, class_=class_)


def listing(items: Iterable[object], class_: str | None = None) -> Html:
    """Return a list; nothing where there are no items."""
    made = [element("li", item) for item in items]
    return element("ul", *made, class_=class_) if made else Html("")


def section(title: str, anchor: str, *children: object) -> Html:
    """Return a section below its heading; nothing where there is nothing in it."""
    inner = join(children)
    if not inner:
        return Html("")
    head = element("h2", title, id=f"{anchor}-title")
    return element("section", head, "\n", inner, "\n", id=anchor, aria_labelledby=f"{anchor}-title")


def folded(title: str, *children: object, is_open: bool = False) -> Html:
    """Return what a reader may unfold."""
    return element("details", element("summary", title), *children, open=is_open)


def code(text: str) -> Html:
    """Return lines as they are, to be scrolled where they are too long."""
    return element("pre", element("code", text), tabindex=0)
