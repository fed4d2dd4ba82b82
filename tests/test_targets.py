"""What a ``_target_`` may name: classes of policies' parts, nothing else, and none is called to find out."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from configs import CONF, composed, options

from sim.mistakes import explain
from sim.parts import ROLES
from sim.policies.base import CachePolicy, Policy, Predictor
from sim.policies.classic import LRU
from sim.simulate import simulate
from sim.targets import locate_class
from sim.types import ConfigError

ROOT = Path(__file__).parents[1]
WHERE = "policy/mine: cache"
LOADED: list[str] = []
"""Names of modules that said so when they were imported, and of classes that were called."""


class Parts(LRU):
    """A cache of the user's, in a module of his own (this one)."""


class NotAPolicy:
    def __init__(self, *_: Any, **__: Any) -> None:
        LOADED.append("NotAPolicy was called")


def makes_a_policy() -> LRU:
    LOADED.append("a function was called")
    return LRU()


an_object = LRU()


# -- refused ----------------------------------------------------------------------------------------

PYTHONS = (
    "is a module of Python itself: must be a class of sim.policies, or of a module of your own"
)
NOT_OURS = "must be a class of sim.policies, or of a module of your own"
FORM = "must name a class, as package.module.Class"
REFUSED = {
    "os.system": PYTHONS,
    "os.path.join": PYTHONS,
    "posix.system": PYTHONS,
    "subprocess.Popen": PYTHONS,
    "builtins.eval": PYTHONS,
    "builtins.exec": PYTHONS,
    "pickle.loads": PYTHONS,
    "importlib.import_module": PYTHONS,
    "antigravity.anything": PYTHONS,
    "sys.exit": PYTHONS,
    "sim.cli.main": NOT_OURS,
    "sim.parts.os.system": NOT_OURS,
    "sim.progress.SweepProgress": NOT_OURS,
    "sim.policies_of_mine.X": NOT_OURS,
    "sim.simulate": NOT_OURS,
    "real.measure_cli.main": NOT_OURS,
    "traces.importers.torch_pickle.load_pickle": NOT_OURS,
    "conf.X": NOT_OURS,
    "LRU": FORM,
    "": FORM,
    ".": FORM,
    "a..b": FORM,
    ".classic.LRU": FORM,
    "..classic.LRU": FORM,
    "sim.policies.classic.": FORM,
    "sim.policies.classic.LRU()": FORM,
    "sim/policies/classic.LRU": FORM,
    "sim.policies.classic:LRU": FORM,
    "sim.policies.classic.LRU\n": FORM,
    "sim.policies.class ic.LRU": FORM,
    "sim.policies.base.np": "must be a CachePolicy",
    "sim.policies.base.np.linalg": "cannot be imported",
    "sim.policies.classic.LRU.choose_victim": "cannot be imported",
    "sim.policies.classic.LRU.__init__.__globals__": "cannot be imported",
    "sim.policies.base.NamedTuple": "must be a CachePolicy",
    "sim.policies.base.Policy": "must be a CachePolicy",
    "sim.policies.prefetch.NextLayers": "must be a CachePolicy",
    "sim.policies.classic.__dict__": "must be a CachePolicy",
    "sim.policies.classic.__builtins__": "must be a CachePolicy",
    "sim.policies.LRU": "no such class",
    "numpy.load": "must be a CachePolicy",
    "numpy.random.Generator": "must be a CachePolicy",
    "__main__.Nobody": "no such class",
    "no_such_module_of_mine.X": "cannot be imported: ModuleNotFoundError",
    f"{__name__}.NotAPolicy": "must be a CachePolicy",
    f"{__name__}.makes_a_policy": "must be a CachePolicy",
    f"{__name__}.an_object": "must be a CachePolicy",
    f"{__name__}.LOADED": "must be a CachePolicy",
    f"{__name__}.sys": "must be a CachePolicy",
    f"{__name__}.os.system": "cannot be imported",
}


@pytest.mark.parametrize("target", REFUSED)
def test_what_is_no_part_of_a_policy_is_refused_by_its_rule(target: str) -> None:
    LOADED.clear()
    with pytest.raises(ConfigError) as caught:
        locate_class(target, WHERE, CachePolicy)
    line = explain(caught.value)
    assert line is not None
    assert line.startswith(f"{WHERE}._target_ = {target.strip()}")
    assert REFUSED[target] in line
    assert "\n" not in line
    assert LOADED == []


@pytest.mark.parametrize("target", [None, 3, True, [], {}, ["sim.policies.classic.LRU"], LRU])
def test_a_target_is_text(target: Any) -> None:
    with pytest.raises(ConfigError, match="must name a class"):
        locate_class(target, WHERE, CachePolicy)


def test_modules_that_hold_no_policies_are_not_even_imported() -> None:
    for target in (
        "antigravity.x",
        "this.s",
        "turtledemo.x",
        "sim.figures.x",
        "real.measure_cli.main",
    ):
        before = {*sys.modules}
        with pytest.raises(ConfigError):
            locate_class(target, WHERE, CachePolicy)
        assert target.rpartition(".")[0] in before or target.rpartition(".")[0] not in sys.modules


@pytest.mark.parametrize(
    ("target", "near"),
    [
        ("sim.policies.classic.LRUU", "LRU"),
        ("sim.policies.clasic.LRU", "sim.policies.classic.LRU"),
        ("sim.polices.classic.LRU", "sim.policies.classic.LRU"),
        ("sim.polices.classic.LRUU", "sim.policies.classic.LRU"),
        ("queue.LRU", "sim.policies.classic.LRU"),
        (f"{__name__}.Part", "Parts"),
    ],
)
def test_a_near_match_is_told(target: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"; did you mean '{near}'\\?"):
        locate_class(target, WHERE, CachePolicy)


@pytest.mark.parametrize("role", sorted(ROLES))
@pytest.mark.parametrize("target", ["os.system", f"{__name__}.NotAPolicy", "sim.cli.main"])
def test_every_role_and_the_parts_within_are_held_to_it(role: str, target: str) -> None:
    LOADED.clear()
    config = composed("workload.requests=[24,25]", "workload.length=[2,2]", "output.belady=false")
    config["policy"][role] = {"_target_": target, "command": "echo broken"}
    with pytest.raises(ConfigError, match="_target_"):
        simulate(config)
    config["policy"][role] = {"_target_": "sim.policies.classic.LRU", "inner": {"_target_": target}}
    with pytest.raises(ConfigError):
        simulate(config)
    assert LOADED == []


def test_a_part_within_a_part_is_one_of_a_policy_too() -> None:
    LOADED.clear()
    config = composed("policy=mrs", "workload.requests=[24,25]", "output.belady=false")
    host = f"{__name__}.Holder"
    for target in ("os.system", f"{__name__}.NotAPolicy", f"{__name__}.makes_a_policy"):
        config["policy"]["cache"] = {"_target_": host, "inner": {"_target_": target}}
        with pytest.raises(ConfigError, match=r"cache\.inner\._target_ = "):
            simulate(config)
    assert LOADED == []


class Holder(LRU):
    def __init__(self, inner: Policy) -> None:
        super().__init__()
        self.inner = inner


# -- taken ------------------------------------------------------------------------------------------


def _targets(value: Any) -> Iterator[str]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, dict) and "_target_" in value:
        yield value["_target_"]
    for item in items:
        yield from _targets(item)


def test_all_that_comes_with_greenroom_may_be_named() -> None:
    found = 0
    for group in ("policy", "stages"):
        for name in options(group):
            for target in _targets(yaml.safe_load((CONF / group / f"{name}.yaml").read_text())):
                assert issubclass(locate_class(target, name, Policy), Policy)
                found += 1
    assert found > 150


def test_a_class_of_ones_own_is_taken_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "policies_of_this_test" / "inner"
    package.mkdir(parents=True)
    text = "from sim.policies.classic import LRU\n\n\nclass Mine(LRU):\n    pass\n"
    (package / "mine.py").write_text(text)
    (tmp_path / "mine_of_this_test.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for target in ("mine_of_this_test.Mine", "policies_of_this_test.inner.mine.Mine"):
        assert locate_class(target, WHERE, CachePolicy).__name__ == "Mine"
    assert locate_class(f"{__name__}.Parts", WHERE, CachePolicy) is Parts
    with pytest.raises(ConfigError, match="must be a Predictor"):
        locate_class("mine_of_this_test.Mine", WHERE, Predictor)


@pytest.mark.parametrize(
    "body", ["raise ValueError('why')", "1 / 0", "import sys\nsys.exit(3)", "("]
)
def test_a_module_that_fails_is_told_in_one_line(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"fails_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(body + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"{name}.X: cannot be imported: ") as caught:
        locate_class(f"{name}.X", WHERE, CachePolicy)
    assert "\n" not in str(explain(caught.value))


def test_a_class_that_makes_something_else_is_refused() -> None:
    config = composed("workload.requests=[24,25]", "workload.length=[2,2]", "output.belady=false")
    config["policy"]["cache"] = {"_target_": f"{__name__}.Liar"}
    with pytest.raises(ConfigError, match="must be a CachePolicy"):
        simulate(config)


class Liar(LRU):
    def __new__(cls) -> Any:
        return os


# -- nobody goes around it --------------------------------------------------------------------------

LOCATES = {
    "import_module",
    "__import__",
    "find_spec",
    "instantiate",
    "get_class",
    "get_method",
    "get_object",
}
LOCATES |= {"locate"}
MAY = {
    "sim/sweeps/identity.py": "digests of the modules that sim.targets lets a configuration name",
    "sim/figures/table.py": "figures, by a table of its own",
    "sim/completion_shapes.py": "commands, by their table",
    "real/validate.py": "whether accelerate is installed",
    "sim/targets.py": "the one place that imports what a configuration names",
    "sim/hydra_guard.py": "plugins of Hydra, below names that are its own",
    "sim/cli.py": "commands, by a table of its own",
    "sim/catalogue.py": "the classes of the bundled policies",
    "traces/importers/formats.py": "importers, by a table of its own",
    "traces/exporters/formats.py": "exporters, by a table of its own",
}


def _calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            made = node.func
            yield made.attr if isinstance(made, ast.Attribute) else getattr(made, "id", "")


def test_modules_are_imported_by_name_in_known_places_only() -> None:
    found = set()
    for package in ("sim", "traces", "hwmodels", "real", "conf"):
        for file in sorted((ROOT / package).rglob("*.py")):
            source = file.relative_to(ROOT).as_posix()
            tree = ast.parse(file.read_text(encoding="utf-8"))
            own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            imported = {
                alias.asname or alias.name
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom)
                and (node.module or "").startswith(("traces.", "sim."))
                for alias in node.names
            }
            if {*_calls(tree)} & LOCATES - own - imported:
                found.add(source)
    assert found - {*MAY} == set()
