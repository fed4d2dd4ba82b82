"""Figures of sweeps: what is drawn are the values of the rows, and what cannot be drawn says why."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from sim.figures.by_size import draw_throughput, draw_tpot
from sim.figures.hits import draw_hit_rate
from sim.figures.pareto import draw_pareto, moved_mb, pareto_front
from sim.figures.published import draw_published
from sim.figures.relative import draw_relative
from sim.figures.source import PUBLISHED, RUN, NotDrawableError, Source, Wanted, open_source
from sim.figures.stalls import PARTS, draw_stalls, shortened
from sim.figures.standings import draw_league
from sim.figures.sweep import plot_sweep
from sim.figures.table import FIGURES, draw
from sim.figures.tornado import draw_what_if
from sim.league import league
from sim.plot_style import rendered, save
from sim.types import ConfigError
from tests.figure_rows import close, lines_in, run, sweep_of, texts_of_legend
from tests.test_report import change

REPO = Path(__file__).parents[1]
SIZES = (0.125, 0.25, 0.5)


def three() -> list[dict[str, Any]]:
    """Three policies at two sizes: b is twice, then eight times as fast as lru."""
    return [
        run("lru", 0.25, 10.0), run("lru", 0.5, 20.0), run("b", 0.25, 20.0), run("b", 0.5, 160.0),
        run("belady", 0.25, 30.0), run("belady", 0.5, 40.0),
    ]  # fmt: skip


# -- by cache size ---------------------------------------------------------------------------------


def test_speed_and_time_by_cache_size_are_those_of_the_rows() -> None:
    source = sweep_of(*reversed(three()))
    speeds = lines_in(draw_throughput(source).axes[0])
    assert speeds == {
        "belady (oracle)": [(25, 30), (50, 40)], "b": [(25, 20), (50, 160)], "lru": [(25, 10), (50, 20)],
    }  # fmt: skip
    times = lines_in(draw_tpot(source).axes[0])
    assert close(times["b"], [(25, 50), (50, 6.25)])


def test_each_setting_has_a_panel_and_each_variant_a_look_of_its_own() -> None:
    rows = [
        run("lfu", size, 10 * decay, machine=machine, overrides={"policy.cache.decay": str(decay)})
        for machine in ("a", "b") for size in SIZES for decay in (0.5, 0.9)
    ]  # fmt: skip
    figure = draw_throughput(sweep_of(*rows))
    assert [axes.get_title() for axes in figure.axes] == ["a", "b"]
    assert set(lines_in(figure.axes[1])) == {"lfu decay=0.5", "lfu decay=0.9"}
    first, second = figure.axes[0].get_lines()
    assert first.get_color() == second.get_color()
    assert first.get_marker() != second.get_marker()
    assert first.get_linestyle() != second.get_linestyle()


def test_marks_of_those_that_know_the_future_are_hollow() -> None:
    by_name = {
        str(line.get_label()): line for line in draw_throughput(sweep_of(*three())).axes[0].lines
    }
    assert by_name["belady (oracle)"].get_markerfacecolor() == "none"
    assert by_name["lru"].get_markerfacecolor() == by_name["lru"].get_color()


def test_the_band_reaches_from_the_forced_optimum_to_the_free_one() -> None:
    known = [
        one | {"belady_hit_rate": best, "belady_forced_hit_rate": forced}
        for one, best, forced in zip(three()[:2], (0.5, 0.8), (0.4, None), strict=True)
    ]
    figure = draw_hit_rate(sweep_of(*known))
    (axes,) = figure.axes
    (band,) = axes.collections
    points = {(round(x, 6), round(y, 6)) for x, y in band.get_paths()[0].vertices}
    assert points == {(25, 40), (25, 50), (50, 80)}
    assert lines_in(axes)["lru"] == [(25, 34.56), (50, 34.56)]
    assert "Belady's optimum" in texts_of_legend(figure)


@pytest.mark.parametrize("turned", [False, True])
def test_the_band_spans_pools_by_layer_and_for_all_in_whatever_order(turned: bool) -> None:
    scopes = {
        "layer": {"belady_hit_rate": 0.5, "belady_forced_hit_rate": 0.3},
        "global": {"belady_hit_rate": 0.6, "belady_forced_hit_rate": 0.4},
    }
    rows = [
        run(scope, size, scope=scope, **optima)
        for scope, optima in scopes.items()
        for size in (0.25, 0.5)
    ]
    figure = draw_hit_rate(sweep_of(*(rows[::-1] if turned else rows)))
    (band,) = figure.axes[0].collections
    points = {(round(x, 6), round(y, 6)) for x, y in band.get_paths()[0].vertices}
    assert points == {(25, 30), (25, 60), (50, 30), (50, 60)}
    assert "band: over pools by global, layer" in figure.get_supxlabel()


def test_without_the_optimum_there_is_no_band_and_the_caption_says_so() -> None:
    figure = draw_hit_rate(sweep_of(*three()))
    assert not figure.axes[0].collections
    assert "no band: output.belady was false" in figure.get_supxlabel()


# -- bars ------------------------------------------------------------------------------------------


def test_bars_of_a_breakdown_add_up_to_the_time_of_a_token() -> None:
    (axes,) = draw_stalls(sweep_of(*three())).axes
    widths: dict[float, float] = {}
    for bar in axes.patches:
        place = bar.get_y() + bar.get_height() / 2
        widths[place] = widths.get(place, 0) + bar.get_width()
    assert [text.get_text() for text in axes.get_yticklabels()] == ["lru", "b", "belady"]
    assert [widths[place] for place in range(3)] == pytest.approx([100, 50, 1000 / 30])


def test_a_breakdown_is_of_the_middle_size_at_which_many_ran() -> None:
    drawn = [run("c", size, 50.0) for size in (0.3, 0.31, 0.32)]  # sizes of one run each
    (axes,) = draw_stalls(sweep_of(*three(), *drawn)).axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["lru", "b", "belady"]
    assert "25% of experts" in axes.get_xlabel()


def test_a_breakdown_shows_each_cause_that_somebody_waits_for() -> None:
    causes = {f"{cause}_stall_share": 0.1 for cause in ("link", "storage", "dram", "host", "cpu")}
    source = sweep_of(run(**causes, idle_ns=1), run("fifo", link_stall_share=0.7))
    figure = draw_stalls(source)
    assert texts_of_legend(figure) == [words for _, words, _, _ in PARTS]
    phone = draw_stalls(sweep_of(run(machine_kind="cpu_only")))
    assert texts_of_legend(phone) == ["CPU busy", "waits for link"]


def test_the_league_shows_every_standing_as_a_bar_and_in_numbers() -> None:
    bars, numbers = draw_league(sweep_of(*three())).axes
    _, standings = league(three())
    assert [bar.get_width() for bar in bars.patches] == pytest.approx(
        [standing.mean for standing in reversed(standings)]
    )
    ranges = [line.get_xdata() for line in bars.get_lines() if line.get_color() == "black"]
    assert close(ranges, [(s.worst, s.best) for s in reversed(standings)])
    words = [text.get_text() for text in numbers.texts]
    assert {"mean", "hit rate", "4.00x", "8.00x", "2/2", "34.6%"} <= set(words)


def test_another_baseline_can_be_asked_for() -> None:
    wanted = Wanted(baseline="b")
    bars, _ = draw_league(sweep_of(*three()), wanted).axes
    assert sorted(bar.get_width() for bar in bars.patches)[0] == pytest.approx(0.25)
    ratios = lines_in(draw_relative(sweep_of(*three()), wanted).axes[0])
    assert close(ratios["lru"], [(25, 0.5), (50, 0.125)])
    with pytest.raises(ConfigError, match=r"--baseline lry: no such policy .* did you mean 'lru'"):
        draw_league(sweep_of(*three()), Wanted(baseline="lry"))


def test_relative_speeds_have_a_panel_a_setting_and_the_field_in_grey() -> None:
    rows = [one | {"highlight": ["lru", "b"]} for one in three()]
    rows += [one | {"machine": "other", "tokens_per_s": 2 * one["tokens_per_s"]} for one in rows]
    figure = draw_relative(sweep_of(*rows))
    assert [axes.get_title() for axes in figure.axes] == ["box", "other"]
    assert lines_in(figure.axes[1]) == {"lru": [(25, 1), (50, 1)], "b": [(25, 2), (50, 8)]}
    assert "the other policies" in texts_of_legend(figure)
    (field,) = (line for line in figure.axes[1].lines if line.get_color() == "0.78")
    assert list(field.get_ydata()) == [3, 2]


def test_relative_speeds_need_a_policy_that_ran_where_the_baseline_did() -> None:
    apart = [
        run("lru", 0.25, 10.0),
        run("lru", 0.5, 10.0),
        run("b", 0.3, 10.0),
        run("b", 0.4, 10.0),
    ]
    with pytest.raises(NotDrawableError, match="needs a policy that ran with a setting and a size"):
        draw_relative(sweep_of(*apart))
    draw_relative(sweep_of(*apart, run("b", 0.5, 20.0)))


def test_a_tornado_has_a_bar_a_variant_and_says_why_others_have_none() -> None:
    variants = [
        change("link x2", 0.5), change("slower", -0.5), change("storage x2", None, "there is none"),
    ]  # fmt: skip
    (axes,) = draw_what_if(Source(RUN, [run(what_if=variants)])).axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "slower",
        "link x2",
        "storage x2",
    ]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([-0.5, 0.5])
    words = [text.get_text() for text in axes.texts]
    assert words == [
        "-50.0%, then bound by GPU",
        "+50.0%, then bound by GPU",
        "not run: there is none",
    ]


# -- speed against bytes ---------------------------------------------------------------------------


def test_many_sizes_have_marks_that_can_be_read() -> None:
    sizes = [0.05 + 0.01 * number for number in range(80)]
    rows = [run(policy, size, 10.0) for policy in ("lru", "b") for size in sizes]
    for figure in (draw_throughput(sweep_of(*rows)), draw_relative(sweep_of(*rows))):
        ticks = list(figure.axes[0].get_xticks())
        assert 5 <= len(ticks) <= 9
        assert set(ticks) <= {100 * size for size in sizes}


@pytest.mark.parametrize(
    ("sizes", "words"), [((0.03125, 0.5), ["3.125", "50"]), ((0.0312345, 0.5), ["3.12", "50"])]
)
def test_a_size_is_written_out_unless_it_has_no_end(sizes: list[float], words: list[str]) -> None:
    axes = draw_throughput(sweep_of(*(run("lru", size, 10.0) for size in sizes))).axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == words


def test_names_are_drawn_as_they_are_and_long_ones_leave_room(
    recwarn: pytest.WarningsRecorder,
) -> None:
    names = ("lru", "$\\frac{1}$", "🚀", "x" * 300)
    rows = [run(name, size, 10.0) for name in names for size in (0.25, 0.5)]
    figure = draw("throughput_by_cache", sweep_of(*rows))
    assert rendered(figure, "svg") == rendered(figure, "svg")
    labels = texts_of_legend(figure)
    assert labels[:3] == list(names[:3])
    assert len(labels[3]) == 40
    assert not recwarn.list


def test_nobody_beats_the_front_in_both() -> None:
    points = [(3.0, 5.0), (1.0, 2.0), (2.0, 2.0), (4.0, 5.0), (2.5, 9.0), (1.0, 1.0)]
    front = pareto_front(points)
    assert front == [(1.0, 2.0), (2.5, 9.0)]
    for moved, speed in points:
        assert any(m <= moved and s >= speed for m, s in front)


def test_speed_is_drawn_against_bytes_of_a_token() -> None:
    rows = [run("lru", 0.25, 10.0), run("lru", 0.5, 20.0, h2d_bytes=70_000_000)]
    stored = run("fifo", 0.5, 5.0, h2d_bytes=0, read_bytes=7_000_000)
    assert [moved_mb(one) for one in (*rows, stored)] == [1.0, 0.1, 0.01]
    lines = lines_in(draw_pareto(sweep_of(*rows, stored)).axes[0])
    assert lines["lru"] == [(1.0, 10), (0.1, 20)]
    assert lines["fifo"] == [(0.01, 5)]


# -- predicted against measured --------------------------------------------------------------------


def test_marks_of_runs_that_move_nothing_are_whole() -> None:
    rows = [run("lru", 0.25, 10.0), run("lru", 0.5, 20.0), run("b", 0.25, 5.0, h2d_bytes=0)]
    few = [row | {"h2d_bytes": 0} for row in rows]
    for case in (rows, few):
        assert draw_pareto(sweep_of(*case)).axes[0].get_xlim()[0] < 0


def test_a_validation_is_drawn_from_what_it_has_written() -> None:
    source = open_source(REPO / "docs" / "validation" / "xeon_2_cores")
    times, errors = draw("predicted_by_measured", source).axes
    runs = [one for one in source.rows if not one["is_reference"]]
    drawn = [bar[0].get_xydata()[0] for bar in times.containers]
    assert close(drawn, [(r["measured_ns"] / 1e6, r["predicted_ns"] / 1e6) for r in runs])
    assert len(errors.containers) == len(runs)


def test_published_rows_are_drawn_as_the_command_draws_them(tmp_path: Path) -> None:
    from sim.published import bundled_rows, outcomes
    from sim.published_cli import write_csv

    found = outcomes(bundled_rows(), ["1", "5", "15"])
    write_csv(tmp_path / "published.csv", found)
    source = open_source(tmp_path)
    assert source.kind == PUBLISHED
    speeds = draw_published(source).axes[0]
    drawn = [tuple(map(float, bar[0].get_xydata()[0])) for bar in speeds.containers]
    expected = [
        ((low * high) ** 0.5, predicted) for low, high, predicted in (o.speeds for o in found)
    ]
    assert close(sorted(drawn), sorted(expected))


# -- what cannot be drawn --------------------------------------------------------------------------

ONE_SIZE = [run("lru"), run("b"), run("fifo")]
MANY = [run(f"p{place}", size) for place in range(41) for size in (0.25, 0.5)]
MACHINES = [run(p, s, machine=f"m{m}") for p in ("lru", "b") for s in (0.25, 0.5) for m in range(7)]


@pytest.mark.parametrize(
    ("name", "rows", "reason"),
    [
        ("throughput_by_cache", ONE_SIZE, "at least two cache sizes, and all runs have 25 %"),
        ("hit_rate_by_cache", [run()], "needs a sweep, and this is one run"),
        ("tpot_by_cache", MANY, "would have 41 lines, and more than 24 are a tangle: --policies"),
        ("relative_by_cache", MACHINES, "would have 7 panels, one for each of machine, and at most 6"),
        ("relative_by_cache", MANY, "needs a baseline: ablation_base, lru, on_demand, or --baseline"),
        ("stall_breakdown", MANY, "would have 41 bars at the middle cache size, and at most 40"),
        ("league", ONE_SIZE, "needs three policies or more in two settings or more"),
        ("roofline", ONE_SIZE, "needs a run with output.roofline=true"),
        ("what_if", ONE_SIZE, "needs a run with output.what_if=true"),
        ("gantt", ONE_SIZE, "needs the folder of one run, and this is a sweep"),
        ("predicted_by_measured", ONE_SIZE, "needs what `greenroom validate` or `greenroom published`"),
        ("league", [run(total_ns=0, tokens_per_s=None)], "needs a run that processed a request"),
    ],
)  # fmt: skip
def test_a_figure_says_what_it_lacks(name: str, rows: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(NotDrawableError) as caught:
        draw(name, sweep_of(*rows))
    assert reason in str(caught.value)


def test_a_validation_has_no_other_figures() -> None:
    source = open_source(REPO / "docs" / "validation" / "xeon_2_cores")
    for name in FIGURES:
        if name != "predicted_by_measured":
            with pytest.raises(NotDrawableError, match="and this is a validation"):
                draw(name, source)


def test_a_sweep_leaves_what_can_be_drawn(tmp_path: Path) -> None:
    drawn = plot_sweep(three(), tmp_path)
    assert [path.name for path in drawn] == [
        "throughput_by_cache.png", "hit_rate_by_cache.png", "stall_breakdown.png", "league.png",
        "relative_by_cache.png",
    ]  # fmt: skip
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".pdf"}
    assert plot_sweep([run(total_ns=0, tokens_per_s=None)], tmp_path / "none") == []


def test_ten_thousand_rows_are_drawn_or_refused_soon() -> None:
    rows = [
        run(f"p{place}" if place else "lru", size, 10.0 + seed, overrides={"workload.seed": str(seed)})
        for place in range(10) for seed in range(250) for size in (0.1, 0.2, 0.3, 0.4)
    ]  # fmt: skip
    source, begun_s = sweep_of(*rows), time.process_time()
    for name in ("throughput_by_cache", "stall_breakdown", "speed_by_bytes", "relative_by_cache"):
        with pytest.raises(NotDrawableError):
            draw(name, source)
    assert len(draw("league", source).axes[0].patches) == 10
    assert time.process_time() - begun_s < 60, "seconds, where something quadratic would take hours"


@pytest.mark.parametrize("value", [0.0, 1e-12])
def test_rows_of_nothing_but_zeros_are_drawn(value: float) -> None:
    rows = [one | {"hit_rate": value, "h2d_bytes": 0} for one in three()]
    for name in ("hit_rate_by_cache", "speed_by_bytes", "league"):
        assert rendered(draw(name, sweep_of(*rows)), "png")


def test_a_label_that_is_cut_keeps_both_ends() -> None:
    assert shortened("lru") == "lru"
    names = [f"a_policy_with_a_long_name_of_its_own, decay {decay}" for decay in (0.5, 0.9)]
    cut = [shortened(name, 20) for name in names]
    assert [len(one) for one in cut] == [20, 20]
    assert cut[0] != cut[1]
    assert cut[0].startswith("a_policy")


@pytest.mark.parametrize("kind", ["pdf", "png", "svg"])
def test_files_have_the_same_bytes_each_time(tmp_path: Path, kind: str) -> None:
    for name in ("throughput_by_cache", "stall_breakdown"):
        first, second = (
            save(draw(name, sweep_of(*three())), tmp_path / f"{n}", [kind]).read_bytes()
            for n in "ab"
        )
        assert first == second


def test_panels_stand_in_the_order_of_their_values() -> None:
    sizes = [(batch, ratio) for batch in (16, 2, 1, 4) for ratio in (0.25, 0.5)]
    figure = draw_throughput(sweep_of(*(run(ratio=r, batch_size=b) for b, r in sizes)))
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == ["batch 1", "batch 2", "batch 4", "batch 16"]


def test_figures_of_an_earlier_sweep_do_not_stay(tmp_path: Path) -> None:
    plot_sweep(three(), tmp_path)
    assert (tmp_path / "throughput_by_cache.pdf").exists()
    left = plot_sweep(three()[::2], tmp_path)  # of one size
    assert [path.name for path in left] == ["stall_breakdown.png"]
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "stall_breakdown.pdf",
        "stall_breakdown.png",
    ]
