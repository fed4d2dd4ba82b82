"""Every reader of a file that others may have written, each with a whole file that it reads.

A :class:`Subject` is what ``fuzzing.py`` damages. Files are small, so that a lying length stands out.
"""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from configs import composed
from foreign import META, choices, export, lattice_lines, mpt, routes, small_trace, with_logits
from routing_samples import NUM_LAYERS, TOLD, sample, sglang_native, vllm_whole
from sglang_engine import Engine, Job
from sglang_engine import save as save_sglang
from synth_models import model as synth_model
from test_headers import ENDS, gguf, layer_tensors
from test_import_cells import csv_lines, policylang_lines, stream
from test_import_counts import expert_tensors, write_imatrix
from test_import_facts import some_counts
from test_import_finemoe import dump, states
from test_import_megatron import passes, save_rank
from test_import_megatron_counts import lines_of as count_lines
from test_import_megatron_counts import whole
from test_import_moe_balance import lines_of as balance_lines
from test_import_moe_balance import save_request
from test_import_rl import save_slime, slime_sample, turn
from test_importers import real_ids, route_lines, write_npz
from trace_samples import make_trace

from traces.importers.formats import format_named
from traces.importers.told import Told
from traces.store import write_trace

ROOT = Path(__file__).parents[1]
IDS = choices(6)


class Subject(NamedTuple):
    """A reader: how its file is called, what makes a whole one, and what reads it.

    ``modules`` are those of ours whose code of reading it runs. ``make`` writes to the path, which ends as
    ``file`` does; ``read`` gets the path.
    """

    name: str
    modules: str
    file: str
    make: Callable[[Path], object]
    read: Callable[[Path], object]
    is_slow: bool = False
    """It takes tenths of a second a file."""


# -- what importers read ------------------------------------------------------------------------------


def _text(value: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(value, encoding="utf-8")


def _bytes(value: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(value)


def _json(value: Any) -> Callable[[Path], object]:
    return _text(json.dumps(value))


def _lines(*values: Any) -> Callable[[Path], object]:
    return _text("".join(json.dumps(value) + "\n" for value in values))


def _rank_with_logits(path: Path) -> None:
    save_rank(path.parent, passes(3, 1), logits=True)


def _sglang(path: Path) -> None:
    engine = Engine([Job(5, 3), Job(4, 3, arrival=2)], experts=8, mixed=True)
    save_sglang(path, engine.run(), engine.table)


def _boxed(path: Path) -> None:
    box = np.empty((), dtype=object)
    box[()] = sample().ids
    save_request(path, sample(), routed_experts=box)


def _foreign(
    name: str, module: str, file: str, make: Callable[[Path], object], **told: Any
) -> Subject:
    given = Told(**{"num_experts": 16, **told})

    def read(path: Path) -> object:
        return format_named(name).reader()(path, given)

    return Subject(f"{name} {file.rpartition('.')[2]}", module, file, make, read)


_PLAIN = {field: getattr(TOLD, field) for field in ("num_experts", "top_k", "num_hidden_layers")}
_PLAIN_EXPERTS = {"num_experts": TOLD.num_experts}
_EIGHT = {"num_experts": 8}

FOREIGN = (
    _foreign("experts-npz", "experts_npz", "a.npz", lambda path: write_npz(path, real_ids(12))),
    _foreign("route-csv", "route_csv", "a.csv", _text("\n".join(route_lines()) + "\n"), **_EIGHT),
    _foreign("sglang-recorder", "sglang_recorder torch_file", "a.pt", _sglang, **_EIGHT),
    _foreign(
        "routed-experts",
        "routed_experts encoded",
        "a.json",
        _json([sglang_native(sample())]),
        **_PLAIN,
    ),
    _foreign(
        "routed-experts",
        "routed_experts encoded json_file",
        "a.jsonl",
        _lines(vllm_whole(sample())),
        **_PLAIN,
    ),
    _foreign(
        "routed-experts",
        "routed_arrays sources",
        "a.npy",
        lambda path: np.save(path, sample().ids),
        **_PLAIN,
        prompt_tokens=3,
    ),
    _foreign(
        "routed-experts",
        "routed_arrays sources",
        "a.bin",
        lambda path: path.write_bytes(sample().ids.astype("<i4").tobytes()),
        **_PLAIN,
        prompt_tokens=3,
    ),
    _foreign(
        "rl-tensors",
        "rl_tensors torch_file",
        "a.pt",
        lambda path: save_slime(path, [slime_sample(sample())]),
        **_PLAIN,
    ),
    _foreign(
        "rl-tensors",
        "rl_tensors sources",
        "a.json",
        _json([{"trajectory": [{"tokens": turn(sample())}]}]),
        **_PLAIN,
    ),
    _foreign("moe-balance", "moe_balance npz_file", "a.npz", _boxed, **_PLAIN),
    _foreign(
        "moe-balance",
        "moe_balance json_file",
        "a.jsonl",
        _lines(*balance_lines([sample()], range(NUM_LAYERS))),
        **_PLAIN,
    ),
    _foreign(
        "megatron-trace",
        "megatron_passes",
        "router_trace_rank0.jsonl",
        _rank_with_logits,
        **_PLAIN_EXPERTS,
    ),
    _foreign(
        "moe-policylang",
        "moe_policylang_rows",
        "a.parquet",
        lambda path: export("moe-policylang", with_logits(small_trace()), path),
    ),
    _foreign(
        "moe-policylang", "moe_policylang_rows json_file", "a.jsonl", _lines(*policylang_lines())
    ),
    _foreign("moe-trace-csv", "moe_trace_csv", "a.csv", _bytes(csv_lines())),
    _foreign("moe-trace-bin", "moe_trace_bin", "a.bin", _bytes(stream())),
    _foreign(
        "finemoe",
        "finemoe torch_pickle",
        "Toy~set~1.pkl",
        lambda path: dump(path, {"a" * 32: states(IDS, 3)}),
    ),
    _foreign("vllm-patch", "vllm_patch", "a.jsonl", _lines(META, *routes(IDS[:, 0]))),
    _foreign("lattice", "lattice", "a.jsonl", _lines(*lattice_lines(IDS))),
    _foreign(
        "imp",
        "imp_json",
        "a.json",
        _json([[k, *IDS[t, k].tolist()] for t in range(6) for k in range(3)]),
    ),
    _foreign("mpt", "moepager", "a.mpt", _bytes(mpt(IDS))),
    _foreign(
        "eplb",
        "expert_load",
        "a.json",
        _json({"logical_count": np.arange(24).reshape(3, 8).tolist()}),
        **_EIGHT,
    ),
    _foreign(
        "eplb",
        "expert_load torch_file",
        "a.pt",
        lambda path: torch.save({"logical_count": torch.ones(3, 3, 8)}, path),
        **_EIGHT,
    ),
    _foreign(
        "moe-infinity",
        "moe_infinity",
        "a.npy",
        lambda path: np.save(path, np.ones((3, 3, 8))),
        **_EIGHT,
    ),
    _foreign(
        "imatrix",
        "imatrix",
        "a.gguf",
        lambda path: write_imatrix(path, expert_tensors()),
        num_experts=6,
    ),
    _foreign(
        "megatron-counts",
        "megatron_counts json_file",
        "a.jsonl",
        _lines(*count_lines(whole()[0])),
        **_EIGHT,
    ),
)

# -- our own files ------------------------------------------------------------------------------------


def _trace(path: Path) -> None:
    write_trace(path, make_trace(lengths=(5, 4)), row_group_tokens=4)


def _read_trace(path: Path) -> object:
    from traces.store import read_trace

    return read_trace(path)


def _open_trace(path: Path) -> object:
    from traces.stored import open_trace

    trace = open_trace(path)
    return [np.asarray(getattr(trace, name)) for name in trace.columns if name != "text"]


def _peek(path: Path) -> object:
    from traces.counts import is_counts
    from traces.importers.looks_like import looks_like
    from traces.store import is_trace_file

    return looks_like(path), is_trace_file(path), is_counts(path)


def _counts(path: Path) -> None:
    from traces.counts import write_counts

    write_counts(path, some_counts())


def _read_counts(path: Path) -> object:
    from traces.counts import read_counts

    return read_counts(path)


def _fit(path: Path) -> object:
    from traces.synth_model import load_model

    return load_model(path)


def _usage(path: Path) -> object:
    from sim.build import load_trace
    from sim.usage_of_trace import usage_of

    return usage_of(load_trace(str(path)), "a")


def _stats(path: Path) -> object:
    from sim.stats_cli import open_source

    return [len(chunk) for chunk in open_source(str(path)).chunks]


def _arrivals(path: Path) -> object:
    from sim.arrivals import recorded_ns

    return recorded_ns(str(path), 3)


ROW = {
    "id": "a",
    "model": "qwen3_30b_a3b",
    "machine": "rtx4090",
    "engine": "fused",
    "value": 10,
    "complete": True,
    "metric": "decode_tokens_per_s",
    "overrides": "placement.cpu_layers=2",
}


def _published(path: Path) -> object:
    from sim.published import outcomes

    return outcomes(path)


def _tabled(path: Path) -> object:
    from sim.calibrate_tables import read_table

    return [dict(row) if isinstance(row, dict) else row for row in read_table(path)]


def _row_csv(path: Path) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([[*ROW], [*ROW.values()]])


def _row_parquet(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([ROW, ROW]), path)


ERRORS = ("id", "engine", "machine", "complete", "metric", "error_fit", "error_left_out")
ERRORS += ("error_machine_left_out",)


def _errors(path: Path) -> None:
    row = ("a", "fused", "rtx4090", "true", "decode_tokens_per_s", 0.1, 0.1, -0.2)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([ERRORS, row])


def _read_errors(path: Path) -> object:
    from sim.interval import read_errors

    return read_errors(path)


def _spec(path: Path) -> None:
    (path.parent / "rows.yaml").write_text(yaml.safe_dump([ROW]))
    given = {"rows": "rows.yaml", "parameters": {"engine/fused.step_ns": {"bounds": [1, 1e6]}}}
    path.write_text(yaml.safe_dump(given | {"sigma": 0.1, "select": {"model": ["qwen3_30b_a3b"]}}))


def _read_spec(path: Path) -> object:
    from sim.calibrate_spec import read_specification

    return read_specification(str(path))


def _facts(path: Path) -> object:
    from sim.calibrate_machine import _facts as read

    return read(path.with_suffix(".csv"))


FACTS = {
    "machine": {"device": {"kind": "cpu", "name": "x"}},
    "setting": {"dtypes": ["float32"]},
    "date": "2026-01-01",
}


def _result(path: Path) -> object:
    from sim.results import read_rows

    return read_rows(path.parent.parent)


def _result_table(path: Path) -> object:
    from sim.results import read_rows

    return read_rows(path)


@cache
def a_run() -> dict[str, Any]:
    """The summary of a short run, as a file holds it."""
    from sim.simulate import simulate

    return json.loads(json.dumps(simulate(composed(*_SHORT))[0]))


_SHORT = ("workload.requests=[24,25]", "workload.length=[2,2]", "output.belady=false")


def _summary(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(a_run()))


def _summaries(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from sim.results import flatten

    pq.write_table(pa.Table.from_pylist([flatten(a_run())] * 2), path)


def _asked_of_a_sweep(path: Path) -> None:
    _summary(path.parent / "0" / "summary.json")
    asked = {"working_folder": str(path.parent), "arguments": ["a=b"], "config_dirs": ["c"]}
    path.write_text(json.dumps({**asked, "first": ["a=b"], "identity": {"points": "d"}}))


def _take_up(path: Path) -> object:
    """Read what a sweep was asked for as --resume does, and as a report does."""
    from sim.html.source import open_source
    from sim.sweeps.cli import _take_up as take_up
    from sim.sweeps.store import _changed

    options = SimpleNamespace(resume=str(path.parent), overrides=["a=c"], config_dirs=[])
    with contextlib.chdir(path.parent):
        take_up(options)
    changed = _changed(json.loads(path.read_text()).get("identity"), {"points": "e"})
    return options, changed, open_source(path.parent)


def _two_points(path: Path) -> None:
    _summary(path)
    _summary(path.parent.parent / "1" / "summary.json")


def _published_points(path: Path) -> object:
    """Read the summaries of two points and make the tables of a sweep of them."""
    from sim.sweeps.store import Store

    store = Store(path.parent.parent)
    return store.publish(store.rows([0, 1]), [])


def _failed_point(path: Path) -> None:
    _summary(path.parent.parent / "0" / "summary.json")
    path.write_text(json.dumps({"overrides": ["a=b"], "error": "none", "kind": "mistake"}))


def _failures(path: Path) -> object:
    """Read why a point failed, and list it."""
    from sim.sweeps.store import Store

    store = Store(path.parent.parent)
    return store.publish([], store.errors([1]))


def _hydra_sweep(path: Path) -> None:
    _summary(path.parent / "0" / "summary.json")
    path.write_text(yaml.safe_dump({"hydra": {"overrides": {"task": ["a=b"]}}}))


def _reported(path: Path) -> object:
    from sim.html.source import open_source

    return open_source(path.parent)


def _reported_run(path: Path) -> object:
    return _reported(path.parent)


def _hydra_run(path: Path) -> None:
    _summary(path.parent.parent / "summary.json")
    path.write_text(yaml.safe_dump(["policy=lru", "cache.ratio=0.5"]))


def _config_of_a_run(path: Path) -> None:
    _summary(path.parent / "summary.json")
    path.write_text(yaml.safe_dump(composed(*_SHORT)))


def _read_config(path: Path) -> object:
    from sim.figures.boundaries import work_of
    from sim.figures.source import open_source

    return work_of(open_source(path.parent))


def _prompts(path: Path) -> object:
    from traces.record_prompts import prompt_lines

    return prompt_lines(path, 1)


def _kept(path: Path) -> object:
    from traces.record_http_kept import KeptRequests

    return KeptRequests(path.parent, {"a": 1}).load(0)


def _keep(path: Path) -> None:
    np.savez(path, expert_ids=sample().ids, facts=np.array([3, 0, 0]))


def _asked(path: Path) -> object:
    from traces.record_http_kept import KeptRequests

    return KeptRequests(path.parent, {"model": "a", "seed": 3})


def _drawn(path: Path) -> object:
    from sim.figures.source import open_source

    return open_source(path).rows


def _validation(path: Path) -> None:
    path.write_text(json.dumps({"runs": [a_run()], "verdict": "good"}))


def _published_csv(path: Path) -> None:
    from sim.figures.source import _PUBLISHED_COLUMNS

    with path.open("w", newline="") as file:
        csv.writer(file).writerows([sorted(_PUBLISHED_COLUMNS), [1] * len(_PUBLISHED_COLUMNS)])


def _run_steps(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (path.parent / "summary.json").write_text(json.dumps(a_run()))
    columns = ("step", "stage", "start_ns", "end_ns")
    pq.write_table(pa.table({name: pa.array([1, 2, 3], pa.int64()) for name in columns}), path)


def _read_steps(path: Path) -> object:
    from sim.figures.source import open_source

    return open_source(path.parent).steps


def _points(path: Path) -> object:
    from sim.sweeps.list_file import _lines as lines_of

    return list(lines_of(str(path)))


OWN = (
    Subject("drawn validation", "sim.figures.source", "validation.json", _validation, _drawn),
    Subject("drawn published", "sim.figures.source", "published.csv", _published_csv, _drawn),
    Subject("drawn steps", "sim.figures.source", "steps.parquet", _run_steps, _read_steps),
    Subject(
        "sweep list csv",
        "sim.sweeps.list_file",
        "a.csv",
        _text("policy,cache.ratio\nlru,0.5\n"),
        _points,
    ),
    Subject(
        "sweep list yaml",
        "sim.sweeps.list_file",
        "a.yaml",
        _text("- {policy: lru, a.b: [1, 2]}\n- [a=b]\n"),
        _points,
    ),
    Subject(
        "sweep list text", "sim.sweeps.list_file", "a.txt", _text("policy=lru a='b c'\n"), _points
    ),
    Subject("trace", "traces.store traces.arrow traces.trace", "a.parquet", _trace, _read_trace),
    Subject("open trace", "traces.stored", "a.parquet", _trace, _open_trace),
    Subject("first look", "traces.importers.looks_like", "a.parquet", _trace, _peek),
    Subject("stats", "sim.stats_cli", "a.parquet", _trace, _stats),
    Subject("usage", "sim.usage_of_trace", "a.parquet", _trace, _usage),
    Subject("counts", "traces.counts", "a.parquet", _counts, _read_counts),
    Subject(
        "synth fit", "traces.synth_model", "a.json", lambda path: synth_model().save(path), _fit
    ),
    Subject("arrivals", "sim.arrivals", "a.csv", _text("arrival_s\n0\n0.5\n1.25\n"), _arrivals),
    Subject(
        "published rows",
        "sim.published sim.calibrate_rows",
        "a.yaml",
        _text(yaml.safe_dump({"rows": [ROW]})),
        _published,
        True,
    ),
    Subject(
        "rows yaml",
        "sim.calibrate_tables sim.calibrate_spec",
        "a.yaml",
        _text(yaml.safe_dump([ROW])),
        _tabled,
    ),
    Subject("rows csv", "sim.calibrate_tables", "a.csv", _row_csv, _tabled),
    Subject("rows parquet", "sim.calibrate_tables", "a.parquet", _row_parquet, _tabled),
    Subject("errors of rows", "sim.interval", "errors.csv", _errors, _read_errors),
    Subject("calibration", "sim.calibrate_spec", "a.yaml", _spec, _read_spec),
    Subject("measured facts", "sim.calibrate_machine", "a.json", _json(FACTS), _facts),
    Subject("summary", "sim.results", "0/summary.json", _summary, _result),
    Subject("results", "sim.results", "results.parquet", _summaries, _result_table),
    Subject(
        "asked of a sweep",
        "sim.html.source sim.sweeps.cli",
        "sweep.json",
        _asked_of_a_sweep,
        _take_up,
    ),
    Subject(
        "points", "sim.results sim.sound_rows", "0/summary.json", _two_points, _published_points
    ),
    Subject("failed point", "sim.sweeps.store", "1/error.json", _failed_point, _failures),
    Subject("told failure", "sim.html.source", "1/error.json", _failed_point, _reported_run),
    Subject("run of Hydra", "sim.html.source", ".hydra/overrides.yaml", _hydra_run, _reported_run),
    Subject(
        "config of a run",
        "sim.figures.source sim.yaml_aliases",
        "config.yaml",
        _config_of_a_run,
        _read_config,
    ),
    Subject("sweep of Hydra", "sim.html.source", "multirun.yaml", _hydra_sweep, _reported),
    Subject(
        "prompts",
        "traces.record_prompts",
        "a.jsonl",
        _lines("a", {"tokens": [1, 2]}, {"messages": []}),
        _prompts,
    ),
    Subject("kept request", "traces.record_http_kept", "0.npz", _keep, _kept),
    Subject(
        "kept settings",
        "traces.record_http_kept",
        "asked.json",
        _json({"model": "a", "seed": 3}),
        _asked,
    ),
)

# -- hardware and models ------------------------------------------------------------------------------


def _gguf(path: Path) -> object:
    from hwmodels.gguf_header import read_gguf
    from hwmodels.weight_files import gguf_values

    return gguf_values(read_gguf(path), "a", str(path))


def _gguf_file(path: Path) -> None:
    tensors = [*ENDS, *layer_tensors(0, "Q6_K", "Q4_K"), *layer_tensors(1, "Q4_K", "Q4_K")]
    path.write_bytes(gguf(tensors))


def _config(path: Path) -> object:
    from hwmodels.hf_config import model_values
    from hwmodels.model_shape import ModelShape
    from hwmodels.weight_files import read_config

    return ModelShape.from_mapping(model_values(read_config(path), "a", str(path)), str(path))


CHECKPOINT = ROOT / "traces" / "tiny" / "checkpoint"
CONFIG = json.loads((CHECKPOINT / "config.json").read_text())


def _tensors(path: Path) -> object:
    from hwmodels.safetensors_header import read_safetensors
    from hwmodels.weight_files import safetensors_values

    return safetensors_values(read_safetensors(path), CONFIG, "a", str(path))


def _tensor_file(path: Path) -> None:
    entries = {"__metadata__": {"format": "pt"}}
    from safetensors import safe_open

    at = 0
    with safe_open(str(CHECKPOINT / "model.safetensors"), framework="np") as file:
        for name in sorted(file.keys()):
            shape = file.get_slice(name).get_shape()
            entries[name] = {
                "dtype": "BF16",
                "shape": shape,
                "data_offsets": [at, at + 2 * int(np.prod(shape))],
            }
            at += 2 * int(np.prod(shape))
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def _index(path: Path) -> None:
    _tensor_file(path.parent / "one.safetensors")
    path.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))


def _option(group: str, name: str) -> Callable[[Path], object]:
    return _text((ROOT / "conf" / group / f"{name}.yaml").read_text(encoding="utf-8"))


def _run_with(group: str) -> Callable[[Path], object]:
    """Read an option as a run does: composed, then built."""

    def read(path: Path) -> object:
        from sim.cases import case_of, compose_case
        from sim.check_cli import compose_policy
        from sim.simulate import simulate

        if group == "policy":
            given = ["workload.requests=[24,25]", "workload.length=[2,2]", "output.belady=false"]
            return simulate(compose_policy(str(path), given))
        return case_of(compose_case([f"{group}=a"], (str(path.parent.parent),)).config)

    return read


HARDWARE = (
    Subject(
        "gguf header", "hwmodels.gguf_header hwmodels.weight_files", "a.gguf", _gguf_file, _gguf
    ),
    Subject("model config", "hwmodels.weight_files", "config.json", _json(CONFIG), _config),
    Subject(
        "safetensors header", "hwmodels.safetensors_header", "a.safetensors", _tensor_file, _tensors
    ),
    Subject(
        "safetensors index",
        "hwmodels.safetensors_header",
        "a.safetensors.index.json",
        _index,
        _tensors,
    ),
    Subject(
        "machine file",
        "sim.cases sim.composing",
        "machine/a.yaml",
        _option("machine", "rtx4090"),
        _run_with("machine"),
        True,
    ),
    Subject(
        "model file",
        "sim.cases sim.composing",
        "model/a.yaml",
        _option("model", "tiny"),
        _run_with("model"),
        True,
    ),
    Subject(
        "engine file",
        "sim.cases sim.composing",
        "engine/a.yaml",
        _option("engine", "fused"),
        _run_with("engine"),
        True,
    ),
    Subject(
        "policy file",
        "sim.check_cli sim.parts",
        "policy/a.yaml",
        _option("policy", "saem"),
        _run_with("policy"),
        True,
    ),
)

# -- the real backend ---------------------------------------------------------------------------------


def _store_file(path: Path) -> None:
    from real.experts import ExpertFormat
    from real.store_file import build_file
    from real.synthetic import Synthetic

    build_file(Synthetic(2, 2, ExpertFormat(8, 4, "bfloat16"), seed=2), path)


def _store(path: Path) -> object:
    from real.store_file import FileStore

    with FileStore(path) as store:
        store.verify()
    return store


def _shards_file(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, path)


def _shards(path: Path) -> object:
    from real.shards import Shards

    with Shards(path.parent) as found:
        return dict(found.entries)


def _shards_index(path: Path) -> None:
    _shards_file(path.parent / "one.safetensors")
    path.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))


def _gates_file(path: Path) -> None:
    from real.remoe_gates import save_gates

    save_gates(path, {"a": torch.ones(2, 3)}, {"seed": 1})


def _gates(path: Path) -> object:
    from real.remoe_gates import load_gates

    return load_gates(path)


def _texts(path: Path) -> object:
    from real.remoe_subject import read_texts

    return read_texts(path, lambda text: {"input_ids": [1] * len(text)}, 10)


def _speed(path: Path) -> object:
    from real.remoe_speed import Speed, _joined

    return _joined(path, Speed([], {}, None))


SPEED = {
    "rows": [dict.fromkeys(("where", "policy", "ratio", "gates"), "a")],
    "eor": {},
    "live": None,
}

REAL = (
    Subject("store file", "real.store_file", "a.bin", _store_file, _store),
    Subject("shards", "real.shards", "model.safetensors", _shards_file, _shards),
    Subject("shards index", "real.shards", "model.safetensors.index.json", _shards_index, _shards),
    Subject("gates", "real.remoe_gates", "a.safetensors", _gates_file, _gates),
    Subject("texts", "real.remoe_subject", "a.jsonl", _lines("a", [1, 2], {"text": "b"}), _texts),
    Subject("speed of before", "real.remoe_speed", "speed.json", _json(SPEED), _speed),
)

SUBJECTS = {subject.name: subject for subject in (*FOREIGN, *OWN, *HARDWARE, *REAL)}
assert len(SUBJECTS) == len((*FOREIGN, *OWN, *HARDWARE, *REAL))
