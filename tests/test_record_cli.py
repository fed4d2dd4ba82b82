"""``greenroom record``: what it writes, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="recording needs torch")
transformers = pytest.importorskip("transformers", reason="recording needs transformers")

from traces.record_cli import main  # noqa: E402
from traces.schema import NO_EXPERT, PREFILL  # noqa: E402
from traces.store import read_trace  # noqa: E402

MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 8,
    "num_local_experts": 4,
    "max_position_embeddings": 64,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL), encoding="utf-8")
    return path


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``--model tiny`` load an untrained, smaller model: the checkpoint is not needed."""
    from traces.tiny import model
    from traces.tiny.tokenizer import CharTokenizer

    tokenizer = CharTokenizer()
    small = model.new_model(tokenizer, 0, num_hidden_layers=2, hidden_size=32).eval()
    small.set_experts_implementation("grouped_mm")
    monkeypatch.setattr(model, "load_model", lambda path=None: (small, tokenizer))


def run(*words: Any) -> int:
    return main([str(word) for word in words])


def test_random_weights_from_a_config(config: Path, tmp_path: Path, capsys: Any) -> None:
    paths = [tmp_path / f"{name}.parquet" for name in "ab"]
    for path in paths:
        code = run(
            *("--model", config, "--out", path, "--requests", 3, "--max-new-tokens", 5),
            *("--temperature", 1, "--batch-size", 2, "--logits", "--seed", 4, "--gates-ahead", 2),
        )
        assert code == 0
    trace = read_trace(paths[0])
    assert len(trace) == 3 * (32 + 5 - 1)
    assert trace.num_requests == 3
    assert trace.router_logits.shape == (108, 2, 4)
    assert (trace.next_gate_ids_2 == NO_EXPERT).all(), "the model has two layers"
    assert (trace.next_gate_ids[:, 0] != NO_EXPERT).all()
    assert trace.next_gate_ids_3 is None
    assert trace.meta.model == "mixtral-random"
    assert any("random" in note for note in trace.meta.notes)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    streams = capsys.readouterr()
    assert streams.out.splitlines()[0] == f"{paths[0]}: 108 rows of 3 requests"
    assert "3 of 3 requests, 108 rows" in streams.err


def test_prompts_of_token_ids(config: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('[1, 2, 3]\n\n{"tokens": [4, 5]}\n[6]\n', encoding="utf-8")
    out = tmp_path / "out.parquet"
    code = run(
        *("--model", config, "--prompts", prompts, "--out", out, "--requests", 2),
        *("--max-new-tokens", 2, "--no-next-gate"),
    )
    assert code == 0
    trace = read_trace(out)
    assert trace.token_id[trace.phase == PREFILL].tolist() == [1, 2, 3, 4, 5]
    assert trace.next_gate_ids is None


def test_continuous_batching_records_the_same_requests(
    config: Path, tmp_path: Path, capsys: Any
) -> None:
    common = ("--model", config, "--requests", 3, "--max-new-tokens", 5, "--temperature", 1)
    batches, packed = tmp_path / "batches.parquet", tmp_path / "packed.parquet"
    assert run(*common, "--out", batches, "--batch-size", 1) == 0
    options = ("--continuous", "--batch-size", 2, "--max-batch-tokens", 16)
    assert run(*common, "--out", packed, *options, "--scheduler", "prefill_first") == 0
    left, right = read_trace(batches), read_trace(packed)
    assert right.step.max() < left.step.max()
    assert np.bincount(right.step).max() == 16
    order = np.lexsort((right.position, right.request_id))
    np.testing.assert_array_equal(right.expert_ids[order], left.expert_ids)
    np.testing.assert_array_equal(right.token_id[order], left.token_id)
    assert right.meta.sampling["continuous"]["scheduler"] == "prefill_first"
    assert capsys.readouterr().err.splitlines()[-1].endswith("3 of 3 requests, 108 rows")


@pytest.mark.parametrize("options", [(), ("--continuous",)])
def test_expert_sizes_that_torch_cannot_group(options: Any, tmp_path: Path) -> None:
    odd = tmp_path / "odd.json"
    odd.write_text(
        json.dumps({**MIXTRAL, "hidden_size": 18, "head_dim": 8, "intermediate_size": 10})
    )
    out = tmp_path / "out.parquet"
    common = ("--model", odd, "--out", out, "--requests", 2, "--max-new-tokens", 2)
    assert run(*common, *options) == 0
    trace = read_trace(out)
    assert len(trace) == 2 * (32 + 2 - 1)
    assert "experts eager" in trace.meta.provenance.detail


def test_what_torch_refuses_while_running_is_one_line(
    config: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: Any, **_kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    monkeypatch.setattr(transformers.MixtralForCausalLM, "generate", full)
    out = tmp_path / "out.parquet"
    assert run("--model", config, "--out", out, "--max-new-tokens", 4) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the model cannot run on cpu: CUDA out of memory. Tried to allocate 2 GiB" in line
    assert not out.exists()


def test_folder_with_a_tokenizer(config: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: index for index, word in enumerate(["<unk>", "<eos>", "to", "be", "or", "not"])}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path / "toy-moe"
    transformers.PreTrainedTokenizerFast(tokenizer_object=fast).save_pretrained(folder)
    settings = {name: value for name, value in MIXTRAL.items() if name != "model_type"}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**settings))
    model.save_pretrained(folder)
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.parquet"
    prompts.write_text("to be or not to be\nto be\n", encoding="utf-8")
    code = run(
        *("--model", folder, "--prompts", prompts, "--out", out, "--max-new-tokens", 3),
        *("--licence", "MIT"),
    )
    assert code == 0
    trace = read_trace(out)
    assert trace.token_id[:6].tolist() == [2, 3, 4, 5, 2, 3]
    assert trace.text[:4] == ["to", "be", "or", "not"]
    assert (trace.meta.model, trace.meta.licence) == ("toy-moe", "MIT")
    assert str(tmp_path) not in trace.meta.to_json()


def test_tiny_records_text_and_stages(tiny: None, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    code = run("--model", "tiny", "--out", out, "--requests", 2, "--max-new-tokens", 6)
    assert code == 0
    trace = read_trace(out)
    assert trace.meta.sampling["temperature"] == 1.0
    assert trace.meta.stage_names[0] == "question"
    assert (trace.stage[trace.phase == PREFILL] == 0).all()
    for number in range(2):
        rows = np.flatnonzero((trace.request_id == number) & (trace.phase == PREFILL))
        question = "".join(trace.text[row] for row in rows)
        assert trace.text[rows[0]] == ""  # BOS
        assert question.endswith("\n")
        assert len(question) > 40


MISTAKES = {
    "no model": (["--model", "nowhere"], "--model is nowhere: must be 'tiny', a folder"),
    "not parquet": (["--out", "x.csv"], "must end in .parquet"),
    "no folder": (["--out", "nowhere/x.parquet"], "the folder nowhere does not exist"),
    "no number": (["--requests", "many"], "invalid int value: 'many'"),
    "too few": (["--batch-size", "0"], "--batch-size is 0: must be >= 1"),
    "no prompts": (["--prompts", "nowhere.txt"], "--prompts is nowhere.txt: no such file"),
    "text": (["--prompts", "text.txt"], "line 1 is text"),
    "not json": (["--prompts", "bad.jsonl"], "bad.jsonl line 1 is not JSON"),
    "wrong json": (["--prompts", "object.jsonl"], "must be text, or a list of token ids"),
    "not utf-8": (["--prompts", "latin.txt"], "cannot read latin.txt"),
    "too many": (["--prompts", "good.jsonl", "--requests", "9"], "has 1 prompts: must have 9"),
    "outside": (["--prompts", "big.jsonl"], "prompt 0 has ids outside 0..63"),
    "too long": (["--max-new-tokens", "64"], "must be < 64"),
    "temperature": (["--temperature", "-1"], "temperature is -1.0"),
    "seed": (["--seed", "-1"], "seed"),
    "gates": (["--gates-ahead", "4"], "--gates-ahead is 4: must be 0 to 3"),
    "device": (["--device", "abacus"], "cannot load the model"),
    "meta device": (["--device", "meta"], "--device is meta: computes nothing"),
    "not continuous": (["--scheduler", "fifo"], "--scheduler goes with --continuous"),
    "no step": (["--continuous", "--max-batch-tokens", "0"], "--max-batch-tokens is 0"),
    "scheduler": (["--continuous", "--scheduler", "fiffo"], "did you mean 'fifo'"),
    "unknown option": (["--loglts"], "unrecognized arguments"),
    "dense model": (["--model", "dense.json"], "no MoE block"),
    "unknown model": (["--model", "unknown.json"], "mixtrall"),
    "no type": (["--model", "notype.json"], "'model_type'"),
    "broken config": (["--model", "broken.json"], "is not JSON"),
}
FILES = {
    "text.txt": "hello",
    "bad.jsonl": "{",
    "object.jsonl": '{"text": 1}',
    "good.jsonl": "[1]",
    "big.jsonl": "[99]",
    "dense.json": json.dumps({**MIXTRAL, "model_type": "llama"}),
    "unknown.json": json.dumps({"model_type": "mixtrall"}),
    "notype.json": "{}",
    "broken.json": "{",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(
    mistake: str, config: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, message = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text, encoding="utf-8")
    Path("latin.txt").write_bytes(b"caf\xe9")
    before = sorted(path.name for path in tmp_path.iterdir())
    defaults = ["--model", config, "--out", "out.parquet", "--max-new-tokens", 2]
    assert run(*defaults, *words) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    (line,) = streams.err.splitlines()
    assert line.startswith("greenroom record: error: ")
    assert message in line
    assert len(line) < 300
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_importing_the_command_loads_no_torch() -> None:
    check = "import sys, traces.record_cli; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
