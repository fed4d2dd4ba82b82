"""The bundled engines build and differ as they say; bad ones are refused."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from hwmodels.engine import Engine
from hwmodels.errors import HardwareError
from tests.configs import composed, options
from tests.round_hardware import engine, read

FIELDS = list(Engine.__slots__)
LAUNCHES = [field for field in FIELDS if "launches" in field]


@pytest.mark.parametrize("name", options("engine"))
def test_every_engine_builds_and_gives_all_fields(name: str) -> None:
    plain = read("engine", name)
    assert Engine.from_mapping(plain).name == name
    assert list(plain) == FIELDS  # each can be overridden


def test_the_default_engine_is_overlapped() -> None:
    assert Engine.from_mapping(composed()["engine"]) == Engine.from_mapping(
        read("engine", "overlapped")
    )
    assert composed("engine=serial")["engine"]["copies_overlap"] is False


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("serial", {"copies_overlap": False, "cpu_overlaps": False, "order": "routing"}),
        ("chunked", {"chunks": 3, "chunk_compute": True}),
        (
            "fused",
            {"kernels": "grouped", "graph": True, "dense_launches": 23, "group_block_tokens": 16},
        ),
    ],
)
def test_a_preset_differs_from_the_default_in_what_it_is_named_for(
    name: str, changes: dict[str, Any]
) -> None:
    made = Engine.from_mapping(read("engine", name))
    default = asdict(Engine.from_mapping(read("engine", "overlapped")))
    assert asdict(made) == {**default, "name": name, **changes}


def test_a_fused_engine_launches_28_kernels_a_layer() -> None:
    """1341 launches a token for Qwen3-30B-A3B's 48 layers, experts included (kekzl/imp PR 1377)."""
    fused = Engine.from_mapping(read("engine", "fused"))
    a_layer = fused.dense_launches + fused.expert_launches
    assert 48 * a_layer + fused.head_launches == pytest.approx(1341, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": "first"}, "order = 'first': must be 'ready' or 'routing'"),
        ({"kernels": "grupped"}, "must be 'per_expert' or 'grouped'; did you mean 'grouped'?"),
        ({"split": None}, "split = None: must be a text that is not empty"),
        ({"storage_access": "mmap"}, "must be 'direct' or 'page_cache'"),
        ({"chunks": 2}, "chunks = 2: must be 1 or 3 (gate, up, down)"),
        ({"chunks": 0}, "chunks = 0: must be > 0"),
        ({"chunks": 10**19}, f"chunks = {10**19}: must be <= 1e+18"),
        ({"chunk_compute": True}, "chunks = 1: must be 3 with chunk_compute"),
        (
            {"chunk_compute": True, "chunks": 3, "order": "routing"},
            "order = 'routing': must be 'ready' with chunk_compute",
        ),
        (
            {"chunk_compute": True, "chunks": 3, "copies_overlap": False},
            "copies_overlap = False: must be true with chunk_compute",
        ),
        ({"graph": 1}, "graph = 1: must be true or false"),
        ({"cpu_experts_at_once": 0}, "cpu_experts_at_once = 0: must be > 0"),
        ({"cpu_experts_at_once": 1.5}, "cpu_experts_at_once = 1.5: must be a whole number"),
        ({"storage_block_bytes": -4096}, "storage_block_bytes = -4096: must be >"),
        ({"storage_queue_depth": float("nan")}, "storage_queue_depth = nan: must be finite"),
        ({"expert_launches": -1}, "expert_launches = -1: must be >= 0"),
        ({"exclusive": True}, "exclusive = True: unknown field; did you mean 'exclusive_host'?"),
        ({"name": ""}, "name = '': must be a text that is not empty"),
    ],
)
def test_a_bad_engine_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(HardwareError) as error:
        Engine.from_mapping({**read("engine", "overlapped"), **changes}, "engine/mine")
    assert str(error.value).startswith("engine/mine: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_field_is_named(field: str) -> None:
    plain = read("engine", "overlapped")
    del plain[field]
    with pytest.raises(HardwareError, match=f"^mine: {field}: missing, must be given$"):
        Engine.from_mapping(plain, "mine")


@pytest.mark.parametrize("whole", [None, 3, [1]])
def test_an_engine_is_a_mapping(whole: Any) -> None:
    with pytest.raises(HardwareError, match="must be a mapping"):
        Engine.from_mapping(whole)


@pytest.mark.parametrize("field", LAUNCHES)
def test_launches_may_be_none(field: str) -> None:
    assert getattr(engine(**{field: 0}), field) == 0
