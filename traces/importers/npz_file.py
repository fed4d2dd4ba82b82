"""Reads ``.npz`` archives whose arrays may be pickled, without running code that a pickle holds."""

from __future__ import annotations

import pickle
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy_format

from traces.importers.sources import NOT_NPY
from traces.trace import TraceError

_MODULES = ("numpy", "numpy._core.multiarray", "numpy._core.numeric")
_ARRAY_PARTS = ("ndarray", "dtype", "_reconstruct", "scalar", "_frombuffer")


class _ArraysOnly(pickle.Unpickler):
    """Refuses any name in a pickle that is not a part of a numpy array."""

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core.", "numpy._core.")  # as numpy 1 wrote it
        known = module in _MODULES and name in _ARRAY_PARTS
        if not known and (module, name) != ("_codecs", "encode"):
            raise pickle.UnpicklingError(
                f"holds a Python object ({module}.{name}), which could run code"
            )
        return super().find_class(module, name)


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
        RuntimeError,  # encrypted, or a compression that nobody knows
    ) as error:
        reason = " ".join(str(error).split())[:120]
        raise TraceError(f"{path}: not a npz archive: {reason}") from None


def _member(archive: zipfile.ZipFile, name: str) -> Any:
    with archive.open(name) as file:
        version = npy_format.read_magic(file)
        if version == (1, 0):
            _, _, dtype = npy_format.read_array_header_1_0(file)
        else:
            _, _, dtype = npy_format.read_array_header_2_0(file)
        if dtype.hasobject:
            return _unpacked(file)
    with archive.open(name) as file:
        return npy_format.read_array(file, allow_pickle=False)


def _unpacked(file: IO[bytes]) -> Any:
    array = _ArraysOnly(file).load()
    return array.item() if isinstance(array, np.ndarray) and array.size == 1 else array
