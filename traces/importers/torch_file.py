"""Loads files that ``torch.save`` wrote, as plain Python and numpy; no code in them is run.

The only importer that needs torch, and only when it is called.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

from traces.importers.array_pickle import STAND_INS, with_arrays
from traces.trace import TraceError

_NO_FILE = "not a file of torch.save, or one that is cut short"
_FAILURES = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    AssertionError,
    MemoryError,
)


def load_torch(path: str | os.PathLike[str]) -> Any:
    """Return what a ``.pt`` file holds: dicts, lists, numbers and text, with numpy arrays for tensors.

    Tensors of types that numpy lacks (bfloat16, float8) become float32.

    Raises
    ------
    TraceError
        If the file cannot be read, is no such file, or holds Python objects: they could run code.
    """
    import pickle

    import torch

    path = Path(path)
    try:
        with torch.serialization.safe_globals(_numpy_globals()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old formats: what they hold is read all the same
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        return _plain(with_arrays(loaded, path.stat().st_size))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except pickle.UnpicklingError as error:
        raise TraceError(f"{path}: {_refusal(str(error))}") from None
    except _FAILURES as error:
        raise TraceError(f"{path}: {_fault(error)}") from None


def _numpy_globals() -> list[Any]:
    """Return stand-ins for what the pickle of a numpy array names; all other objects are refused still."""
    return [(made, name) for name, made in STAND_INS.items()]


def _refusal(text: str) -> str:
    """Say in one line why the safe loader refused a file."""
    found = re.search(r"(?:Unsupported global: GLOBAL|Unsupported class|GLOBAL) (\S+)", text)
    if found:
        rule = "only tensors, arrays, numbers, text, lists and dicts are read"
        return f"holds a Python object ({found[1]}), which could run code: {rule}"
    return _NO_FILE


def _fault(error: Exception) -> str:
    """Say in one line what is wrong with a file that the loader could not read."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if "PytorchStreamReader" in reason or isinstance(error, EOFError):
        return _NO_FILE
    return f"not a file of torch.save: {reason[:120]}"


def _plain(value: Any) -> Any:
    """Return ``value`` with numpy arrays in place of tensors, however deep."""
    import torch

    if isinstance(value, torch.Tensor):
        value = value.detach()
        try:
            return value.numpy()
        except TypeError:  # numpy has no such type
            return value.to(torch.float32).numpy()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else list(value)
    return value
