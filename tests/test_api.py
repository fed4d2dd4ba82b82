"""The Python API: its results are the command line's, and a mistake is one line."""

import doctest
import gc
import inspect
import json
import subprocess
import sys
from html import unescape
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import greenroom
from sim import advise_cli, api, predict_cli, stats_cli
from sim.api_arguments import KINDS, OWN_WORDS
from sim.policies.base import CachePolicy, PlacementPolicy
from sim.types import Service

SHORT = ("workload.requests=[24,25]", "workload.length=[8,24]", "output.belady=false")


class Oldest(CachePolicy):
    """FIFO by another name."""

    def __init__(self, spare: int = 0) -> None:
        self.order: list[int] = []
        self.spare = spare

    def on_insert(self, key, view):
        self.order.append(key)

    def on_evict(self, key):
        self.order.remove(key)

    def choose_victim(self, evictable, view):
        found = [key for key in self.order if evictable(key)]
        return found[min(self.spare, len(found) - 1)] if found else None


class AllOnCPU(PlacementPolicy):
    """Nothing is loaded."""

    def place(self, work, view):
        return [Service.CPU] * len(work)


def _without(row: dict, *names: str) -> dict:
    return {key: value for key, value in row.items() if key not in names}


# -- what is there ---------------------------------------------------------------------------------


def test_all_that_is_public_is_listed():
    ours = ("greenroom", "sim", "traces", "real")
    public = [
        name
        for name, value in vars(greenroom).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "").partition(".")[0] in ours
        and (inspect.isclass(value) or inspect.isfunction(value))
    ]
    assert sorted(public) == sorted(greenroom.__all__)


@pytest.mark.parametrize("name", [n for n in greenroom.__all__ if n.islower()])
def test_every_function_is_documented_and_annotated(name):
    function = getattr(greenroom, name)
    signature = inspect.signature(function)
    assert function.__doc__
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())


def test_importing_it_is_cheap(tmp_path):
    heavy = "torch", "pandas", "matplotlib", "pyarrow", "hydra", "transformers"
    code = f"import greenroom, sys; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert found.stdout.strip() == "[]"


# -- the same as the command line ------------------------------------------------------------------


def test_a_run_is_that_of_the_command_line(tmp_path):
    words = ["cache.ratio=0.25", *SHORT, "output.events=true"]
    command = [sys.executable, "-m", "sim.cli", "sim", "policy=saem", *words]
    command.append(f"hydra.run.dir={tmp_path}/theirs")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    run = greenroom.simulate(*words, policy="saem", folder=tmp_path / "ours")
    theirs = json.loads((tmp_path / "theirs" / "summary.json").read_text())
    assert run.summary["overrides"].pop("policy") == theirs["overrides"].pop("policy")
    assert run.summary == theirs
    names = {file.name for file in (tmp_path / "theirs").glob("*.*") if file.is_file()}
    assert {file.name for file in (tmp_path / "ours").iterdir()} == names
    for name in names - {"summary.json"}:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


def test_tables_have_the_columns_and_words_of_the_files():
    run = greenroom.simulate(*SHORT, policy="lru", events=True)
    assert run.steps["phase"].iloc[0] == "prefill"
    assert set(run.events["lane"]) >= {"gpu", "h2d"}
    assert run.requests["outcome"].tolist() == ["done"]
    assert run.steps["num_tokens"].sum() == 8 + 23  # the last token's own step is not needed
    assert run.summary["output_tokens"] == run.requests["output_tokens"].sum()
    assert len(run.counters) > 0
    assert run.config["policy"]["name"] == "lru"


def test_the_rows_of_a_sweep_are_those_of_its_runs():
    sizes = ("0.125", "0.5")
    sweep = greenroom.sweep(
        *SHORT, f"cache.ratio={','.join(sizes)}", policies=["lru", "fiddler"], workers=2
    )
    assert [(row["policy"], row["cache_ratio"]) for row in sweep.rows] == [
        (policy, float(size)) for policy in ("lru", "fiddler") for size in sizes
    ]
    for row in sweep.rows:
        size = row["overrides"]["cache.ratio"]
        own = greenroom.simulate(*SHORT, f"cache.ratio={size}", policy=row["policy"]).summary
        assert _without(row, "point", "overrides") == _without(own, "overrides")
    assert sweep.failed == []
    assert sweep.table["tokens_per_s"].tolist() == [row["tokens_per_s"] for row in sweep.rows]
    assert sweep.table["provenance.trace_kind"].unique().tolist() == ["recorded"]


def test_prediction_and_advice_are_those_of_the_command_line(tmp_path, capsys):
    question = ["model=gpt_oss_20b", "machine=rtx3090"]
    placed = [*question, "placement.cpu_layers=3"]
    found = greenroom.predict(*placed)
    assert predict_cli.main([*placed, "--json", "-"]) == 0
    assert found.answer == json.loads(capsys.readouterr().out)
    assert predict_cli.main(placed) == 0
    assert repr(found) == capsys.readouterr().out
    assert max(map(len, unescape(found._repr_html_()).splitlines()[1:])) < 110
    advice = greenroom.advise(*question, engines=["llama_cpp"], quality_floor=4.0)
    assert advise_cli.main([*question, "--engines", "llama_cpp", "--out", str(tmp_path)]) == 0
    assert advice.summary == json.loads((tmp_path / "advice.json").read_text())
    theirs = pd.read_csv(tmp_path / "points.csv", keep_default_na=False)
    assert advice.table["settings"].tolist() == theirs["settings"].tolist()
    assert "llama_cpp" in repr(advice)


def test_stats_are_those_of_the_command_line(capsys):
    found = greenroom.stats("tiny_logits", phase="prefill", curve_tokens=200)
    assert stats_cli.main(["tiny_logits", "--phase", "prefill", "--curve-tokens", "200"]) == 0
    assert repr(found) == capsys.readouterr().out
    assert found.verdict.index.name == "question"


# -- traces ----------------------------------------------------------------------------------------


def test_a_trace_in_memory_is_replayed_as_its_file_is():
    trace = greenroom.load_trace("tiny")
    named = greenroom.simulate(*SHORT, policy="lru", trace="tiny").summary
    held = greenroom.simulate(*SHORT, policy="lru", trace=trace).summary
    assert held["trace"].startswith("greenroom_tiny_")
    assert _without(held, "trace", "overrides") == _without(named, "trace", "overrides")


def test_what_was_done_to_a_trace_counts():
    trace = greenroom.load_trace("tiny")
    some = trace.take((trace.request_id >= 20) & (trace.request_id < 22))
    given = ("workload.length=[8,24]", "calibration.requests=[0,1]", "output.belady=false")
    run = greenroom.simulate(*given, "workload.requests=[1,2]", policy="lru", trace=some)
    whole = greenroom.simulate(
        *given, "workload.requests=[21,22]", "calibration.requests=[20,21]", policy="lru"
    )
    assert run.summary["tokens_per_s"] == whole.summary["tokens_per_s"]
    other = trace.take(trace.request_id == 23)
    again = greenroom.simulate(
        *given,
        "workload.requests=[0,1]",
        "calibration.allow_overlap=true",
        policy="lru",
        trace=other,
    )
    assert again.summary["tokens_per_s"] != run.summary["tokens_per_s"]


def test_a_trace_shows_itself_in_two_lines():
    shown = repr(greenroom.load_trace("tiny"))
    assert shown.count("\n") == 1
    assert "96 requests, 46077 tokens, 8 MoE layers of 32 experts, top-4" in shown


# -- policies of one's own -------------------------------------------------------------------------


def test_a_class_is_a_policy():
    ours = greenroom.simulate(*SHORT, "cache.ratio=0.25", policy=Oldest).summary
    theirs = greenroom.simulate(*SHORT, "cache.ratio=0.25", policy="fifo").summary
    assert ours["policy"] == "oldest"
    assert ours["tokens_per_s"] == theirs["tokens_per_s"]
    assert ours["h2d_bytes"] == theirs["h2d_bytes"]


def test_a_mapping_gives_parameters_and_other_parts():
    spare = {"name": "spare", "cache": {"_target_": Oldest, "spare": 3}}
    on_cpu = {"name": "on_cpu", "placement": AllOnCPU}
    found = greenroom.compare(
        *SHORT, "cache.ratio=0.25,0.5", policies=["lru", Oldest, spare, on_cpu], engine="serial"
    )
    hits = found.by_setting("hit_rate")
    assert hits.columns.tolist() == ["lru", "oldest", "spare", "on_cpu"]
    assert hits.index.tolist() == [0.25, 0.5]
    assert (hits["oldest"] != hits["spare"]).any()
    assert (found.by_setting("h2d_bytes")["on_cpu"] == 0).all()
    assert found.baseline == "lru"
    assert found.league.loc["lru", "mean"] == 1.0
    speeds = found.by_setting()
    ratios = speeds["oldest"] / speeds["lru"]
    assert found.league.loc["oldest", ["worst", "best"]].tolist() == [ratios.min(), ratios.max()]


def test_a_part_alone_goes_with_lru():
    run = greenroom.simulate(*SHORT, policy=AllOnCPU)
    assert run.config["policy"]["cache"] == {"_target_": "sim.policies.classic.LRU"}
    assert run.summary["on_cpu"] > 0


def test_check_policy_tells_good_from_bad():
    class_of_main = greenroom.check_policy(Oldest)
    assert set(class_of_main["verdict"]) <= {"ok", "does not apply"}
    broken = greenroom.check_policy({"name": "broken", "cache": Unruly})
    assert broken["verdict"].iloc[-1] == "fails"


class Unruly(Oldest):
    def choose_victim(self, evictable, view):
        return self.order[0]


SCRIPT = """
import greenroom
from sim.policies.classic import LRU

class Mine(LRU):
    pass

given = {given}
found = greenroom.compare(*given, policies=["lru", Mine, "fifo"])
print(found.league.loc["mine", "mean"], len(found.table))
try:
    greenroom.sweep(*given, policies=[Mine], engine="pool")
except greenroom.ConfigError as error:
    print(error)
folder = "kept"
greenroom.sweep(*given, policies=[Mine], folder=folder)
print(len(greenroom.sweep(*given, policies=[Mine], folder=folder).rows))
"""


def test_classes_of_a_script_are_swept_in_its_own_process(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT.format(given=repr([*SHORT, "cache.ratio=0.25,0.5"])))
    found = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    lines = found.stdout.splitlines()
    assert lines[0] == "1.0 6"
    assert lines[1].startswith("engine = pool: Mine exists in this process only")
    assert lines[2] == "2"
    assert found.stderr == ""


def test_a_class_that_changed_spoils_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "Oldest", Oldest, raising=False)
    monkeypatch.setattr(Oldest, "__module__", "__main__")
    given = {"policies": [Oldest], "folder": tmp_path / "kept"}
    first = greenroom.sweep(*SHORT, "cache.ratio=0.25", **given)
    assert greenroom.sweep(*SHORT, "cache.ratio=0.25", **given).rows == first.rows
    monkeypatch.setattr(api, "source_of", lambda kind: "other code")
    with pytest.raises(greenroom.ConfigError, match="Oldest has changed since the sweep there"):
        greenroom.sweep(*SHORT, "cache.ratio=0.25", **given)


# -- folders ---------------------------------------------------------------------------------------


def test_files_live_as_long_as_the_result_unless_a_folder_is_given(tmp_path):
    run = greenroom.simulate(*SHORT, policy="lru")
    folder = run.folder
    assert (folder / "summary.json").is_file()
    del run
    gc.collect()
    assert not folder.exists()
    assert greenroom.simulate(*SHORT, policy="lru", folder=tmp_path / "kept").folder.is_dir()
    gc.collect()
    assert (tmp_path / "kept" / "steps.parquet").is_file()


def test_a_sweep_goes_on_in_its_folder(tmp_path):
    given = {"policies": ["lru", "lfu"], "folder": tmp_path / "kept", "engine": "serial"}
    first = greenroom.sweep(*SHORT, **given)
    (tmp_path / "kept" / "1" / "summary.json").unlink()
    before = (tmp_path / "kept" / "0" / "summary.json").stat().st_mtime_ns
    again = greenroom.sweep(*SHORT, **given)
    assert again.rows == first.rows
    assert (tmp_path / "kept" / "0" / "summary.json").stat().st_mtime_ns == before


def test_a_point_that_fails_is_told_and_stops_nobody():
    found = greenroom.sweep(*SHORT, "cache.ratio=0.25,2", policies=["lru"], engine="serial")
    assert len(found.rows) == 1
    assert "must be a number in [0, 1]" in found.failed[0]["error"]
    assert "failed" in repr(found)
    assert "must be a number in [0, 1]" in found._repr_html_()


def test_options_of_ones_own_folder(tmp_path):
    (tmp_path / "policy").mkdir()
    text = "name: third\nscope: layer\ncache:\n  _target_: sim.policies.classic.FIFO\n"
    (tmp_path / "policy" / "third.yaml").write_text(text)
    run = greenroom.simulate(*SHORT, policy="third", config_dirs=[tmp_path])
    assert run.summary["policy"] == "third"
    both = greenroom.sweep(
        *SHORT, policies=["third", Oldest], config_dirs=[tmp_path], engine="serial"
    )
    assert both.rows[0]["tokens_per_s"] == both.rows[1]["tokens_per_s"]


# -- how it looks ----------------------------------------------------------------------------------


def test_a_figure_shows_itself_and_leaves_pyplot_alone():
    code = f"""
import sys, greenroom
run = greenroom.simulate(*{SHORT!r}, policy="lru", events=True)
figure = run.plot("stall_breakdown")
print(figure._repr_png_()[:4], "matplotlib.pyplot" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == r"b'\x89PNG' False"


def test_results_show_what_counts():
    run = greenroom.simulate(*SHORT, policy="buddymoe")
    assert "tokens_per_s" in run._repr_html_()
    assert all(note in unescape(run._repr_html_()) for note in run.summary["notes"])
    assert repr(run).startswith("Run(policy=buddymoe, trace=tiny, model=qwen3_30b_a3b")
    assert f"tokens_per_s={run.summary['tokens_per_s']:.4g}, " in repr(run)
    assert len(run.ledger) > 0


def _shown(call) -> str:
    with pytest.raises(greenroom.ConfigError) as caught:
        call()
    lines = caught.value._render_traceback_()
    assert len(lines) == 2
    assert lines[0].startswith("in line ")
    assert lines[1] == f"ConfigError: {caught.value}"
    return str(caught.value)


MISTAKES = {
    "misspelled group": (lambda: greenroom.simulate("polcy=lru"), "did you mean 'policy'?"),
    "misspelled key": (lambda: greenroom.simulate("cache.ratios=1"), "did you mean 'cache.ratio'?"),
    "misspelled parameter": (lambda: greenroom.simulate(polcy="lru"), "did you mean 'policy'?"),
    "misspelled option": (lambda: greenroom.simulate(policy="lruu"), "did you mean 'lru'?"),
    "wrong value": (lambda: greenroom.simulate("cache.ratio=2"), "must be a number in [0, 1]"),
    "several values": (lambda: greenroom.simulate("cache.ratio=0.1,0.2"), "greenroom.sweep"),
    "no override": (lambda: greenroom.simulate("lru"), "lru"),
    "no such trace": (lambda: greenroom.load_trace("tinny"), "did you mean 'tiny'?"),
    "no such file": (lambda: greenroom.load_trace("no/such.parquet"), "no such file"),
    "no trace": (lambda: greenroom.simulate(trace=3), "must be a name, a path"),
    "no policy": (lambda: greenroom.simulate(policy=3), "must be a name, a class of yours"),
    "no part": (lambda: greenroom.simulate(policy=dict), "must be derived from one of CachePolicy"),
    "not at the top": (
        lambda: greenroom.simulate(policy=type("Inner", (Oldest,), {"__qualname__": "f.Inner"})),
        "must be defined at the top",
    ),
    "another by now": (
        lambda: greenroom.simulate(policy=type("Oldest", (CachePolicy,), {})),
        "run its cell again",
    ),
    "taken": (lambda: greenroom.simulate(policy={"name": "lru"}), "one of Greenroom's own"),
    "odd name": (lambda: greenroom.simulate(policy={"name": "my policy"}), "underscores"),
    "twice": (lambda: greenroom.sweep(policies=["lru", "lru"]), "is there twice"),
    "a policy by parameter and by override": (
        lambda: greenroom.compare("policy=lfu", policies=["lru", "saem"]),
        "policy=lfu: the parameter policy or policies is for that",
    ),
    "a trace by parameter and by override": (
        lambda: greenroom.simulate("trace=tiny_logits", trace="tiny"),
        "trace=tiny_logits: the parameter trace is for that",
    ),
    "a folder by override": (
        lambda: greenroom.sweep("sweep.dir=x", policies=["lru"]),
        "sweep.dir=x: the parameter folder is for that",
    ),
    "a dry run": (
        lambda: greenroom.sweep(policies=["lru"], dry_run=True),
        "sweep.dry_run = True: only the command",
    ),
    "misspelled setting": (lambda: greenroom.sweep(serch="grid"), "did you mean 'search'?"),
    "misspelled engine": (lambda: greenroom.sweep(engine="poll"), "did you mean 'pool'?"),
    "wrong setting": (lambda: greenroom.sweep(points=0), "sweep.points = 0"),
    "all fail": (
        lambda: greenroom.sweep("workload.requests=[9,99]", policies=["lru"], engine="serial"),
        "all 1 points failed, the first one so: workload.requests = [9, 99]",
    ),
    "one policy": (lambda: greenroom.compare(policies=["lru"]), "at least two"),
    "misspelled policies": (lambda: greenroom.compare(plicies=["lru"]), "did you mean 'policies'?"),
    "other baseline": (
        lambda: greenroom.compare(policies=["lru", "lfu"], baseline="lruu"),
        "did you mean 'lru'?",
    ),
    "prediction": (lambda: greenroom.predict("modl=tiny"), "did you mean 'model'?"),
    "scheme": (lambda: greenroom.predict(quant="Q4_K_N"), "did you mean"),
    "advice": (lambda: greenroom.advise("engine=llama_cpp"), "is what is searched"),
    "phase": (lambda: greenroom.stats(phase="decod"), "did you mean 'decode'?"),
    "curve": (lambda: greenroom.stats(curve_tokens=0), "must be >= 1"),
    "a number as text": (
        lambda: greenroom.stats(curve_tokens="9"),
        "curve_tokens = '9': must be a",
    ),
    "settings as a list": (
        lambda: greenroom.simulate(["cache.ratio=0.25"]),
        "overrides = ['cache.ratio=0.25']: must be a text each",
    ),
    "settings as keywords": (
        lambda: greenroom.predict(model="gpt_oss_120b"),
        "settings are texts, as 'model=gpt_oss_120b'",
    ),
    "a policy as policies": (lambda: greenroom.sweep(policies="lru"), "must be a list of policies"),
    "one too many": (lambda: greenroom.load_trace("tiny", "x"), "load_trace(): too many"),
    "one too few": (lambda: greenroom.check_policy(), "missing a required argument: 'policy'"),
    "a folder as folders": (
        lambda: greenroom.simulate(config_dirs="my"),
        "must be a list of paths",
    ),
    "no folder of options": (
        lambda: greenroom.simulate(config_dirs=["my"]),
        "config_dirs = my: no such folder",
    ),
    "a file as folder": (
        lambda: greenroom.simulate(folder=__file__),
        "is a file: must be a folder",
    ),
    "a float as count": (
        lambda: greenroom.advise(context_tokens=1.5),
        "must be a whole number, or",
    ),
    "flag as parameter": (lambda: greenroom.advise(reserve=-1), "reserve = -1: must be in [0, "),
    "no value of a setting": (
        lambda: greenroom.sweep(seed=object()),
        "seed = object: must be a text, a number, a list or None",
    ),
    "misspelled own setting": (
        lambda: greenroom.compare(policies=["lru", "lfu"], basline="lru"),
        "did you mean 'baseline'?",
    ),
    "several machines": (
        lambda: greenroom.predict("machine=rtx3090,rtx4090"),
        "machine=rtx3090,rtx4090: several values: must be one",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name):
    call, words = MISTAKES[name]
    told = _shown(call)
    assert words in told
    assert "\n" not in told


@pytest.mark.parametrize("name", [n for n in greenroom.__all__ if n != "Validated"])
def test_every_argument_is_looked_at(name):
    """A new annotation needs a kind, or is looked at where the argument is used."""
    thing = getattr(greenroom, name)
    methods = vars(thing).values() if inspect.isclass(thing) else [thing]
    for function in (one for one in methods if hasattr(one, "__wrapped__")):
        given = list(inspect.signature(function).parameters.values())
        kinds = {one.annotation for one in given if one.name != "self"}
        assert kinds <= {*KINDS, *OWN_WORDS}


def test_whole_numbers_may_be_numpys():
    sweep = greenroom.sweep(*SHORT, policies=["fifo"], engine="serial", chunk=np.int64(1))
    assert len(sweep.rows) == 1


def test_a_result_tells_of_its_mistakes_too():
    run = greenroom.simulate(*SHORT, policy="lru")
    assert "simulate(..., events=True) does" in _shown(lambda: run.events)
    assert "did you mean 'steps'?" in _shown(lambda: run.read("step"))
    assert "did you mean 'stall_breakdown'?" in _shown(lambda: run.plot("stal_breakdown"))
    assert "did you mean 'layer'?" in _shown(lambda: run.plot("heatmap", layr=1))
    sweep = greenroom.sweep(*SHORT, policies=["fifo"], engine="serial")
    assert "did you mean 'hit_rate'?" in _shown(lambda: sweep.by_setting("hit_rat"))
    assert "must be one of fifo" in _shown(sweep.league)
    assert "did you mean 'fifo'?" in _shown(lambda: sweep.league("fifoo"))


def test_validate_tells_of_a_mistake():
    pytest.importorskip("torch")
    assert "did you mean 'ram'?" in _shown(lambda: greenroom.validate(tiers=["rum"]))
    assert "did you mean 'policies'?" in _shown(lambda: greenroom.validate(policy=["lru"]))


def test_a_defect_is_no_mistake():
    with pytest.raises(ZeroDivisionError):
        greenroom.simulate(*SHORT, policy=Defect)


class Defect(Oldest):
    def choose_victim(self, evictable, view):
        return 1 // 0


@pytest.mark.parametrize("name", sorted(set(greenroom.__all__) - {"validate"}))
def test_the_example_of_a_function_runs(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    thing = getattr(greenroom, name)
    found = doctest.DocTestFinder(recurse=False).find(thing, name, globs={"greenroom": greenroom})
    examples = sum(len(one.examples) for one in found)
    assert examples or isinstance(thing, type), "a function has an example"
    runner = doctest.DocTestRunner(verbose=False)
    for one in found:
        runner.run(one)
    assert runner.summarize(verbose=False).failed == 0
    assert list(tmp_path.iterdir()) == []


def test_the_documented_example_runs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = "".join(
        line.removeprefix("    ") + "\n"
        for line in str(greenroom.__doc__).splitlines()
        if line.startswith("    ")
    )
    text = text.replace('"cache.ratio', f'*{SHORT!r}, "cache.ratio')
    exec(compile(text, "example", "exec"), {})
    assert list(Path(tmp_path).iterdir()) == []


def test_numpys_values_and_generators_are_taken(tmp_path):
    few = ["workload.requests=[24,25]", "workload.length=[2,2]", "output.belady=false"]
    run = greenroom.simulate(*few, events=np.True_, config_dirs=(one for one in [tmp_path]))
    assert (run.folder / "events.parquet").exists()
    lfu = {"_target_": "sim.policies.classic.LFU", "decay": np.float32(0.5)}
    assert (
        greenroom.simulate(*few, policy={"name": "mine", "cache": lfu}).summary["policy"] == "mine"
    )
    both = np.array(["lru", "lfu"])
    given = {"engine": "serial", "tables": np.True_, "strikes": np.int64(2), "progress": False}
    for policies in (both, (str(one) for one in both), dict.fromkeys(both).keys()):
        found = greenroom.compare(*few, policies=policies, baseline=both[1], **given)
        assert found.baseline == "lfu"
        assert set(found.league.index) == {"lru", "lfu"}


@pytest.mark.parametrize("name", ["a\\b", "it's", "it\\'s", "end\\", 'quo"te, = {}'])
def test_a_folder_may_be_called_anything(name, tmp_path):
    few = ["workload.requests=[24,25]", "workload.length=[2,2]", "output.belady=false"]
    folder, own = tmp_path / name, tmp_path / f"own{name}"
    (own / "policy").mkdir(parents=True)
    source = Path(greenroom.__file__).parent / "conf" / "policy" / "lru.yaml"
    (own / "policy" / "mine.yaml").write_text(source.read_text())
    found = greenroom.sweep(
        *few, "policy=mine", folder=folder, config_dirs=[own], engine="serial", progress=False
    )
    assert found.folder == folder
    assert (folder / "results.csv").exists()
