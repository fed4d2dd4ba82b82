"""``greenroom generate``: what it prints and writes, its budget, its record, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the real backend needs torch")
pytest.importorskip("transformers", reason="live runs need transformers")

import pyarrow.parquet as pq  # noqa: E402

from real import generate_cli  # noqa: E402
from real.generate_cli import main  # noqa: E402
from real.live_model import LiveSubject  # noqa: E402
from tests import moe_models  # noqa: E402
from tests.live_models import FAMILIES, saved, settings  # noqa: E402
from tests.test_record_cli import MIXTRAL  # noqa: E402
from traces.record import Generation, generate_batch  # noqa: E402
from traces.record_cli import main as record  # noqa: E402
from traces.record_rows import Request  # noqa: E402
from traces.store import read_trace  # noqa: E402


@pytest.fixture(autouse=True)
def _few_threads(monkeypatch: Any) -> None:
    """Compose without Hydra, which takes a third of a second a time."""
    torch.set_num_threads(1)
    from real import live_build

    def composed(overrides: Any, config_dirs: Any = ()) -> Any:
        if config_dirs or any(
            "." in text.partition("=")[0] and "cache." not in text for text in overrides
        ):
            return own(overrides, config_dirs)
        pairs = dict(text.split("=") for text in overrides)
        sizes = {k.removeprefix("cache."): float(v) for k, v in pairs.items() if k != "policy"}
        return settings(pairs.get("policy", "lru"), **sizes)

    own = live_build.compose_live
    monkeypatch.setattr(live_build, "compose_live", composed)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL), encoding="utf-8")
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [[5, 6, 7, 8], [9], [10, 11, 12]]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def run(*words: Any) -> int:
    return main([str(word) for word in words])


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return found


def test_random_weights_from_a_config(config: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    words = ("--model", config, "--requests", 2, "--max-new-tokens", 5, "--out", out)
    assert run(*words, "policy=lfu", "cache.ratio=0.5") == 0
    said = capsys.readouterr().out
    assert "--- request 0 ---" in said
    assert "2 of 2 texts are the same" in said
    assert said.rstrip().endswith(f"Results: {out}")
    found = summary(out)
    assert (found["policy"], found["output_tokens"], found["requests"]) == ("lfu", 10, 2)
    assert found["quality"] == {"same_texts": 2, "texts": 2}
    assert found["memory"]["peak_device_bytes"] <= found["memory"]["budget_bytes"]
    assert found["tpot_ns_mean"] > 0
    steps = pq.read_table(out / "steps.parquet").to_pydict()
    assert sum(steps["num_tokens"]) == 2 * (32 + 4)
    assert steps["phase"][:2] == ["prefill", "decode"]
    assert all(a == h + late + lo + by for a, h, late, lo, by in zip(
        *(steps[name] for name in ("accesses", "hits", "late_hits", "loads", "bypasses")), strict=True
    ))  # fmt: skip
    requests = pq.read_table(out / "requests.parquet").to_pydict()
    assert requests["prompt_tokens"] == [32, 32]
    assert requests["output_tokens"] == [5, 5]
    assert requests["start_ns"][1] >= requests["end_ns"][0]


def test_experts_of_odd_sizes_run_and_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    odd = {"hidden_size": 24, "intermediate_size": 7, "head_dim": 6, "dtype": "float32"}
    path.write_text(json.dumps(MIXTRAL | odd), encoding="utf-8")
    words = ("--model", path, "--requests", 3, "--batch-size", 2, "--max-new-tokens", 4)
    assert run(*words, "--out", tmp_path / "out", "policy=lru") == 0
    assert summary(tmp_path / "out")["quality"]["same_texts"] == 3


def test_the_bundled_model_solves_as_without_a_policy(tmp_path: Path, capsys: Any) -> None:
    words = ("--requests", 2, "--max-new-tokens", 12, "--batch-size", 2, "--out", tmp_path / "out")
    assert run(*words, "policy=saem") == 0  # learns from the bundled trace
    said = capsys.readouterr().out
    assert "We know: " in said
    assert "2 of 2 texts are the same" in said
    assert summary(tmp_path / "out")["on_cpu"] > 0


def test_a_recording_is_that_of_greenroom_record(
    config: Path, prompts: Path, tmp_path: Path
) -> None:
    live, plain = tmp_path / "live.parquet", tmp_path / "plain.parquet"
    common = ("--model", config, "--prompts", prompts, "--max-new-tokens", 6, "--batch-size", 2)
    assert record([*map(str, (*common, "--out", plain, "--temperature", 0))]) == 0
    assert run(*common, "--record", live, "--out", tmp_path / "out", "policy=lru") == 0
    left, right = read_trace(live), read_trace(plain)
    assert left.columns == right.columns
    for name in left.columns:
        one, other = getattr(left, name), getattr(right, name)
        if name == "expert_weights":
            np.testing.assert_allclose(one.astype(float), other.astype(float), atol=2e-3)
        else:
            np.testing.assert_array_equal(one, other, err_msg=name)
    differs = {
        name
        for name in left.meta.__slots__
        if getattr(left.meta, name) != getattr(right.meta, name)
    }
    assert differs <= {
        "provenance",
        "notes",
    }  # which experts implementation, and how it counts padding
    assert "experts greenroom" in left.meta.provenance.detail


def test_sampling_gives_the_same_tokens_again(config: Path, tmp_path: Path) -> None:
    texts = []
    for name, policy in (("a", "lru"), ("b", "prefetch_next_gate")):
        path = tmp_path / f"{name}.parquet"
        words = ("--model", config, "--requests", 1, "--max-new-tokens", 8, "--sample", "--seed", 4)
        out = tmp_path / name
        assert run(*words, "--record", path, "--out", out, f"policy={policy}") == 0
        assert summary(out)["quality"]["same_texts"] == 1
        texts.append(read_trace(path).token_id.tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_shards_streams_its_experts_into_a_file(
    family: str, tmp_path: Path, prompts: Path
) -> None:
    model = moe_models.build(family)
    folder, store = saved(model, tmp_path / "model"), tmp_path / "experts.bin"
    trace, out = tmp_path / "trace.parquet", tmp_path / "out"
    words = ("--model", folder, "--prompts", prompts, "--max-new-tokens", 4, "--batch-size", 3)
    how = ("--no-check", "--tier", "storage", "--store", store, "--record", trace)
    assert run(*words, *how, "--out", out, "policy=lru") == 0
    generation = Generation(max_new_tokens=4, batch_size=3, eos=(2,))
    wanted = generate_batch(model, [[5, 6, 7, 8], [9], [10, 11, 12]], 0, generation)
    said = [token for request in wanted for token in request.tokens[:-1]]
    assert read_trace(trace).token_id.tolist() == said
    assert "quality" not in summary(out)
    assert store.stat().st_size > summary(out)["memory"]["expert_bytes"]


def test_a_small_folder_is_compared_with_the_whole_model(tmp_path: Path, prompts: Path) -> None:
    folder = saved(moe_models.build("olmoe"), tmp_path / "model")
    words = ("--model", folder, "--prompts", prompts, "--max-new-tokens", 3, "--batch-size", 2)
    assert run(*words, "--out", tmp_path / "out", "policy=lfu") == 0
    assert summary(tmp_path / "out")["quality"] == {"same_texts": 3, "texts": 3}


def test_a_store_is_used_again_unless_it_is_of_another_model(
    config: Path, tmp_path: Path, capsys: Any
) -> None:
    store = tmp_path / "experts.bin"
    words = ("--model", config, "--requests", 1, "--max-new-tokens", 3, "--tier", "storage")
    words = (*words, "--store", store, "--out", tmp_path / "out", "policy=lru")
    assert run(*words) == 0
    written = store.stat().st_mtime_ns
    assert run(*words) == 0
    assert store.stat().st_mtime_ns == written
    assert run(*words, "--seed", 1) == 2
    assert "holds the experts of another model" in capsys.readouterr().err


def test_a_budget_of_memory_is_kept(config: Path, tmp_path: Path, capsys: Any) -> None:
    words = ("--model", config, "--requests", 1, "--max-new-tokens", 3, "--no-check", "policy=lru")
    assert run(*words, "--memory", 1, "--out", tmp_path / "none") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    least = int(error.partition("at least ")[2].split()[0])
    for memory in (least, least + 3 * 4096, 4e8):
        out = tmp_path / str(memory)
        assert run(*words, "--memory", memory, "--out", out) == 0
        found = summary(out)["memory"]
        assert found["peak_device_bytes"] <= memory == found["budget_bytes"]
        assert found["peak_device_bytes"] == found["dense_bytes"] + found["arena_bytes"]
    assert summary(tmp_path / str(least))["cache_bytes"] == 0
    ample = summary(tmp_path / "400000000.0")  # all experts fit: each comes once at most
    assert ample["bypasses"] == 0
    assert ample["loads"] <= MIXTRAL["num_hidden_layers"] * MIXTRAL["num_local_experts"]
    assert run(*words, "--memory", least - 1, "--out", tmp_path / "none") == 2
    assert not (tmp_path / "none").exists()


def test_the_process_stays_far_below_all_experts_with_storage(tmp_path: Path) -> None:
    """120 MB of experts in a file, an arena of a few: the process's own peak must not hold them."""
    shape = MIXTRAL | {"hidden_size": 256, "intermediate_size": 1280, "num_local_experts": 15}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(shape), encoding="utf-8")
    words = (
        "--model",
        path,
        "--requests",
        1,
        "--max-new-tokens",
        2,
        "--tier",
        "storage",
        "--no-check",
    )
    given = [*words, "--memory", "3e7", "--out", tmp_path / "out", "policy=lru"]
    # A process of its own: what earlier tests of this one have freed, or hold, would count.
    command = [sys.executable, "-m", "sim.cli", "generate", *map(str, given)]
    subprocess.run(command, check=True, capture_output=True)
    found = summary(tmp_path / "out")["memory"]
    assert found["expert_bytes"] > 115e6
    if found["peak_process_bytes"] is None:
        pytest.skip("this system does not say what a process takes")
    assert found["arena_bytes"] < found["peak_process_bytes"] < found["expert_bytes"]


def test_lossy_policies_tell_what_they_cost(config: Path, tmp_path: Path, capsys: Any) -> None:
    words = ("--model", config, "--requests", 2, "--max-new-tokens", 6)
    assert run(*words, "--out", tmp_path / "out", "policy=cache_prior", "cache.ratio=0.25") == 0
    found = summary(tmp_path / "out")
    quality = found["quality"]
    assert 0 <= quality["token_agreement"] <= 1
    assert quality["agreement_tokens"] == 12
    assert quality["perplexity"] > 1
    assert quality["unmodified_perplexity"] > 1
    assert quality["perplexity_text"] == "the unmodified model's own"
    assert found["route_agreement"] < 1
    assert (tmp_path / "out" / "ledger.parquet").exists()
    assert "agreement" in capsys.readouterr().out
    assert run(*words, "--no-check", "--out", tmp_path / "out", "policy=cache_prior") == 0
    assert "--check tells by how much" in capsys.readouterr().out


def test_perplexity_of_the_bundled_model_is_of_held_out_problems(
    tmp_path: Path, monkeypatch: Any
) -> None:
    own = LiveSubject.texts

    def beginnings(subject: LiveSubject) -> list[Request]:
        return [
            Request(
                text.request_id, text.tokens[: text.num_prompt_tokens + 30], text.num_prompt_tokens
            )
            for text in own(subject)
        ]

    monkeypatch.setattr(LiveSubject, "texts", beginnings)
    words = ("--requests", 1, "--max-new-tokens", 4, "--out", tmp_path / "out")
    assert run(*words, "policy=cold_drop", "cache.ratio=0.5") == 0
    quality = summary(tmp_path / "out")["quality"]
    assert quality["perplexity_text"] == "held-out problems"
    assert quality["perplexity_tokens"] == 30
    assert 1 < quality["unmodified_perplexity"] < quality["perplexity"] * 1.05


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("--batch-size", 0), "--batch-size = 0: must be >= 1"),
        (
            ("--tier", "stroage"),
            "--tier = stroage: must be ram or storage; did you mean 'storage'?",
        ),
        (("--store", "x"), "--store = x: must be left out without --tier storage"),
        (("--memory", "lots"), "--memory = lots: must be a whole number of bytes >= 1, as 4e9"),
        (("--temperature", 1), "--temperature = 1.0: must be > 0 and finite, and needs --sample"),
        (("--model", "nowhere"), "--model = nowhere: must be 'tiny', a folder or a .json file"),
        (("--memory", "1e17"), "at most 1e+14"),
        (
            ("--sample", "--temperature", "inf"),
            "--temperature = inf: must be a number of a sensible size",
        ),
        (("--seed", -1), "--seed = -1: must be in [0, 2^63 - 1]"),
        (("--seed", 2**63), f"--seed = {2**63}: must be a whole number of a sensible size"),
        (("--threads", 100_000), "--threads = 100000: must be in [1, "),
        (("--logits",), "--logits: is of the trace; must be left out without --record"),
        (("--licence", "x"), "--licence: is of the trace; must be left out"),
        (("--gates-ahead", 1), "--gates-ahead: is of the trace; must be left out"),
        (("--record", "x.parquet", "--gates-ahead", 9), "--gates-ahead = 9: must be in [0, 3]"),
        (("--prompts", "nowhere"), "--prompts = nowhere: no such file"),
        (("--record", "x.csv"), "--record = x.csv: must end in .parquet"),
        (("--record", "no/x.parquet"), "--record = no/x.parquet: no such folder"),
        (("--device", "cuda:77"), "device = cuda:77"),
        (("--device", "gpu"), "device = gpu: must be auto, cpu, cuda or cuda:N"),
        (("--requests", "x"), "--requests = x: must be a whole number"),
        (("model.name=x",), "model.name=x: the model is the one that runs"),
        (("workload.batch_size=2",), "workload.batch_size=2: must be left out, see --batch-size"),
        (("policy=belady",), "policy/belady: knows the future"),
    ],
)
def test_mistakes_are_one_line(words: Any, rule: str, tmp_path: Path, capsys: Any) -> None:
    assert run("--out", tmp_path / "out", *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("greenroom generate: error: ")
    assert rule in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ("tokenizer", "tokenizer"),
        ("shard", ".safetensors: cannot open"),
        ("weights", "no *.safetensors file"),
        ("config", "config.json: cannot read"),
        ("dense", "has no MoE block"),
    ],
)
def test_a_folder_that_is_not_whole_is_told_in_one_line(
    change: str, rule: str, tmp_path: Path, prompts: Path, capsys: Any
) -> None:
    folder = saved(moe_models.build("mixtral"), tmp_path / "model")
    shards = sorted(folder.glob("*.safetensors"))
    if change == "tokenizer":
        for file in folder.glob("tokenizer*"):
            file.unlink()
    elif change == "shard":
        next(s for s in shards if any("experts" in key for key in _keys(s))).unlink()
    elif change == "weights":
        for file in folder.glob("model*"):
            file.unlink()
    elif change == "config":
        (folder / "config.json").unlink()
    else:
        said = {"model_type": "llama", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1}
        (folder / "config.json").write_text(json.dumps(said), encoding="utf-8")
    words = ("--model", folder, "--prompts", prompts, "--no-check", "--out", tmp_path / "out")
    assert run(*words, "policy=lru") == 2
    error = capsys.readouterr().err
    assert rule in error
    assert error.count("\n") == 1


def _keys(shard: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(shard, framework="pt") as file:
        return list(file.keys())


def test_without_torch_there_is_one_line(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    def gone(*_: Any) -> Any:
        raise ImportError("No module named 'torch'")

    monkeypatch.setattr(generate_cli, "_import", gone)
    assert run("--out", tmp_path / "out", "policy=lru") == 2
    assert "live runs need torch: pip install 'greenroom[torch]'" in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['torch'] = None; from real.generate_cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    sys.exit(end.code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--memory BYTES" in done.stdout


def test_a_failure_leaves_no_results_and_no_trace(
    config: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    from real.live import Live

    monkeypatch.setattr(Live, "end_batch", fails)
    words = ("--model", config, "--requests", 1, "--max-new-tokens", 2, "--no-check")
    trace, out = tmp_path / "t.parquet", tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(*words, "--record", trace, "--out", out, "--tier", "storage", "policy=lru")
    assert not trace.exists()
    assert not out.exists()
