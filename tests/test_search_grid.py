"""A grid's points are those of Hydra's own sweeper, and each text is parsed as Hydra parses it."""

from __future__ import annotations

import random
from functools import cache
from itertools import count
from typing import Any

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from sim.progress import points_of_grid
from sim.sweeps.grammar import Grammar, Setting
from sim.types import ConfigError
from tests.searching import points, search, texts, values

PARSER = OverridesParser.create()

KEYS = st.sampled_from(
    [
        *("seed", "policy", "cache.ratio", "trace.my-key", "machine/gpu", "stages@policy.stages"),
        *("+estimate.link.x", "++workload.new", "hydra.job.name", "a.0", "x.y.z", "+experiment"),
    ]
)
WORDS = st.sampled_from(
    [
        *(
            "lru",
            "a-b",
            "_x9",
            "null",
            "NULL",
            "true",
            "False",
            "inf",
            "nan",
            "Infinity",
            "e5",
            "x.y",
        ),
        *(
            "a/b.parquet",
            "rtx4090",
            "1_000",
            "0x",
            "'a,b'",
            '"it\\"s"',
            "'1'",
            "'null'",
            "a b",
            "a:b",
        ),
        *(
            "\\,",
            "a\\ b",
            "${cache.ratio}",
            "'${a}'",
            "${oc.env:HOME}/x",
            "$x",
            "[0,1]",
            "[]",
            "{}",
        ),
        *(
            "[a,[b,'c,d']]",
            "{a:1,b:[2,3]}",
            "[1.5,null,true]",
            "{a:{b:'x y'}}",
            "50%",
            "?",
            "+",
            "-1e-3",
        ),
    ]
)
NUMBERS = st.one_of(
    st.integers(-(10**20), 10**20).map(str),
    st.floats(allow_nan=False).map(repr),
    st.sampled_from(["1.", ".5", "1e9", "1E-3", "+3", "-0", "007", "1e+2", "-.5e1", "00.5"]),
)
VALUES = st.one_of(WORDS, NUMBERS)
COMMAS = st.lists(VALUES, min_size=1, max_size=3).map(",".join)
RANGES = st.sampled_from(
    ["range(3)", "range(1,4)", "range(0,1,0.25)", "range(3,0,-1)", "float(range(1,3))"]
)
SWEPT = st.one_of(
    COMMAS,
    COMMAS,
    RANGES,
    COMMAS.map("choice({})".format),
    st.sampled_from(["sort(3,1,2)", "sort(range(1,4),reverse=true)", "shuffle(range(5))"]),
    st.sampled_from(
        ["shuffle(a,b,c,d)", "shuffle([1,2,3,4])", "glob(*lru*)", "int(1.5,2)", "str(1,2)"]
    ),
    st.sampled_from(["tag(a,choice(1,2))", "glob([l*,s*],exclude=[saem*,stage*])"]),
)


def as_hydra(arguments: list[str], seed: int) -> list[list[str]]:
    """Return the points that Hydra's sweeper makes, drawing as after ``random.seed(seed)``."""
    random.seed(seed)
    parsed = OverridesParser.create(hydras_loader()).parse_overrides(arguments)
    (batch,) = BasicSweeper.split_arguments(parsed, None)
    return batch


@cache
def hydras_loader() -> Any:
    """Return what knows the options of groups."""
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_module("conf", version_base="1.3"):
        return GlobalHydra.instance().config_loader()


@cache
def is_parsed(text: str) -> bool:
    try:
        PARSER.parse_override(text)
    except Exception:
        return False
    return True


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(KEYS, SWEPT), min_size=1, max_size=5),
    st.integers(0, 2),
    st.integers(0, 3),
)
def test_points_are_those_of_hydras_sweeper_in_its_order(
    pairs: list[tuple[str, str]], seed: int, num_params: int
) -> None:
    pairs = [
        ("policy" if "glob" in value else key, value)
        for key, value in pairs
        if is_parsed(f"{key}={value}")
    ]
    params = dict(pairs[:num_params])
    arguments = [f"{key}={value}" for key, value in pairs[num_params:]]
    told = [f"{key}={value}" for key, value in params.items()] + arguments
    expected = as_hydra(told, seed)
    if not all(
        is_parsed(text) for point in expected for text in point
    ):  # choice('it"s') of Hydra's
        with pytest.raises(HydraException):
            search(arguments, params, seed=seed)
        return
    found = search(arguments, params, seed=seed)
    (batch,) = found.batches()
    assert [[*found.fixed, *texts(point)] for point in batch] == expected
    assert found.num_points == len(batch)
    for setting in {text: s for point in batch for s in point for text in [s.text]}.values():
        assert_as_parsed(setting)


def assert_as_parsed(setting: Setting) -> None:
    """Assert that a setting is what Hydra's parser reads in its text."""
    override = PARSER.parse_override(setting.text)
    assert setting.key == override.key_or_group
    assert repr(setting.value) == repr(override.value())  # as text: nan is not itself, 1 is not 1.0


@settings(max_examples=200, deadline=None)
@given(KEYS, st.one_of(VALUES, st.text("aeEnN01_.-+xX", min_size=1, max_size=6)))
def test_one_override_is_read_as_hydra_reads_it(key: str, value: str) -> None:
    text = f"{key}={value}"
    if not is_parsed(text) or PARSER.parse_override(text).is_sweep_override():
        with pytest.raises((ConfigError, HydraException)):
            Grammar().setting(text)
        return
    setting = Grammar().setting(text)
    assert setting.text == text
    assert_as_parsed(setting)


@pytest.mark.parametrize(
    ("task", "number"),
    [
        (["policy=lru,saem", "cache.ratio=0.1,0.2,0.3"], 8 * 6),
        (["policy=lru", "workload.batch_size=2"], 8),
        (["seed=range(1,4)", "policy=saem", "policy=lru,saem"], 8 * 6),
        (["machine=rtx4090"], 4),
    ],
)
def test_the_bar_of_hydras_own_sweep_counts_its_points(task: list[str], number: int) -> None:
    params = {"machine": "a,b", "engine": "c,d", "model": "e,f"}
    known = {"sweeper": {"params": params}, "overrides": {"task": task}}
    assert points_of_grid(OmegaConf.create({"hydra": known})) == number
    of_hydra = BasicSweeper.split_arguments(
        PARSER.parse_overrides([*(f"{key}={value}" for key, value in params.items()), *task]), None
    )
    assert len(of_hydra[0]) == number


def test_fixed_are_the_overrides_before_the_first_that_varies() -> None:
    found = search(["seed=3", "cache.ratio=0.1,0.2", "workload.batch_size=2"], {"policy": "lru"})
    (batch,) = found.batches()
    assert found.fixed == ("policy=lru", "seed=3")
    assert texts(batch[1]) == ["cache.ratio=0.2", "workload.batch_size=2"]


def test_without_anything_that_varies_there_is_one_point() -> None:
    found = search(["seed=3"])
    assert found.fixed == ("seed=3",)
    assert list(found.batches()) == [[()]]


def test_the_command_line_wins_over_the_params_of_an_experiment() -> None:
    batch = points(["policy=saem,lfu"], {"policy": "lru", "cache.ratio": "0.1,0.2"})
    assert [values(point) for point in batch][:2] == [
        {"policy": "saem", "cache.ratio": 0.1},
        {"policy": "saem", "cache.ratio": 0.2},
    ]


def test_shuffling_leaves_the_global_generator_alone_and_follows_the_seed() -> None:
    state = random.getstate()
    first = points(["seed=shuffle(range(50))"], seed=1)
    assert random.getstate() == state
    assert points(["seed=shuffle(range(50))"], seed=1) == first
    assert points(["seed=shuffle(range(50))"], seed=2) != first


def test_ten_thousand_points_parse_no_more_than_their_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed = count()
    parse = OverridesParser.parse_rule

    def counted(self: OverridesParser, text: str, rule: str) -> object:
        next(parsed)
        return parse(self, text, rule)

    monkeypatch.setattr(OverridesParser, "parse_rule", counted)
    batch = points(["policy=lru,lfu", "cache.ratio=range(0,0.5,0.0001)", "seed='a b','c d'"])
    assert len(batch) == 20_000
    assert next(parsed) == 3 + 2  # the arguments, and the two texts that are no words


@pytest.mark.parametrize(
    ("arguments", "asked", "told"),
    [
        (["cache.ratio=interval(0,1)"], {}, "a grid has no intervals"),
        (["seed=range(3,3)"], {}, "stands for no value"),
        (["policy=glob(zz*)"], {}, "stands for no value"),
        (["seed=1,2"], {"points": 3}, "sweep.points = 3: only with"),
        (["seed=1,2"], {"list": "x.csv"}, "sweep.list = x.csv: only with"),
        (["seed=1,2"], {"search": "list"}, "sweep.list = null: must name"),
        (["seed=1,2"], {"search": "lhs"}, "sweep.points = null: must be a number"),
        (["seed=interval(2,1)"], {"search": "lhs", "points": 2}, r"interval\(2,1\): must run"),
        (["seed=tag(log,interval(0,1))"], {"search": "lhs", "points": 2}, "positive"),
        (["seed=tag(lg,interval(1,2))"], {"search": "lhs", "points": 2}, r"tag\(lg,\.\.\.\)"),
        (["seed=3"], {"search": "random", "points": 2}, "needs a key that varies"),
        (["seed=3"], {"search": "optuna", "points": 2}, "needs a key that varies"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: list[str], asked: dict[str, object], told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as error:
        search(arguments, **asked)
    assert "\n" not in str(error.value)


def test_a_grid_that_nobody_means_is_refused_before_it_is_made() -> None:
    with pytest.raises(ConfigError, match=r"has 9,990,000 points: must be 1,000,000 at most"):
        search(["a=range(0,1,0.0001)", "b=range(1,1000)"])
