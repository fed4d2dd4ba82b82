"""Arrays of expert ids as engines and trainers put them into JSON: base64 of raw bytes or npy, lists, dicts.

Knows nothing of requests; ``where`` is what errors call the value ("answers.json: answer 3").
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.importers.sources import NOT_NPY
from traces.trace import TraceError

_NPY_MAGIC = b"\x93NUMPY"
_RAW_DTYPES = ("uint8", "int16", "uint16", "int32", "int64")


def raw_bytes(value: object, where: str) -> bytes:
    """Return what base64 text holds; raises TraceError for anything else."""
    if not isinstance(value, str):
        raise TraceError(f"{where}: is {type(value).__name__}: must be base64 text")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise TraceError(f"{where}: is not base64: {error}") from None


def raw_int32(
    data: bytes, num_hidden_layers: int, top_k: int, where: str
) -> NDArray[np.signedinteger]:
    """Return headerless little-endian int32 in C order as ids [rows, num_hidden_layers, top_k].

    Nothing in the bytes tells the shape: a wrong one goes unseen if it divides the length, so that a
    caller who knows the number of rows must compare it.
    """
    row_bytes = 4 * num_hidden_layers * top_k
    if data.startswith(_NPY_MAGIC):
        raise TraceError(f"{where}: holds a npy array: must be raw int32 without a header")
    if not data or len(data) % row_bytes:
        rule = f"must be a multiple of {row_bytes} (int32, {num_hidden_layers} layers, top-{top_k})"
        raise TraceError(f"{where}: is {len(data)} bytes: {rule}")
    return np.frombuffer(data, dtype="<i4").reshape(-1, num_hidden_layers, top_k)


def npy(data: bytes, where: str) -> NDArray[Any]:
    """Return the array of ``.npy`` bytes; pickled ones are refused."""
    try:
        array: NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
    except (OSError, *NOT_NPY) as error:
        raise TraceError(f"{where}: is not a npy array: {' '.join(str(error).split())}") from None
    return array


def ids_of(value: object, where: str) -> NDArray[np.integer]:
    """Return expert ids [rows, layers, k] of any form that says its own shape.

    These are: base64 of ``.npy`` bytes (vLLM), nested lists (vLLM 0.21), an array, and a dict of raw bytes
    with their shape (:func:`ids_of_dict`).

    Raises
    ------
    TraceError
        For another form, ragged lists, other axes, or numbers that are not whole.
    """
    if isinstance(value, str):
        data = raw_bytes(value, where)
        if not data.startswith(_NPY_MAGIC):
            rule = "must be base64 of a npy array (raw int32, as SGLang sends, has no shape)"
            raise TraceError(f"{where}: is base64 of {len(data)} other bytes: {rule}")
        return _ids(npy(data, where), where)
    if isinstance(value, dict):
        return ids_of_dict(value, where)
    if not isinstance(value, (list, np.ndarray)):
        rule = "must be base64 text, lists of ids, or data with a shape"
        raise TraceError(f"{where}: is {type(value).__name__}: {rule}")
    try:
        array = np.asarray(value)
    except ValueError:
        rule = "must be [rows, layers, k] throughout"
        raise TraceError(f"{where}: lists of unequal lengths: {rule}") from None
    return _ids(array, where)


def ids_of_dict(value: dict[str, Any], where: str) -> NDArray[np.integer]:
    """Return the ids of ``{data, shape, dtype?}``, where ``data`` is raw bytes or base64 of them.

    Without ``dtype`` the width of one id follows from the number of bytes (verifiers writes uint8, or wider
    unsigned numbers where a model has more experts).
    """
    data, shape = value.get("data"), value.get("shape")
    if data is None or shape is None:
        raise TraceError(f"{where}: has {', '.join(map(str, value))}: must have data and shape")
    if not isinstance(data, (bytes, bytearray)):
        data = raw_bytes(data, where)
    whole = isinstance(shape, (list, tuple)) and all(type(size) is int for size in shape)
    if not whole or len(shape) != 3 or min(shape) < 0:
        raise TraceError(f"{where}: shape is {shape!r}: must be [rows, layers, k]")
    count = math.prod(shape)
    dtype = str(
        value.get("dtype") or {1: "uint8", 2: "uint16", 4: "int32"}.get(_width(data, count))
    )
    if dtype not in _RAW_DTYPES:
        rule = f"must be one of {', '.join(_RAW_DTYPES)}"
        if value.get("dtype") is None:
            rule = f"must be 1, 2 or 4 for each of {count} ids"
            raise TraceError(f"{where}: is {len(data)} bytes: {rule}")
        raise TraceError(f"{where}: dtype is {dtype!r}: {rule}")
    if len(data) != count * np.dtype(dtype).itemsize:
        rule = f"must be {count * np.dtype(dtype).itemsize}, {dtype} by shape {list(shape)}"
        raise TraceError(f"{where}: is {len(data)} bytes: {rule}")
    return np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<")).reshape(shape)


def _width(data: bytes | bytearray, count: int) -> int:
    return len(data) // count if count and len(data) % count == 0 else 0


def _ids(array: NDArray[Any], where: str) -> NDArray[np.integer]:
    if array.size == 0 and array.ndim in (1, 2, 3):
        return np.zeros((0, 0, 0), dtype=np.int32) if array.ndim < 3 else array.astype(np.int32)
    if array.ndim != 3 or array.dtype.kind not in "iu":
        rule = "must be whole numbers [rows, layers, k]"
        raise TraceError(f"{where}: is {array.dtype}{list(array.shape)}: {rule}")
    return array
