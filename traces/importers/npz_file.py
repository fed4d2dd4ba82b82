"""Reads ``.npz`` archives whose arrays may be pickled, without running code that a pickle holds."""

from __future__ import annotations

import math
import pickle
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy_format

from traces.importers.array_pickle import STAND_INS, with_arrays
from traces.importers.sources import NOT_NPY
from traces.trace import TraceError

_LARGE_BYTES, _MOST_RATIO = 256 * 2**20, 250
"""An array that unpacks to more bytes, and to so many times its own, is made to fill a memory."""


class _ArraysOnly(pickle._Unpickler):  # in Python: the one in C trusts lengths
    """Refuses any name in a pickle that is not a part of a numpy array, for which it has stand-ins."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return STAND_INS[f"{module}.{name}"]
        except KeyError:
            raise pickle.UnpicklingError(
                f"holds a Python object ({module}.{name}), which could run code"
            ) from None


def load_npz(path: Path) -> dict[str, Any]:
    """Return the arrays of an archive by name; an array of one pickled object is that object.

    Objects may be arrays, numbers, text, lists, dicts and None, nothing else.

    Raises
    ------
    TraceError
        If the file is no such archive, is cut short, or holds other objects.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(".npy")]
            return {name.removesuffix(".npy"): _member(archive, name) for name in names}
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except pickle.UnpicklingError as error:
        raise TraceError(f"{path}: {error}") from None
    except (
        *NOT_NPY,
        KeyError,
        AttributeError,
        IndexError,
        ImportError,
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        AssertionError,
        OverflowError,
        RuntimeError,  # encrypted, or a compression that nobody knows
    ) as error:
        reason = " ".join(str(error).split())[:120]
        raise TraceError(f"{path}: not a npz archive: {reason}") from None


def _member(archive: zipfile.ZipFile, name: str) -> Any:
    info = archive.getinfo(name)
    if info.file_size > max(_LARGE_BYTES, _MOST_RATIO * info.compress_size):
        raise ValueError(f"{name} unpacks to {info.file_size / 1e9:.3g} GB of nearly nothing")
    with archive.open(name) as file:
        version = npy_format.read_magic(file)
        if version == (1, 0):
            shape, _, dtype = npy_format.read_array_header_1_0(file)
        else:
            shape, _, dtype = npy_format.read_array_header_2_0(file)
        if dtype.hasobject:
            return _unpacked(file, info.file_size)
    if (promised := math.prod(shape) * dtype.itemsize) > info.file_size:
        raise ValueError(f"{name} promises {promised} bytes and has {info.file_size}")
    with archive.open(name) as file:
        return npy_format.read_array(file, allow_pickle=False)


def _unpacked(file: IO[bytes], num_bytes: int) -> Any:
    array = with_arrays(_ArraysOnly(file).load(), num_bytes)
    return array.item() if isinstance(array, np.ndarray) and array.size == 1 else array
