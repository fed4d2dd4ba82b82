"""``greenroom record --url``: a trace of a running engine, and one line for every mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stub_engine import MOE_LAYERS, NUM_EXPERTS, NUM_LAYERS, TOP_K, Stub, routing, sequence

from sim.record_cli import main
from traces.store import read_trace

SHAPE = ["--num-hidden-layers", NUM_LAYERS, "--top-k", TOP_K, "--num-experts", NUM_EXPERTS]
CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": NUM_LAYERS,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 200,
    "tie_word_embeddings": False,
}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('[5, 6, 7]\n{"tokens": [8, 9]}\n{"prompt": [10]}\n', encoding="utf-8")
    return path


def run(*words: Any) -> int:
    return main([str(word) for word in words])


def test_a_trace_of_sglang(prompts: Path, tmp_path: Path, capsys: Any) -> None:
    out, config = tmp_path / "out.parquet", tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG), encoding="utf-8")
    with Stub("sglang") as stub:
        code = run(
            *("--url", stub.url, "--engine", "sglang", "--prompts", prompts, "--out", out),
            *("--config", config, "--max-new-tokens", 4, "--requests", 2, "--licence", "MIT"),
        )
    streams = capsys.readouterr()
    assert (code, streams.out) == (0, f"{out}: 11 rows of 2 requests\n")
    assert "2 of 2 requests, 11 rows" in streams.err
    trace = read_trace(out)
    expected = [routing(sequence(ids, 4)) for ids in ([5, 6, 7], [8, 9])]
    wanted = np.concatenate(expected)[:, list(MOE_LAYERS)]
    np.testing.assert_array_equal(trace.expert_ids, wanted)
    assert trace.meta.layer_indices == MOE_LAYERS
    assert (trace.meta.model, trace.meta.licence) == ("qwen3_moe", "MIT")
    assert trace.meta.hidden_size == 64
    assert not out.with_name("out.parquet.partial").exists()
    assert str(tmp_path) not in trace.meta.to_json()


def test_a_killed_run_goes_on(prompts: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.parquet"
    words = ["--engine", "vllm", "--prompts", prompts, "--out", out, "--max-new-tokens", 4, *SHAPE]
    with Stub("vllm", faults=deque([None, None, "http 400"])) as stub:
        common = [f"--url={stub.url}", *words, "--concurrency", 1]
        assert run(*common) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("greenroom record: error: prompt 1: http://127.0.0.1:")
        assert line.endswith("HTTP 400: not now")
        assert not out.exists()
        before = len(stub.generations)
        assert run(*common) == 0
        assert len(stub.generations) == before + 2
    trace = read_trace(out)
    assert trace.token_id[trace.request_id == 2].tolist() == sequence([10], 4)[:-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "prompts.jsonl"]


MISTAKES = {
    "engine": (["--engine", "vlm"], "engine is 'vlm': must be one of sglang, vllm; did you mean"),
    "interface": (["--interface", "native"], "interface of vllm is 'native'"),
    "url": (["--url", "localhost:1"], "url is 'localhost:1': must be http://host:port"),
    "not parquet": (["--out", "x.csv"], "must end in .parquet"),
    "no prompts": (["--prompts", "nowhere.jsonl"], "cannot read nowhere.jsonl"),
    "too many": (["--requests", "9"], "has 3 prompts: must have 9"),
    "no number": (["--requests", "many"], "--requests = many: must be a whole number"),
    "unknown option": (["--engin", "vllm", "--loglts"], "--loglts: no such option"),
    "none": (["--requests", "0"], "--requests is 0"),
    "wrong prompt": (["--prompts", "bad.jsonl"], "bad.jsonl line 1 must be text, a list of"),
    "no config": (["--config", "nowhere.json"], "nowhere.json: No such file"),
    "extra": (["--extra", "{"], "--extra is {: is not JSON"),
    "extra list": (["--extra", "[1]"], "must be a JSON object"),
    "own extra": (["--extra", '{"n": 3}'], "'n': the recorder sets it itself"),
    "timeout": (["--timeout", "0"], "timeout_s is 0.0: must be > 0"),
    "concurrency": (["--concurrency", "0"], "concurrency is 0: must be >= 1"),
    "nobody there": ([], "/v1/models: Connection refused"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(
    mistake: str, prompts: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, message = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"text": 1}\n', encoding="utf-8")
    with Stub("vllm") as gone:
        url = gone.url
    before = sorted(path.name for path in tmp_path.iterdir())
    common = ["--url", url, "--engine", "vllm", "--prompts", prompts, "--out", "o.parquet"]
    assert run(*common, "--retries", 0, *SHAPE, *words) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    (line,) = streams.err.splitlines()
    assert line.startswith("greenroom record: error: ")
    assert message in line
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_flag_that_is_off_names_it(prompts: Path, tmp_path: Path, capsys: Any) -> None:
    with Stub("vllm", flag=False) as stub:
        common = ["--url", stub.url, "--engine", "vllm", "--prompts", prompts, *SHAPE]
        assert run(*common, "--out", tmp_path / "o.parquet") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "start vLLM with --enable-return-routed-experts" in line


def test_a_key_comes_from_the_environment(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GREENROOM_API_KEY", "secret")
    with Stub("vllm", key="secret") as stub:
        common = ["--url", stub.url, "--engine", "vllm", "--prompts", prompts, *SHAPE]
        assert run(*common, "--out", tmp_path / "o.parquet", "--max-new-tokens", 3) == 0


def test_without_a_url_it_is_the_recorder_of_models(capsys: Any) -> None:
    assert run("--model", "nowhere", "--out", "x.parquet") == 2
    assert "--model is nowhere: must be 'tiny'" in capsys.readouterr().err


def test_importing_the_command_loads_nothing_heavy() -> None:
    check = "import sys, sim.record_cli; print({'torch', 'hydra', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
