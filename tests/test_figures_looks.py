"""Colours, marks and dashes: one look a policy, told apart by colour-blind readers and in grey print."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from matplotlib import rcParams

from sim.figures.stalls import PARTS
from sim.figures.table import FIGURES
from sim.plot_style import COLUMN, PAGE, styled
from sim.policy_looks import (
    BLACK,
    BLUE,
    DASHES,
    GREEN,
    LOOKS,
    MAIN,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    look,
)
from tests.colour_vision import VISIONS, distance

POLICIES = Path(__file__).parents[1] / "conf" / "policy"
COLOURED = [vision for vision in VISIONS if vision != "grey"]
MOST_COMPARED = ("lru", "lru_global", "lfu", "static", "fiddler", "saem", "belady")


def test_every_policy_that_comes_with_it_has_a_look_and_no_two_share_one() -> None:
    assert set(LOOKS) == {file.stem for file in POLICIES.glob("*.yaml")}
    assert len({(found.colour, found.marker) for found in LOOKS.values()}) == len(LOOKS)


def test_a_policy_of_ones_own_looks_always_alike_and_like_none_of_these() -> None:
    markers = {found.marker for found in LOOKS.values()}
    for name in ("my_own", "another", "lru2", "x"):
        assert look(name) == look(name)
        assert look(name).marker not in markers
        assert look(name).dash in DASHES
    assert len({look(f"mine_{number}") for number in range(40)}) > 15


def test_the_colours_of_those_compared_most_are_those_of_okabe_and_ito() -> None:
    own = {BLUE, SKY, GREEN, ORANGE, VERMILION, PINK, BLACK}
    assert {LOOKS[name].colour for name in MOST_COMPARED} == own


@pytest.mark.parametrize("vision", COLOURED)
def test_those_compared_most_are_far_apart_in_every_colour_vision(vision: str) -> None:
    for one, other in combinations(MOST_COMPARED, 2):
        assert distance(LOOKS[one].colour, LOOKS[other].colour, vision) > 15, (one, other)


@pytest.mark.parametrize("vision", VISIONS)
def test_where_colours_come_close_marks_or_dashes_differ(vision: str) -> None:
    for one, other in combinations(LOOKS, 2):
        a, b = LOOKS[one], LOOKS[other]
        if a.marker == b.marker and distance(a.colour, b.colour, vision) < 10:
            told = a.dash != b.dash or vision == "grey"
            assert told, (one, other)


def test_the_main_policies_are_told_apart_without_any_colour() -> None:
    assert len({(LOOKS[name].marker, LOOKS[name].dash) for name in MAIN}) == len(MAIN)


def test_parts_of_a_bar_are_told_apart_by_hatches_or_by_how_dark_they_are() -> None:
    for (_, one, colour, hatch), (_, other, colour2, hatch2) in combinations(PARTS, 2):
        if hatch == hatch2:
            assert min(distance(colour, colour2, vision) for vision in VISIONS) > 20, (one, other)


def test_the_distance_of_colours_by_known_values() -> None:
    assert distance("#000000", "#ffffff", "usual") == pytest.approx(100, abs=0.1)
    assert distance("#ff0000", "#00ff00", "usual") == pytest.approx(170.6, abs=0.5)
    red_green = [distance("#a00000", "#505000", vision) for vision in ("usual", "protanopia")]
    assert red_green[1] < red_green[0] / 3


def test_figures_are_made_for_the_columns_of_a_paper() -> None:
    assert 3.3 <= COLUMN <= 3.5
    assert PAGE == 7.0
    with styled():
        assert rcParams["pdf.fonttype"] == 42
        assert rcParams["svg.hashsalt"]
        assert rcParams["figure.constrained_layout.use"]
        assert min(rcParams[name] for name in ("legend.fontsize", "xtick.labelsize")) >= 7.5


def test_every_figure_of_the_table_has_its_function_and_a_line_of_what_it_shows() -> None:
    for name, entry in FIGURES.items():
        assert callable(entry.draw), name
        assert entry.shows
        assert entry.needs
