"""Points from a file: three ways of writing the same, and what is told of mistakes in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.types import ConfigError
from tests.searching import points, search, texts, values

CSV = """\
policy,cache.ratio,+estimate.x,workload.requests
lru,0.25,,"[0,1]"
# saem comes last
lfu,,5,
 saem , 1e-3 ,,
"""
YAML = """\
- policy: lru
  cache.ratio: 0.25
  workload.requests: [0, 1]
- [policy=lfu, +estimate.x=5]
- {policy: saem, cache.ratio: 1e-3}
"""
TEXT = """\
policy=lru cache.ratio=0.25 workload.requests=[0,1]   # the first

policy=lfu '+estimate.x=5'
# saem comes last
policy=saem cache.ratio=1e-3
"""
SAME = [
    {"policy": "lru", "cache.ratio": 0.25, "workload.requests": [0, 1]},
    {"policy": "lfu", "estimate.x": 5},
    {"policy": "saem", "cache.ratio": 0.001},
]


def points_of(folder: Path, name: str, text: str, *arguments: str) -> list[dict[str, object]]:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return [values(p) for p in points(arguments, search="list", list=str(file))]


@pytest.mark.parametrize(
    ("name", "text"), [("a.csv", CSV), ("a.yaml", YAML), ("a.yml", YAML), ("a.txt", TEXT)]
)
def test_each_way_of_writing_gives_the_same_points(tmp_path: Path, name: str, text: str) -> None:
    assert points_of(tmp_path, name, text) == SAME
    assert points_of(tmp_path, name, "\ufeff" + text) == SAME


def test_what_the_command_line_says_is_fixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    found = search(["machine=gh200", "seed=3"], {"model": "x"}, search="list", list="a.txt")
    (batch,) = found.batches()
    assert found.fixed == ("model=x", "machine=gh200", "seed=3")
    assert texts(batch[1]) == ["policy=lfu", "+estimate.x=5"]
    assert found.num_points == 3


YAML_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**12), 10**12),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(codec="utf-8", exclude_categories=["C", "Zl", "Zp"]), max_size=8),
        st.sampled_from(
            ["null", "True", "1", "1e9", "a,b", "it's", '"', "\\", "\\'", "x=y", "[0]"]
        ),
    ),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=80, deadline=None)
@given(value=YAML_VALUES)
def test_a_value_in_yaml_is_that_value(
    value: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "value.json"
    file.write_text(json.dumps([{"x": value}], ensure_ascii=False), encoding="utf-8")
    ((setting,),) = points([], search="list", list=str(file))
    assert setting.value == value
    assert type(setting.value) is type(value)


def test_a_long_file_is_read_by_its_words(tmp_path: Path) -> None:
    rows = "".join(f"lru,{0.05 + i / 1e5!r},{i}\n" for i in range(10_000))
    read = points_of(tmp_path, "a.csv", "policy,cache.ratio,seed\n" + rows)
    assert len(read) == 10_000
    assert read[-1] == {"policy": "lru", "cache.ratio": 0.05 + 9999 / 1e5, "seed": 9999}


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        (
            "a.csv",
            "policy,seed\nlru,1\nlfu,1,2\n",
            "a.csv: line 3: 3 values: the header has 2 keys",
        ),
        ("a.csv", "policy,policy\n", "a.csv: line 1: policy: a key may have one column"),
        ("a.csv", "policy,\nlru,2\n", "a.csv: line 1: an empty cell: the first row must hold keys"),
        ("a.csv", "policy=lru,seed=2\n", "line 1: policy=lru: the first row must hold keys"),
        ("a.csv", 'policy\n"lru,lfu"\n', "a.csv: line 2: policy = lru,lfu: must be one value"),
        ("a.csv", 'policy\n"lru\n', "a.csv: line 2: "),
        ("a.csv", "policy,seed\n", "a.csv: has no points"),
        ("a.csv", "", "a.csv: has no points"),
        ("a.txt", "policy=lru\npolicy=[lru\n", r"a.txt: line 2: policy = \[lru: must be KEY=VALUE"),
        ("a.txt", "\npolicy lru\n", "a.txt: line 2: policy: must be KEY=VALUE"),
        ("a.txt", "policy='lru\n", "a.txt: line 1: policy = 'lru: is no line of a shell"),
        ("a.txt", "seed=1 seed=2\n", "a.txt: line 1: seed = 2: a point may set a key once"),
        ("a.txt", "seed=range(3)\n", "a.txt: line 1: seed = range.3.: must be one value"),
        ("a.txt", "sweep.seed=1\n", "a.txt: line 1: sweep.seed = 1: is the same for all points"),
        ("a.txt", "hydra/job_logging=x\n", "line 1: hydra/job_logging = x: is the same"),
        ("a.yaml", "policy: lru\n", "a.yaml: must be a list of points"),
        ("a.yaml", "- policy: lru\n- 3\n", "a.yaml: line 2: 3: a point must be a mapping"),
        (
            "a.yaml",
            "- policy: lru\n- seed: 1\n  seed: 2\n",
            "a.yaml: line 2: a point may set a key",
        ),
        ("a.yaml", "- policy: [lru\n", "a.yaml: line 2: "),
        ("a.yaml", "- seed: 2020-01-01\n", "a.yaml: line 1: seed = 2020-01-01: must be a number"),
        ("a.yaml", "- !!python/name:os.system\n", "a.yaml: line 1: "),
        ("a.yaml", "", "a.yaml: must be a list of points"),
    ],
)
def test_mistakes_name_file_line_key_and_rule(
    tmp_path: Path, name: str, text: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as error:
        points_of(tmp_path, name, text)
    assert "\n" not in str(error.value)


def test_a_file_that_is_none_is_a_mistake(tmp_path: Path) -> None:
    for file in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(ConfigError, match=r"sweep\.list = .*: no such file"):
            search([], search="list", list=str(file))
    (tmp_path / "a.csv").write_bytes(b"policy\n\xff\n")
    with pytest.raises(ConfigError, match=r"sweep\.list = .*: must be text in UTF-8"):
        search([], search="list", list=str(tmp_path / "a.csv"))


def test_beside_a_list_nothing_varies_on_the_command_line(tmp_path: Path) -> None:
    for word, told in (("seed=1,2", "seed = 1,2"), ("x=interval(0,1)", r"x = interval\(0,1\)")):
        with pytest.raises(ConfigError, match=f"{told}: must be one value with sweep.search=list"):
            points_of(tmp_path, "a.txt", TEXT, word)
