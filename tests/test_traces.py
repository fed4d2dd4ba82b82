from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from trace_samples import assert_same, make_meta, make_trace

from traces.arrow import to_table, to_trace
from traces.schema import (
    NO_EXPERT,
    PREFILL,
    Provenance,
    Trace,
    TraceError,
    TraceMeta,
    Validator,
    arrow_schema,
    concat,
    validate,
)


def test_header_survives_json() -> None:
    meta = make_meta(incomplete_layers=(1,), seed=7, licence="MIT", normalized=False)
    assert TraceMeta.from_json(meta.to_json(), "t") == meta


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layer": 3}, "header key 'num_layer' is not known; did you mean 'num_layers'?"),
        ({"format_version": 2}, "format_version is 2: this Greenroom reads 1"),
        ({"top_k": None}, "header key 'top_k' is None: must be int"),
        ({"top_k": 7}, "header key 'top_k' is 7: must be <= num_experts 6"),
        ({"num_experts": 65535}, "header key 'num_experts' is 65535: must be < 65535"),
        ({"num_layers": True}, "header key 'num_layers' is True: must be int"),
        ({"layer_indices": [1, 3]}, "is (1, 3): must be 3 ascending indices, one a MoE layer"),
        ({"layer_indices": [1, 3, 3]}, "must be 3 ascending indices"),
        ({"layer_indices": [-2, 0, 1]}, "must be 3 ascending indices"),
        ({"expert_bytes": []}, "must be 3 positive sizes"),
        ({"incomplete_layers": [3]}, "must lie in 0..2"),
        ({"weight_semantics": "aplied"}, "must be one of applied, "),
        ({"provenance": "me"}, "header key 'provenance' is 'me': must be a JSON object"),
        ({"provenance": {"kind": "recoded", "source": "", "detail": ""}}, "you mean 'recorded'?"),
        ({"provenance": {"kind": "recorded", "source": ""}}, "provenance key 'detail' is missing"),
    ],
)
def test_bad_headers_are_refused(changes: dict, message: str) -> None:
    record = json.loads(make_meta().to_json()) | changes
    with pytest.raises(TraceError) as error:
        TraceMeta.from_json(json.dumps(record), "toy.parquet")
    assert str(error.value).startswith("toy.parquet: ")
    assert message in str(error.value)


def test_header_that_is_no_object_or_lacks_a_key() -> None:
    for text, message in (
        ("{", "t: the header is not JSON"),
        ("[1]", r"t: the header is \[1\]: must be a JSON object"),
        ('{"format_version": 1}', "t: header key 'model' is missing"),
    ):
        with pytest.raises(TraceError, match=message):
            TraceMeta.from_json(text, "t")
    with pytest.raises(TraceError, match="must be one of recorded, imported"):
        Provenance("guessed", "x")


def test_importing_the_schema_costs_no_heavy_package() -> None:
    code = "import sys, traces.schema; print(*{'pyarrow', 'pandas', 'torch'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ""


def test_nested_columns_are_views_even_of_a_slice() -> None:
    trace = make_trace()
    table = to_table(trace, arrow_schema(trace.meta, trace.columns))
    part = to_trace(table.slice(3, 4), trace.meta, "t")
    assert_same(part, trace.take(slice(3, 7)))
    cells = table.column("expert_ids").chunk(0).values.to_numpy()
    assert np.shares_memory(part.expert_ids, cells)
    parts = pa.concat_tables([table.slice(0, 2), table.slice(5, 3)])
    assert_same(to_trace(parts, trace.meta, "t"), trace.take([0, 1, 5, 6, 7]))


def test_requests_and_take() -> None:
    trace = make_trace(lengths=(3, 1, 2))
    assert (len(trace), trace.num_requests) == (6, 3)
    assert trace.take(trace.request_id == 6).text == trace.text[4:]
    with pytest.raises(TraceError, match="trace 1 has columns"):
        concat([trace, make_trace(optional=())])
    with pytest.raises(TraceError, match="trace 1 has another header"):
        concat([trace, replace_meta(trace, model="other")])


def replace_meta(trace: Trace, **changes) -> Trace:
    return replace(trace, meta=replace(trace.meta, **changes))


def changed(column: str, cell, value, **header) -> Trace:
    """The toy trace with one cell changed."""
    trace = replace_meta(make_trace(), **header)
    setattr(trace, column, getattr(trace, column).copy())
    getattr(trace, column)[cell] = value
    return trace


VIOLATIONS = [
    ("expert_ids", (4, 1, 1), 6, "row 14: expert_ids[layer 1, slot 1] is 6: must be < num_experts"),
    ("expert_ids", (4, 1), 3, "row 14: expert_ids[layer 1, slot 1] is 3: is there twice"),
    ("expert_ids", (4, 2), NO_EXPERT, "row 14: expert_ids[layer 2] is 65535: the layer is missing"),
    ("next_gate_ids", (4, 0, 1), 6, "row 14: next_gate_ids[layer 0, slot 1] is 6: must be < num_"),
    ("next_gate_ids", (4, 2, 1), 5, "row 14: next_gate_ids[layer 2, slot 1] is 5: the last layer"),
    ("next_gate_ids_2", (4, 0), 3, "row 14: next_gate_ids_2[layer 0, slot 1] is 3: is there twice"),
    ("next_gate_ids_2", (4, 1, 0), 5, "is 5: the last 2 layers have no next gate: must be 65535"),
    ("next_gate_ids_3", (4, 0, 0), 5, "is 5: the last 3 layers have no next gate: must be 65535"),
    ("position", 4, 5, "row 14: position is 5: must be 4, for its request's last row had 3"),
    ("position", 4, -1, "row 14: position is -1: must be >= 0"),
    ("request_id", 4, -1, "row 14: request_id is -1: must be >= 0"),
    ("step", 4, 1, "row 14: step is 1: must be >= 2, the step of its request's last row"),
    ("phase", 4, PREFILL, "row 14: phase is 0: must stay decode"),
    ("phase", 4, 2, "row 14: phase is 2: must be 0 (prefill) or 1 (decode)"),
    ("token_id", 4, -2, "row 14: token_id is -2: must be >= 0, or -1 (unknown)"),
    ("stage", 4, 2, "row 14: stage is 2: must lie in -1..1, an index of the header's stage_names"),
    ("expert_weights", (4, 1, 0), np.nan, "row 14: expert_weights[layer 1, slot 0] is nan: must"),
    ("expert_weights", (4, 1, 1), np.inf, "is inf: must be finite and >= 0"),
    ("expert_weights", (4, 1, 1), -0.5, "is -0.5: must be finite and >= 0"),
    ("expert_weights", (4, 1, 1), 2.0, "row 14: expert_weights[layer 1, slot 1] is 2.0: must not"),
    ("router_logits", (4, 1, 5), np.nan, "row 14: router_logits[layer 1, slot 5] is nan"),
    ("text", 4, None, "row 14: text is None: must be a string"),
]


@pytest.mark.parametrize(("column", "cell", "value", "message"), VIOLATIONS)
def test_each_rule_broken_once(column: str, cell, value, message: str) -> None:
    with pytest.raises(TraceError) as error:
        validate(changed(column, cell, value), "toy.parquet", first_row=10)
    assert message in str(error.value)
    assert str(error.value).startswith("toy.parquet: row 14: ")


def test_shapes_and_dtypes_follow_the_header() -> None:
    trace = make_trace()
    for column, value, message in (
        ("expert_ids", trace.expert_ids[..., :1], "uint16(9, 3, 1): must be uint16(9, 3, 2)"),
        ("step", trace.step.astype(np.int64), "step is int64(9,): must be int32(9,)"),
        ("stage", trace.stage[1:], "stage is int16(8,): must be int16(9,)"),
        ("text", trace.text[1:], "text is 8 strings long: must be 9 long"),
        ("token_id", [1] * 9, "token_id is list(9,)"),
    ):
        with pytest.raises(TraceError) as error:
            validate(replace(trace, **{column: value}), "t")
        assert message in str(error.value)
    with pytest.raises(TraceError, match="weight_semantics 'none' in the header allows no weights"):
        validate(replace_meta(trace, weight_semantics="none"), "t")


def test_what_the_rules_allow() -> None:
    validate(changed("expert_ids", (4, 2, 1), NO_EXPERT), "one empty slot")
    validate(changed("expert_weights", (4, 1, 1), 2.0, sorted_by_weight=False), "unsorted")
    tie = changed("expert_weights", (4, 1), [0.5, np.nextafter(np.float16(0.5), np.float16(1))])
    validate(tie, "tie")
    validate(changed("expert_weights", (4, 1, 1), -0.0), "negative zero")
    validate(changed("expert_ids", (1, 2), NO_EXPERT, incomplete_layers=(2,)), "prefill lacks it")
    with pytest.raises(TraceError, match=r"row 4: expert_ids\[layer 2\] is 65535"):
        validate(changed("expert_ids", (4, 2), NO_EXPERT, incomplete_layers=(2,)), "decode")
    later = make_trace().take(slice(2, 5))
    validate(later, "a request may start late")


def test_requests_are_followed_across_chunks() -> None:
    trace = make_trace(lengths=(6, 6), shuffle=True)
    for column, value in (("position", 9), ("phase", PREFILL), ("step", 0)):
        rows = trace.take(np.arange(12))
        getattr(rows, column)[-1:] = value
        validator = Validator(trace.meta, "t")
        validator.check(rows.take(slice(0, 11)))
        with pytest.raises(TraceError, match=f"^t: row 11: {column} is {value}: must"):
            validator.check(rows.take(slice(11, None)))
