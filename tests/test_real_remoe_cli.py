"""``greenroom remoe``: a user's model from end to end, and mistakes in one line."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.text import Text  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from real.remoe_cli import main  # noqa: E402
from real.remoe_frontier import Point, _name_points  # noqa: E402
from real.remoe_gates import Gates, load_gates, save_gates  # noqa: E402
from real.remoe_record import eor_of_trace  # noqa: E402
from real.remoe_report import verdict  # noqa: E402
from real.remoe_run import judgement_of  # noqa: E402
from real.remoe_speed import with_changes  # noqa: E402
from real.remoe_subject import read_texts  # noqa: E402
from sim.plot_style import new_figure, styled  # noqa: E402
from tests.live_models import saved  # noqa: E402
from tests.moe_models import VOCAB, build  # noqa: E402
from tests.strategies import trace_of_ids  # noqa: E402
from traces.store import write_trace  # noqa: E402

ROOT = Path(__file__).parents[1]
FEW = (
    *("train.steps=2", "train.batch=2", "train.warm_up=1", "train.learning_rate=0.01"),
    *("evaluate.texts=3", "evaluate.slots=[2, 4]", "loss.lags=[1, 2]", "loss.window_tokens=4"),
    *("frontier.steps=2", "frontier.factors=[2.0]"),
)
SPEED = (
    *("speed.requests=3", "speed.new_tokens=6", "speed.replayed=[1, 3]", "speed.ratios=[0.5]"),
    *("speed.policies=[lru, saem]", "speed.real.model=tiny", "speed.real.ratios=[0.5]"),
    *("speed.real.requests=[1, 3]", "speed.real.length=[2, 4]", "speed.real.turn_steps=2"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folder")
    draw = np.random.default_rng(0)
    lines = [" ".join(map(str, draw.integers(3, VOCAB, size=12))) for _ in range(30)]
    (folder / "texts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return saved(build("qwen3_moe"), folder)


def run(model: Path, out: Path, *words: Any) -> int:
    texts = ["--texts", str(model / "texts.txt")]
    return main(["--model", str(model), *texts, "--out", str(out), *map(str, words)])


def test_a_users_model_from_training_to_speed(model: Path, tmp_path: Path, capsys: Any) -> None:
    """One folder: trained and judged, resumed, swept, recorded, simulated and run with actual copies."""
    out = tmp_path / "run"
    assert run(model, out, *FEW) == 0
    shown = capsys.readouterr()
    assert "EOR at lag 1" in shown.out
    assert "the control, cross entropy alone" in shown.out
    assert "remoe: step 2 of 2" in shown.err
    found = json.loads((out / "remoe.json").read_text())
    assert {*found["found"]} == {"before", "remoe", "control"}
    assert found["found"]["before"]["quality"]["num_texts"] == 3  # a tenth of thirty
    values, made = load_gates(out / "remoe" / "gates.safetensors")
    assert made["reuse"] == 0.15
    assert made["seed"] == 0
    assert len(values) == 2

    assert run(model, out, *FEW) == 2
    assert "holds a run already; --resume goes on with it" in capsys.readouterr().err
    assert run(model, out, "--resume", *FEW) == 0
    again, _ = load_gates(out / "remoe" / "gates.safetensors")
    assert all(torch.equal(again[name], values[name]) for name in values)

    gates = out / "remoe" / "gates.safetensors"
    assert run(model, tmp_path / "judged", "--gates", gates, "--save-model", *FEW) == 0
    judged = json.loads((tmp_path / "judged" / "remoe.json").read_text())["found"]
    assert judged == {name: found["found"][name] for name in ("before", "remoe")}
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "judged" / "model").state_dict()
    assert all(torch.equal(kept[name], values[name]) for name in values)

    capsys.readouterr()
    assert run(model, out, "--frontier", *FEW) == 0
    with (out / "frontier.csv").open(encoding="utf-8") as file:
        assert [row["point"] for row in csv.DictReader(file)] == ["before", "control", "x2"]
    assert (out / "remoe_frontier.png").stat().st_size > 10_000
    assert "step" in capsys.readouterr().err
    assert run(model, out, "--frontier", *FEW) == 0
    assert ": step" not in capsys.readouterr().err  # nothing was trained again

    assert run(model, out, "--speed", *FEW, *SPEED) == 0
    speed = json.loads((out / "speed.json").read_text())
    places = {(row["where"], row["policy"], row["gates"]) for row in speed["rows"]}
    names = ("before", "remoe", "control")
    for where in ("pcie", "storage", "real storage"):
        assert {(where, policy, name) for policy in ("lru", "saem") for name in names} <= places
    assert ("storage", "lru", "transform") in places
    assert speed["live"] is None
    assert all(row["tpot_ns_mean"] > 0 for row in speed["rows"])
    assert eor_of_trace(out / "remoe.parquet", [1, 3]) == speed["eor"]["remoe"]
    assert "The paper: vLLM" in capsys.readouterr().out


def test_names_of_points_that_lie_close_do_not_overlap() -> None:
    factors: list[float | None] = [None, 0.0, 0.25, 1.0, 4.0]
    points = [Point(factor, cast(Any, None)) for factor in factors]
    with styled():
        figure, axes = new_figure(3.5, 2.3)
        eor = [20.0, 20.3, 19.9, 20.3, 50.0]
        axes.plot(eor, eor)
        _name_points(axes, eor, points)
        FigureCanvasAgg(figure).draw()
        boxes = [Text.get_window_extent(text) for text in axes.texts]  # without their lines
    assert [text.get_text() for text in axes.texts] == ["x0.25", "before", "control", "x1", "x4"]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["loss.resue=1"], "loss.resue: unknown key; did you mean 'loss.reuse'?"),
        (["loss.reuse=-1"], "loss.reuse = -1: must be a number >= 0"),
        (["loss.lags=[]"], "loss.lags = []: must be a list of whole numbers >= 1"),
        (["train.dtype=int8"], "train.dtype = int8: must be 'float32', 'bfloat16' or 'float16'"),
        (["speed.replayed=[5, 5]"], "speed.replayed = [5, 5]: must be [first, last + 1]"),
        (["speed.real.turn_steps=0"], "speed.real.turn_steps = 0: must be a whole number >= 1"),
        (["--model", "nowhere"], "--model nowhere: must be 'tiny' or a folder"),
        (["--texts", "texts.txt"], "--texts texts.txt: the bundled model has texts of its own"),
        (["--model", "."], "--texts is missing: a model from a folder needs texts"),
        (["train.device=meta"], "train.device = meta: must be a device that computes"),
        (["--resume", "--gates", "x"], "--resume: only without --gates"),
        (["--save-model", "--speed"], "--save-model: only without --frontier and --speed"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], told: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["--out", str(tmp_path / "out"), *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert told in shown.err
    assert shown.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 1 is not JSON"),
        ("[1, 2.5]", "line 1: must be a text, a list of token ids, or an object with 'text'"),
        ('{"prompt": "1"}', "line 1: must be a text, a list of token ids"),
        ('"4 5 6"', "error: --texts: 1 texts to train on of 2 tokens or more: must be at least 8"),
        ("[3, 61]", "texts.jsonl line 1: token id 61: must be in 0..60"),
        ("[-1, 3]", "texts.jsonl line 1: token id -1: must be in 0..60"),
    ],
)
def test_texts_that_cannot_be_used(
    line: str, told: str, model: Path, tmp_path: Path, capsys: Any
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text(line + "\n", encoding="utf-8")
    out = tmp_path / "out"
    assert main(["--model", str(model), "--texts", str(texts), "--out", str(out)]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--resume", "--speed"])
def test_a_run_to_go_on_with_must_be_named(flag: str, capsys: Any) -> None:
    assert main([flag]) == 2
    assert f"{flag}: --out is missing" in capsys.readouterr().err


def test_a_text_may_hold_any_separator_of_lines_but_that_of_files(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('"1 2\u20283"\r\n\n[4, 5]\r\n', encoding="utf-8-sig")
    seen: list[str] = []

    def tokenizer(text: str) -> dict[str, list[int]]:
        seen.append(text)
        return {"input_ids": [7]}

    assert read_texts(path, tokenizer, VOCAB) == [[7], [4, 5]]
    assert seen == ["1 2\u20283"]


def test_a_checkpoint_cut_short_is_one_line_and_leaves_no_folder(
    model: Path, tmp_path: Path, capsys: Any
) -> None:
    torn = Path(shutil.copytree(model, tmp_path / "torn"))
    for file in torn.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:300])
    assert run(torn, tmp_path / "out", *FEW) == 2
    shown = capsys.readouterr().err
    assert "cannot load the model: " in shown
    assert shown.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_run_is_of_its_texts_and_weights_and_is_not_lost(
    model: Path, tmp_path: Path, capsys: Any
) -> None:
    """Other texts or weights behind the same names are another run; gates given do not overwrite one."""
    out = tmp_path / "run"
    assert run(model, out, *FEW) == 0
    folder = Path(shutil.copytree(model, tmp_path / "a" / model.name))
    texts = (folder / "texts.txt").read_text(encoding="utf-8").splitlines()
    (folder / "texts.txt").write_text("\n".join(texts[::-1]) + "\n", encoding="utf-8")
    assert run(folder, out, "--resume", *FEW) == 2
    assert "is of a run with other settings; texts_sha256 was" in capsys.readouterr().err
    saved(build("qwen3_moe", seed=1), Path(shutil.copytree(model, tmp_path / "b" / model.name)))
    assert run(tmp_path / "b" / model.name, out, "--resume", *FEW) == 2
    assert "is of a run with other settings; weights_sha256 was" in capsys.readouterr().err

    gates = out / "control" / "gates.safetensors"
    assert run(model, out, "--gates", gates, *FEW) == 2
    assert "holds a run, whose gates would be lost" in capsys.readouterr().err


def test_gains_are_told_where_nothing_was_reused_and_texts_are_short(
    model: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "t.jsonl").write_text("[3, 4]\n" * 20, encoding="utf-8")
    out = tmp_path / "out"
    words = ["--model", str(model), "--texts", str(tmp_path / "t.jsonl"), "--out", str(out)]
    assert main([*words, *FEW]) == 0
    assert "nan" not in capsys.readouterr().out
    assert "NaN" not in (out / "remoe.json").read_text()
    found = json.loads((out / "remoe.json").read_text())["found"]
    assert {*found["before"]["quality"]["eor_by_lag"]} == {"1"}
    before = judgement_of(found["before"])
    none = replace(before, quality=replace(before.quality, eor=(0.0, 0.0)))
    assert verdict({"before": none, "remoe": none})[0].startswith("EOR 0.0 % from none (the paper")


def test_gates_of_other_weights_are_refused(model: Path, tmp_path: Path, capsys: Any) -> None:
    """Gates tell of which weights they were trained beside: in another dtype they are others."""
    given = Gates(build("qwen3_moe", seed=1))
    made = {"rest_sha256": given.digest_of_the_rest()}
    save_gates(tmp_path / "g.safetensors", given.values(), made)
    assert run(model, tmp_path / "out", "--gates", tmp_path / "g.safetensors", *FEW) == 2
    assert "were trained for other weights than those of folder" in capsys.readouterr().err


def test_speed_needs_a_finished_run(model: Path, tmp_path: Path, capsys: Any) -> None:
    assert run(model, tmp_path, "--speed", *FEW, *SPEED) == 2
    shown = capsys.readouterr().err
    assert "gates.safetensors: cannot be read" in shown
    assert "recording" not in shown  # which takes minutes


def test_changes_are_against_the_same_run_with_the_gates_before() -> None:
    rows = [
        {"where": "a", "policy": "lru", "ratio": ratio, "gates": name, "tpot_ns_mean": time_ns}
        for ratio, name, time_ns in [(0.1, "remoe", 80.0), (0.1, "before", 100.0)]
    ]
    rows += [{**rows[0], "ratio": 0.5, "gates": "before", "tpot_ns_mean": 10.0}]
    assert [row["change"] for row in with_changes(rows)] == pytest.approx([-0.2, 0.0, 0.0])


def test_eor_of_a_trace_counts_decoded_tokens_of_the_requests_asked_for(tmp_path: Path) -> None:
    ids = np.array([[[0, 1]], [[0, 1]], [[0, 2]], [[4, 5]], [[4, 5]], [[5, 6]]], dtype=np.uint16)
    path = tmp_path / "t.parquet"
    write_trace(path, trace_of_ids(ids, [(1, 2), (2, 1)], 8))
    assert eor_of_trace(path) == pytest.approx((1.0 + 0.5 + 0.5) / 3)
    assert eor_of_trace(path, [1, 2]) == pytest.approx(0.5)


def test_the_commands_help_loads_no_torch() -> None:
    code = "import sys; from real.remoe_cli import make_parser; make_parser(); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
