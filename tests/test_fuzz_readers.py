"""Whatever stands in a file, a reader gives a value or one line; ``fuzzing.py`` says what that means.

All readers are fuzzed by one process with a limit of memory, some files each; for more, run ``fuzzing.py``.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import ODD
from reader_subjects import FOREIGN, SUBJECTS

from hwmodels.engine import Engine
from hwmodels.errors import HardwareError
from hwmodels.machine import Machine
from hwmodels.model_shape import ModelShape
from sim.mistakes import explain
from traces.importers.formats import FORMATS

ROOT = Path(__file__).parents[1]
COUNT, SLOW_COUNT = 8, 0


@pytest.fixture(scope="module")
def findings() -> dict[str, list[dict[str, Any]]]:
    """What the process found, by subject; its last words tell where it died, if it did."""
    words = ["--count", str(COUNT), "--slow-count", str(SLOW_COUNT), "--seed", "0"]
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "fuzzing.py"), *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},  # an arena a thread would take up the limit
    )
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 0, (lines[-1:], run.stderr[-2000:])
    found = defaultdict(list)
    for line in lines:
        found[line.get("subject") or line.get("begins") or line["ends"]].append(line)
    return found


@pytest.mark.parametrize("name", SUBJECTS)
def test_no_file_breaks_a_reader(name: str, findings: dict[str, list[dict[str, Any]]]) -> None:
    told = findings[name]
    assert [line for line in told if line.get("fault")] == []
    assert any("ends" in line for line in told)  # it was fuzzed to the end


# -- that no reader is forgotten ----------------------------------------------------------------------

READS = {
    *(
        "read_text",
        "read_bytes",
        "read_table",
        "ParquetFile",
        "read_schema",
        "read_metadata",
        "safe_load",
    ),
    *(
        "loadtxt",
        "genfromtxt",
        "fromfile",
        "memmap",
        "open_memmap",
        "read_array",
        "ZipFile",
        "safe_open",
    ),
    *("load", "loads", "DictReader", "reader", "mmap"),
}
"""Last words of calls that read, beside ``open`` without a mode to write."""
NOT_OTHERS = {
    "sim/cli.py": "opens /dev/null",
    "sim/bundled.py": "a bundled file",
    "sim/catalogue.py": "bundled policies",
    "sim/model_cli.py": "bundled models; a model's own files by hwmodels/weight_files.py",
    "sim/simulate.py": "digests a file",
    "sim/record_cli.py": "an option's text",
    "sim/calibrate_write.py": "heads of files that it may write over, and options read before by OmegaConf",
    "sim/calibrate_misses.py": "files that it has just made",
    "sim/completion_conf.py": "bundled options, and folders of a user's: any fault means no suggestion",
    "sim/completion_shapes.py": "its own cache: any fault means that it is made anew",
    "sim/speculation.py": "opens a simulated storage",
    "sim/api.py": "a digest that it has written itself",
    "sim/api_inputs.py": "digests a file that it has just made",
    "sim/api_results.py": "tables of a run that it has just made",
    "sim/calibration.py": "a cost model's load",
    "sim/html/page.py": "a bundled style",
    "sim/html/provenance.py": "digests files",
    "sim/hydra_guard.py": "has Hydra read: sim/composing.py",
    "sim/import_cli.py": "importers",
    "sim/report_cli.py": "opens a browser",
    "sim/result_tables.py": "tables of a run that it has just made",
    "sim/sweeps/identity.py": "digests files",
    "sim/sweeps/slurm_queue.py": "logs of its own jobs",
    "traces/importers/by_name.py": "importers",
    "traces/record_http_run.py": "requests that it has kept: traces/record_http_kept.py",
    "real/remoe_transform.py": "the bundled checkpoint",
    "traces/tiny/tokenizer.py": "the bundled checkpoint",
    "traces/tiny/train.py": "the state of its own run, by torch.load(weights_only=True)",
    "traces/tiny/model.py": "the bundled checkpoint",
    "traces/record_http.py": "what a server answers: tests/test_record_http_odd.py",
    "traces/record_subject.py": "a model's config, given to transformers: tests/test_record_cli.py",
    "real/page_cache.py": "reads pages to have them in memory, and /proc",
    "real/live_memory.py": "/proc",
    "real/machine_facts.py": "/proc and /sys",
    "real/aligned_io.py": "bytes at places that real/store_file.py and real/shards.py have checked",
    "real/side_by_side.py": "timelines that it has just made",
    "real/remoe_run.py": "its own judgement: what is damaged is judged again",
    "real/remoe_train.py": "the state of its own run, by torch.load(weights_only=True)",
    "real/live_model.py": "a checkpoint, by transformers",
}
"""Modules with calls that look like reading, which read nothing that others may have written."""
INDIRECT = {
    "sim/sound_rows.py": "results",
    "traces/importers/torch_file.py": "sglang-recorder pt",
    "traces/importers/torch_pickle.py": "finemoe pkl",
    "traces/importers/npz_file.py": "moe-balance npz",
    "traces/importers/json_file.py": "lattice jsonl",
    "traces/importers/sources.py": "imp json",
    "traces/importers/encoded.py": "routed-experts json",
    "traces/importers/gguf_file.py": "imatrix gguf",
    "traces/importers/array_pickle.py": "moe-balance npz",
}
"""What importers read by."""


def _reads(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        last = name.rpartition(".")[2]
        modes = [ast.unparse(a) for a in [*node.args, *(k.value for k in node.keywords)]]
        writes = any(mode.strip("'\"")[:1] in ("w", "a", "x") and len(mode) < 7 for mode in modes)
        if (last == "open" and not writes) or last in READS:
            yield name


def test_no_module_that_reads_is_missing() -> None:
    fuzzed = {module for subject in SUBJECTS.values() for module in subject.modules.split()}
    fuzzed |= {
        f"traces.importers.{module}" for subject in FOREIGN for module in subject.modules.split()
    }
    missing = []
    for package in ("sim", "traces", "hwmodels", "real"):
        for file in sorted((ROOT / package).rglob("*.py")):
            source = file.relative_to(ROOT).as_posix()
            module = source.removesuffix(".py").replace("/", ".")
            known = module in fuzzed or source in {*NOT_OTHERS, *INDIRECT}
            if not known and (
                calls := sorted({*_reads(ast.parse(file.read_text(encoding="utf-8")))})
            ):
                missing.append((source, calls))
    assert missing == []


def test_every_format_is_fuzzed() -> None:
    assert {subject.name.rpartition(" ")[0] for subject in FOREIGN} == {
        form.name for form in FORMATS
    }
    assert {*INDIRECT.values()} <= {*SUBJECTS}


# -- figures of models, machines and engines ----------------------------------------------------------

OPTIONS = [
    (kind, file)
    for kind, folder in ((ModelShape, "model"), (Engine, "engine"))
    for file in sorted((ROOT / "conf" / folder).glob("*.yaml"))[:3]
]
PARTS = ("gpu", "cpu", "link", "storage")
VALUES = st.sampled_from((*ODD, 16**4000)) | st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
HARD = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def _told(read: Any, mapping: object) -> None:
    """A value, or an error of one line that names the file."""
    try:
        read(mapping, "a file")
    except HardwareError as error:
        line = explain(error)
        assert line is not None
        assert line.startswith("a file")
        assert "\n" not in line
        assert len(line) < 1500


@HARD
@given(data=st.data())
def test_odd_figures_of_models_and_engines_are_told(data: st.DataObject) -> None:
    kind, file = data.draw(st.sampled_from(OPTIONS))
    mapping = yaml.safe_load(file.read_text(encoding="utf-8"))
    for _ in range(data.draw(st.integers(1, 2))):
        key = data.draw(st.sampled_from(sorted(mapping)) | st.text(max_size=5))
        mapping[key] = data.draw(VALUES)
    _told(kind.from_mapping, mapping)
    _told(kind.from_mapping, data.draw(VALUES))


@HARD
@given(data=st.data())
def test_odd_figures_of_machines_are_told(data: st.DataObject) -> None:
    mapping: dict[str, Any] = {"name": "a"}
    for part in PARTS:
        file = sorted((ROOT / "conf" / "machine" / part).glob("*.yaml"))[
            data.draw(st.integers(0, 2))
        ]
        mapping[part] = yaml.safe_load(file.read_text(encoding="utf-8"))
    part = data.draw(st.sampled_from(PARTS))
    key = data.draw(st.sampled_from(sorted(mapping[part])) | st.text(max_size=5))
    mapping[part][key] = data.draw(VALUES)
    if data.draw(st.integers(0, 9)) == 0:
        mapping[data.draw(st.sampled_from([*PARTS, "name", "x"]))] = data.draw(VALUES)
    _told(Machine.from_mapping, mapping)
