"""Reads pickles of plain values and torch tensors as numpy arrays, without torch and without running code.

``pickle.dump`` of a tensor calls for ``torch._utils._rebuild_tensor_v2`` on a storage, and the storage is a
``torch.save`` file of the old kind within: four pickles (magic number, protocol, the machine's sizes, the
storage's type and key), a pickle of the keys, then the number of elements as int64 and the elements.
Any other name that a pickle calls for is refused.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.importers.array_pickle import with_arrays
from traces.trace import TraceError

_DTYPES = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "BFloat16Storage": "<u2",  # the upper half of a float32
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
    "BoolStorage": "?",
}
_PICKLES_BEFORE = 3  # magic number, protocol version, sizes


class _Bfloat16(np.ndarray):
    """Raw 16-bit halves, to be widened when a tensor is made of them."""


def load_pickle(path: Path) -> Any:
    """Return what a pickle holds: tensors as arrays (bfloat16 as float32), wherever they lay.

    Raises
    ------
    TraceError
        If the file is no pickle, is cut short, or calls for anything but tensors and plain values.
    """
    try:
        with path.open("rb") as file:
            return with_arrays(_Values(file).load(), path.stat().st_size)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except _REFUSED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TraceError(
            f"{path}: not a pickle of tensors that is safe to read: {reason}"
        ) from None


_REFUSED = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    ImportError,
    OverflowError,
    MemoryError,
    RecursionError,
    struct.error,
    AssertionError,
)


class _Values(pickle._Unpickler):  # in Python: see npz_file
    """Knows tensors, ordered dicts and what pickles need no name for."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it calls for {module}.{name}, which could run code"
            ) from None


class _StorageHead(pickle._Unpickler):
    """Reads the type and key of a storage; torch's storage classes become the names of their dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        if module != "torch" or name not in _DTYPES:
            raise pickle.UnpicklingError(f"a storage of {module}.{name} is not known")
        return name

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _storage(data: bytes) -> NDArray[Any]:
    """Return the elements of a storage that was saved by itself."""
    file = io.BytesIO(data)
    for _ in range(_PICKLES_BEFORE):
        _StorageHead(file).load()
    _, kind, _, _, count, *_ = _StorageHead(file).load()
    _StorageHead(file).load()  # the keys, one
    stored = int.from_bytes(file.read(8), "little")
    elements = np.frombuffer(file.read(), dtype=_DTYPES[kind])
    if not stored == count == len(elements):
        raise ValueError(f"a storage of {count} elements has {len(elements)}")
    return elements.view(_Bfloat16) if kind == "BFloat16Storage" else elements


def _tensor(
    storage: NDArray[Any], offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> NDArray[Any]:
    """Return a tensor as the copy that its strides make of the storage."""
    extent = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    count = int(np.prod(size, dtype=object))
    fits = count == 0 or offset + extent < len(storage)
    if min((offset, *size, *stride)) < 0 or count > len(storage) or not fits:
        raise ValueError(f"a tensor of shape {size} does not fit its storage of {len(storage)}")
    steps = tuple(step * storage.itemsize for step in stride)
    view = np.lib.stride_tricks.as_strided(
        np.asarray(storage)[offset:], shape=size, strides=steps, writeable=False
    )
    if isinstance(storage, _Bfloat16):
        return (view.astype(np.uint32) << 16).view(np.float32)
    return view.copy()


class _Tensor:
    """Calls for a tensor; has nothing that a pickle could set."""

    __slots__ = ()

    def __call__(self, *told: Any) -> NDArray[Any]:
        return _tensor(*told)


class _Storage:
    """Calls for a storage; has nothing that a pickle could set."""

    __slots__ = ()

    def __call__(self, data: Any) -> NDArray[Any]:
        return _storage(data)


_KNOWN: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _Tensor(),
    ("torch.storage", "_load_from_bytes"): _Storage(),
    ("collections", "OrderedDict"): OrderedDict,
}
