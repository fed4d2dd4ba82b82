"""What each policy looks like in every figure: colour, marker and dashes. No plotting in here.

A family of policies shares a marker, and its members differ in colour and dashes; the first of a family is
solid. So grey print tells families apart by marker and members by dashes. The policies that are compared
most have the colours of Okabe and Ito (2008, "Color universal design"), which readers with colour-blindness
tell apart, each with a marker of its own.
"""

from __future__ import annotations

from typing import NamedTuple

BLUE, SKY, GREEN, ORANGE, VERMILION, PINK, BLACK, GREY = (
    "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#000000", "#999999",
)  # fmt: skip
INDIGO, WINE, FOREST, OLIVE, TEAL, MAROON, PURPLE, BROWN, SLATE = (
    "#332288", "#882255", "#117733", "#999933", "#44AA99", "#661100", "#7F3C8D", "#8C6D31", "#666666",
)  # fmt: skip
"""Darker ones, for what is compared less (after Tol's muted scheme)."""

Dash = str | tuple[float, tuple[float, ...]]
DASHES: tuple[Dash, ...] = (
    "-",
    "--",
    (0.0, (1.0, 1.2)),
    "-.",
    (0.0, (6.0, 1.0)),
    (0.0, (1.0, 4.0)),
)


class Look(NamedTuple):
    """How a policy is drawn; ``dash`` is a line style of matplotlib."""

    colour: str
    marker: str
    dash: Dash


_FAMILIES: tuple[tuple[str, dict[str, str]], ...] = (
    ("o", {
        "lru": BLUE, "lru_sized": ORANGE, "lru_adapmoe": GREEN, "lru_capped": SKY, "lru_group": PINK,
        "llru": WINE, "lru_union_former": INDIGO, "lru_union_oracle": BLACK,
    }),
    ("s", {
        "lru_global": SKY, "least_stale": ORANGE, "lru_global_next_gate": VERMILION, "freetoken": WINE,
    }),
    ("^", {
        "lfu": GREEN, "lfu_decay": TEAL, "lfu_decay_bypass": BLUE, "lfru": ORANGE,
        "lfru_bypass": PINK, "lfu_plain": VERMILION,
    }),
    ("P", {"fifo": BROWN, "s3fifo": PURPLE, "arc": BLUE, "slru": GREEN}),
    ("v", {"static": ORANGE, "hot_list": MAROON}),
    ("D", {"fiddler": VERMILION, "fiddler_max": BLUE, "daop": TEAL}),
    ("*", {
        "saem": PINK, "saem_annotated": WINE, "saem_fixed": BLUE, "saem_drift": GREEN,
        "saem_few_tokens": ORANGE, "saem_former": BLACK,
    }),
    ("p", {
        "stage_oracle": BLACK, "stage_cache": GREEN, "stage_memory": VERMILION, "prefetch_stage": INDIGO,
        "stage_cache_annotated": SKY, "stage_cache_fixed": ORANGE, "stage_cache_last": PINK,
        "stage_oracle_fixed": GREY,
    }),
    ("8", {"ablation_base": SLATE, "ablation_cpu": ORANGE, "ablation_repack": SKY}),
    ("h", {
        "hybrimoe": INDIGO, "mrs": TEAL, "hybrimoe_impact": VERMILION, "hybrimoe_units": GREEN,
        "dali": BLUE,
    }),
    ("X", {
        "ktransformers": OLIVE, "ktransformers_uniform": BLUE, "ktransformers_dynamic": VERMILION,
        "ktransformers_deferral": PINK, "ktransformers_front": GREEN, "ktransformers_random": GREY,
    }),
    ("+", {"llama_cpp": MAROON, "llama_cpp_n_cpu_moe": BLUE, "llama_cpp_ot": ORANGE}),
    ("d", {
        "prefetch_next_gate": PURPLE, "prefetch_learned": GREEN, "prefetch_affinity": ORANGE,
        "prefetch_perfect": BLACK, "prefetch_previous": SKY, "prefetch_hottest": GREY,
        "prefetch_next_gate2": BLUE, "prefetch_next_gate3": VERMILION, "prefetch_sparing": PINK,
        "prefetch_assumed": WINE, "prefetch_assumed_adapmoe": OLIVE, "prefetch_assumed_qwen3": TEAL,
    }),
    (">", {
        "moe_infinity": FOREST, "mixtral_offloading": PURPLE, "promoe": ORANGE, "finemoe": BLUE,
        "adapmoe": VERMILION, "moe_infinity_cpp": TEAL, "mixtral_offloading_spec": PINK,
        "belady_bypass": BLACK,
    }),
    ("<", {"belady": BLACK}),
    ("x", {"on_demand": GREY}),
    ("1", {
        "cache_prior": WINE, "max_rank": BLUE, "cumulative_sum": ORANGE, "cold_drop": GREEN,
        "buddymoe": VERMILION, "smoe": INDIGO, "hobbit": OLIVE, "hobbit_priority": SKY, "reuse": PINK,
    }),
)  # fmt: skip
LOOKS: dict[str, Look] = {
    name: Look(colour, marker, DASHES[place % 4])
    for marker, members in _FAMILIES
    for place, (name, colour) in enumerate(members.items())
}
MAIN = (
    "on_demand", "lru", "lru_global", "lfu", "static", "fiddler", "saem", "belady", "fifo", "hybrimoe",
    "ktransformers", "llama_cpp", "moe_infinity", "daop", "prefetch_next_gate",
)  # fmt: skip
"""Those that are compared most: all are told apart by marker, and by colour as far as eyes allow."""
_OWN_COLOURS = (PURPLE, TEAL, MAROON, OLIVE, FOREST)
_OWN_MARKERS = ("H", "2", "3", "4")


def look(policy: str) -> Look:
    """Return how a policy is drawn; one of a user's own has a look made of its name, always the same."""
    known = LOOKS.get(policy)
    if known is not None:
        return known
    number = sum(place * ord(letter) for place, letter in enumerate(policy, start=1))
    colour = _OWN_COLOURS[number % len(_OWN_COLOURS)]
    number //= len(_OWN_COLOURS)
    marker = _OWN_MARKERS[number % len(_OWN_MARKERS)]
    return Look(colour, marker, DASHES[number // len(_OWN_MARKERS) % 4])
