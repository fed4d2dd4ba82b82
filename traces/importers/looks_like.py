"""Tells by a file's first bytes which format it looks like, for those who named none or a wrong one."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Collection
from pathlib import Path

import numpy as np

from traces.importers.sources import NOT_NPY

_HEAD_BYTES = 2**16
_MOST_LAYERS = 1000
_JSON_KEYS: tuple[tuple[str, frozenset[str]], ...] = tuple(
    (name, frozenset(keys.split()))
    for name, keys in (
        ("moe-policylang", "records_full_softmax"),
        ("vllm-patch", "type layer topk_ids"),
        ("vllm-patch", "type model_id layers_logged"),
        ("lattice", "layer_idx token_idx selected_ids"),
        ("megatron-trace", "layer num_tokens top_indices"),
        ("megatron-counts", "iter layer tpe"),
        ("moe-balance", "layer topk_experts"),
        ("rl-tensors", "completion_ids"),
        ("routed-experts", "meta_info"),
        ("routed-experts", "output_ids"),
        ("routed-experts", "choices"),
        ("eplb", "logical_count"),
        ("eplb", "activation_freq"),
        ("eplb", "weight"),
    )
)
"""Formats by keys in JSON, the first that fits."""
_PICKLED_KEYS = (
    ("rl-tensors", b"rollout_routed_experts"),
    ("rl-tensors", b"routed_experts"),
    ("sglang-recorder", b"last_physical_to_logical_map"),
    ("sglang-recorder", b"average_utilization_rate_over_window"),
    ("eplb", b"logical_count"),
    ("eplb", b"activation_freq"),
    ("eplb", b"weight"),
    ("finemoe", b"iters"),
)
_CSV = re.compile(r"\d+,\d+(?:,\d+)*|phase,token,layer,rank,expert")


def looks_like(path: Path) -> str | None:
    """Return the name of the format, None where nothing tells; a folder's files must tell the same one.

    Reads 64 KiB at most and never raises. Raw int32 has no sign of its own.
    """
    try:
        if path.is_dir():
            inside = {looks_like(file) for file in path.iterdir() if file.is_file()} - {None}
            return inside.pop() if len(inside) == 1 else None
        if not path.is_file():  # a pipe may be read once only
            return None
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        return _of_magic(path, head) or _of_text(head)
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile, KeyError):
        return None


def _of_magic(path: Path, head: bytes) -> str | None:
    if head.startswith(b"PAR1"):
        return _of_parquet(path)
    if head.startswith(b"\x93NUMPY"):
        return _of_npy(path)
    if head.startswith(b"PK\x03\x04"):
        return _of_archive(path)
    if head.startswith(b"\x80"):
        return next((name for name, key in _PICKLED_KEYS if key in head), None)
    if head.startswith(b"MPTRACE\0"):
        return "mpt"
    if head.startswith(b"GGUF"):
        return "imatrix"
    return "moe-trace-bin" if _is_stream(head) else None


def _is_stream(head: bytes) -> bool:
    """Tell whether two records of (layer, tokens, k, ids) follow one another."""
    numbers = np.frombuffer(head[: len(head) // 4 * 4], dtype="<i4")
    if len(numbers) < 6 or min(layer_tokens_k := numbers[:3].tolist()) < 0:
        return False
    layer, num_tokens, top_k = layer_tokens_k
    second = numbers[3 + num_tokens * top_k :][:3].tolist()
    if not top_k or len(second) < 3 or second[2] != top_k:
        return False
    return layer < second[0] < _MOST_LAYERS and 1 <= second[1] <= num_tokens


def _of_parquet(path: Path) -> str | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = {*pq.read_schema(path).names}
    except (pa.ArrowException, OSError, UnicodeError):
        return None
    return "moe-policylang" if {"prompt_id", "token_idx", "layer_idx"} <= names else None


def _of_npy(path: Path) -> str | None:
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except NOT_NPY:
        return None
    if array.ndim == 3:
        return "moe-infinity" if array.dtype.kind == "f" else "routed-experts"
    return "eplb" if array.ndim == 2 else None


def _of_archive(path: Path) -> str | None:
    """Tell archives of numpy by the names of their arrays, those of torch by the keys in their pickle."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        pickles = [name for name in names if name.endswith("/data.pkl")]
        if pickles:
            with archive.open(pickles[0]) as file:
                head = file.read(_HEAD_BYTES)
            return next((name for name, key in _PICKLED_KEYS if key in head), None)
    if {"experts.npy", "meta.npy"} <= {*names}:
        return "experts-npz"
    if "routed_experts.npy" in names:
        return "moe-balance" if "request_id.npy" in names else "routed-experts"
    return None


def _of_text(head: bytes) -> str | None:
    text = head.decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n")
    if text.startswith(("{", "[")):
        return _of_keys({*re.findall(r'"(\w+)"\s*:', text)}) or _of_lists(text)
    if text.startswith("# route_trace"):
        return "route-csv"
    return "moe-trace-csv" if _CSV.fullmatch(text.split("\n", 1)[0].strip()) else None


def _of_keys(keys: Collection[str]) -> str | None:
    return next((name for name, wanted in _JSON_KEYS if wanted <= {*keys}), None)


def _of_lists(text: str) -> str | None:
    """Tell imp's records, lists of a layer and its experts, which may lie in an object."""
    in_object = r'\{.*"(?:trace|entries|data)"\s*:\s*'
    return "imp" if re.match(rf"(?:{in_object})?\[\s*\[\s*\d+\s*,\s*\d+", text, re.DOTALL) else None
