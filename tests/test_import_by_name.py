"""Foreign files that tell their own model are read as traces; others say how to import them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from foreign import (
    META,
    choices,
    export,
    lattice_lines,
    mpt,
    routes,
    small_trace,
    with_logits,
    write_lines,
)
from test_importers import route_lines
from test_importers import write_lines as write_route_lines

from traces.importers.by_name import read_any
from traces.schema import TraceError


def test_files_that_tell_their_model_need_no_import(tmp_path: Path) -> None:
    ids = choices(30)
    (tmp_path / "a.mpt").write_bytes(mpt(ids))
    np.testing.assert_array_equal(read_any(tmp_path / "a.mpt").expert_ids, ids)
    write_lines(tmp_path / "b.jsonl", [META, *routes(ids[:, 0])])
    np.testing.assert_array_equal(read_any(tmp_path / "b.jsonl").expert_ids, ids[:, :1])
    trace = with_logits(small_trace())
    export("moe-policylang", trace, tmp_path / "c.parquet")
    np.testing.assert_array_equal(read_any(tmp_path / "c.parquet").expert_ids, trace.expert_ids)
    header = {"num_experts": 16, "records_full_softmax": False}
    rows = [
        {"t": token, "l": layer, "e": ids[token, layer].tolist()}
        for token in range(30)
        for layer in range(3)
    ]
    write_lines(tmp_path / "d.jsonl", [header, *rows])
    np.testing.assert_array_equal(read_any(tmp_path / "d.jsonl").expert_ids, ids)


def test_files_of_windows(tmp_path: Path) -> None:
    """A mark at the beginning, other line ends, and blank lines at the end are no part of a file."""
    names = ("a.jsonl", "b.csv")
    write_lines(tmp_path / names[0], [META, *routes(choices(20)[:, 0])])
    write_route_lines(tmp_path / names[1], route_lines())
    for name in names:
        path = tmp_path / name
        trace = read_any(path)
        text = path.read_bytes().replace(b"\n", b"\r\n")
        path.write_bytes(b"\xef\xbb\xbf" + text + b"\r\n\r\n")
        np.testing.assert_array_equal(read_any(path).expert_ids, trace.expert_ids)


def test_files_that_tell_too_little_say_how_to_import_them(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    ids = choices(20)
    write_lines(tmp_path / "a.jsonl", lattice_lines(ids))
    export("moe-policylang", small_trace(), tmp_path / "b.parquet")
    bare = pq.read_table(tmp_path / "b.parquet").replace_schema_metadata(None)
    pq.write_table(bare, tmp_path / "b.parquet")
    meta = {name: value for name, value in META.items() if name != "num_experts"}
    write_lines(tmp_path / "c.jsonl", [meta, *routes(ids[:, 0])])
    (tmp_path / "d.jsonl").write_text("words\n")
    for name, message in (
        ("a.jsonl", "give --num-experts, --model or --config, to `greenroom import lattice`"),
        (
            "b.parquet",
            "give --num-experts, --model or --config, to `greenroom import moe-policylang`",
        ),
        ("c.jsonl", "to `greenroom import vllm-patch`"),
        ("d.jsonl", "d.jsonl: JSON that looks like no format that is known"),
        ("none.jsonl", "no such file"),
        ("none.parquet", "no such file"),
    ):
        with pytest.raises(TraceError, match=message) as error:
            read_any(tmp_path / name)
        assert "\n" not in str(error.value)
