"""Searches that the tests of ``greenroom advise`` share."""

from __future__ import annotations

from functools import cache
from typing import Any

from sim.advise import Point, Wish, search, to_ask
from sim.cases import compose_case
from sim.predict_answer import Asked


@cache
def found(*overrides: str, engines: str = "llama_cpp,vllm_like", **wish: Any) -> tuple[Point, ...]:
    """Search with a few engines."""
    names = tuple(engines.split(","))
    asked: dict[str, Asked] = {}
    for pair in to_ask(names):
        one = Asked(overrides, compose_case([*overrides, *pair]))
        asked |= dict.fromkeys(pair, one)
    return tuple(search(asked, Wish(engines=names, **wish)))
