"""What a folder of options may make Hydra do: no class beyond its own, no YAML that bursts when copied."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import pytest
from hydra import compose
from omegaconf import OmegaConf

from sim import cli
from sim.cases import compose_case
from sim.check_cli import compose_policy
from sim.completion_conf import Conf
from sim.composing import compose_config, composing
from sim.hydra_guard import check_hydra
from sim.stage_hold import compose_stages
from sim.types import ConfigError
from sim.yaml_aliases import check_aliases

POLICY = "name: mine\nscope: layer\ncache: {_target_: sim.policies.classic.LRU}\n"
SPY = "open('attacked', 'w').close()\nclass Spy:\n    pass\n"
NAMED = {
    "callback": "callbacks: {a: {_target_: spy.Spy}}",
    "launcher": "launcher: {_target_: spy.Spy}",
    "within the launcher": "launcher: {a: [{_target_: spy.Spy}]}",
    "sweeper": "sweeper: {_target_: spy.Spy}",
    "interpolated": "callbacks: {a: {_target_: '${aside.a._target_}'}}",
    "elsewhere": "callbacks: '${aside}'",
    "not to be resolved": "callbacks: {a: {_target_: '${nowhere}.Spy'}}",
    "not in Hydra": "callbacks: {a: {_target_: hydra._internal.core_plugins.basic_launcher.nothing}}",
    "function of Hydra": "callbacks: {a: {_target_: hydra._internal.core_plugins.basic_launcher."
    "configure_log}}",
    "through Hydra": "callbacks: {a: {_target_: hydra.experimental.callbacks.pickle.loads}}",
    "no plugin": "launcher: {_target_: hydra_plugins.nowhere.Launcher}",
    "formatter": "job_logging: {formatters: {a: {(): spy.Spy}}}",
    "filter": "hydra_logging: {filters: {a: {(): spy.Spy}}}",
    "handler": "job_logging: {handlers: {a: {class: spy.Spy}}}",
    "through logging": "job_logging: {handlers: {a: {class: logging.os.system}}}",
    "stream": "job_logging: {handlers: {a: {class: logging.StreamHandler, stream: 'ext://spy.Spy'}}}",
}
REFUSED = r"hydra\.\w+\..* = .*: must be a class of Hydra, its plugins or logging"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working folder with a module that leaves a mark when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "spy.py").write_text(SPY)
    (tmp_path / "my" / "policy").mkdir(parents=True)
    return tmp_path


def options(here: Path, text: str) -> str:
    (here / "my" / "policy" / "mine.yaml").write_text(text)
    return f"hydra.searchpath=[file://{here / 'my'}]"


@pytest.mark.parametrize("named", NAMED.values(), ids=NAMED)
def test_classes_under_hydra_are_refused_before_they_are_imported(here: Path, named: str) -> None:
    aside = "aside: {a: {_target_: spy.Spy}}"
    config = OmegaConf.create(f"{aside}\nhydra:\n  run: {{dir: x}}\n  {named}\n")
    with pytest.raises(ConfigError, match=REFUSED):
        check_hydra(config.hydra)
    assert not (here / "attacked").exists()


COMMANDS = [
    ["sim", "-m", "policy=lru,mine", "hydra.sweep.dir=swept"],
    ["sweep", "policy=lru,mine", "sweep.dir=swept"],
    ["predict", "+policy=mine"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_says_so_in_one_line(
    here: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options(here, f"# @package _global_\npolicy: {{name: mine}}\nhydra: {{{NAMED['callback']}}}\n")
    assert cli.main([words[0], "--config-dir", "my", *words[1:]]) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith(
        f"greenroom {words[0]}: error: hydra.callbacks.a._target_ = spy.Spy: must"
    )
    assert "\n" not in told
    assert not (here / "attacked").exists()
    assert not list(here.glob("swept/*/*.json"))


def test_what_hydra_brings_is_let_through() -> None:
    good = [
        "hydra/job_logging=default",
        "hydra/hydra_logging=hydra_debug",
        "+hydra.callbacks.a._target_=hydra.experimental.callbacks.LogJobReturnCallback",
        "+hydra.job_logging.handlers.b.class=logging.handlers.RotatingFileHandler",
        "+hydra.callbacks.b=${hydra.callbacks}",  # leads back
    ]
    with composing():
        compose("config", good)


def test_a_pickle_of_an_earlier_run_is_not_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sim", "--experimental-rerun", "config.pickle"]) == 2
    assert "would load a pickle" in capsys.readouterr().err


# -- aliases -------------------------------------------------------------------------------------------


def bomb(levels: int = 60) -> str:
    """Return a policy whose aliases stand for 9 ** levels values."""
    lines = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join([POLICY + "a0: &a0 [x, x]", *lines, ""])


def test_a_bomb_ends_a_command_in_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options(here, bomb())
    assert cli.main(["sim", "--config-dir", "my", "policy=mine"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("greenroom sim: error: ")
    assert told.count("\n") == 1


def test_a_bomb_is_refused_wherever_a_policy_is_read(here: Path) -> None:
    search, file = options(here, bomb()), here / "my" / "policy" / "mine.yaml"
    (here / "alone.yaml").write_text(bomb())
    for read in (
        lambda: compose_config("config", [search, "policy=mine"]),
        lambda: compose_case(["+policy=mine"], ["my"]),
        lambda: compose_stages([search, "policy=mine"]),
        lambda: compose_policy(str(file), []),
        lambda: compose_policy("alone.yaml", []),
    ):
        with pytest.raises(ConfigError, match=r"yaml: its aliases .* stand for more than 10000"):
            read()
    assert Conf([here / "my"]).read("policy/mine") == {}  # Tab


def test_aliases_that_stand_for_little_are_read(here: Path) -> None:
    text = POLICY + "predictor: &a {_target_: x.Y, k: [1, 2]}\nprefetch: {<<: *a, l: *a}\n"
    search = options(here, text)
    plain = compose_config("config", [search, "policy=mine"])["policy"]
    assert plain["prefetch"]["l"] == plain["predictor"]
    check_aliases(here / "nowhere.yaml")
    for text in ("a: &a [*a]", "a: *b", "{", "# a & b * c\n"):  # whoever reads them complains
        (here / "odd.yaml").write_text(text)
        check_aliases(here / "odd.yaml")


def test_looking_for_aliases_costs_little() -> None:
    files = sorted((Path(__file__).parents[1] / "conf" / "policy").glob("*.yaml"))[:20]
    best = 1.0
    for _ in range(5):
        begin_s = perf_counter()
        for file in files:
            check_aliases(file)
        best = min(best, perf_counter() - begin_s)
    assert best < 0.005
