"""Makes numpy arrays of what pickles say of them, without letting a pickle touch numpy's own objects.

A pickle sets the state of the objects that it makes. Of a real ``numpy.dtype`` that state has flags, and one
that denies the Python objects within makes numpy follow any number as a pointer. So a pickle gets stand-ins
here, which keep what they are told, and the arrays are made of that by :func:`with_arrays`, checked.
"""

from __future__ import annotations

import math
import pickle
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PLAIN = re.compile(r"[<>|=]?(?:[?bBhHiIlLqQefdO]|b1|[iu][1248]|f[248]|[SU]\d{1,9}|O8)")


def _refuse(_: Any, __: Any) -> None:
    """Stand for ``__setstate__`` of what has no state; so none can be set on the class itself either."""
    raise pickle.UnpicklingError("sets the state of what has none")


class PickledDtype:
    """Stands for ``numpy.dtype``: knows plain numbers, text and objects."""

    __slots__ = ("dtype",)

    def __init__(self, code: Any = None, *_: Any) -> None:
        if not isinstance(code, str) or not _PLAIN.fullmatch(code):
            raise pickle.UnpicklingError(
                f"holds an array of {str(code)[:40]!r}, not of plain values"
            )
        self.dtype: np.dtype[Any] = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        """Take the byte order; the rest is of structures, or follows from the type."""
        if not isinstance(state, tuple) or any(part is not None for part in state[2:5]):
            raise pickle.UnpicklingError("holds an array of structures, not of plain values")
        if len(state) > 1 and state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])


class PickledArray:
    """Stands for an array that numpy is to make anew; the state that follows tells all of it."""

    __slots__ = ("state",)

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        """Keep what the array is."""
        self.state = state

    def array(self) -> NDArray[Any]:
        """Return the array; ValueError or TypeError for a state that is none."""
        _, shape, kind, is_fortran, data = self.state
        return _array(data, kind, shape, "F" if is_fortran else "C")


class PickledView:
    """Stands for an array of a buffer, as newer pickles have it; also for a single number."""

    __slots__ = ("told",)

    def __init__(self, *told: Any) -> None:
        self.told = told

    def array(self) -> NDArray[Any]:
        """Return the array; ValueError or TypeError for what is none."""
        data, kind, shape, order = self.told[:4]
        if not isinstance(data, bytes | bytearray):
            raise ValueError("an array without its data")
        return _array(bytes(data), kind, shape, order)

    __setstate__ = _refuse


class PickledScalar:
    """Stands for one number of numpy."""

    __slots__ = ("told",)

    def __init__(self, *told: Any) -> None:
        self.told = told

    def number(self) -> Any:
        """Return the number; ValueError or TypeError for what is none."""
        kind, data = self.told
        return _array(data, kind, (), "C")[()]

    __setstate__ = _refuse


class PickledClass:
    """Stands for ``numpy.ndarray``, which pickles name as the class to make."""

    __slots__ = ()
    __setstate__ = _refuse


class _Encoded:
    """Makes the bytes that pickles of the oldest kind write as Latin-1 text."""

    __slots__ = ()
    __setstate__ = _refuse

    def __call__(self, text: Any, coding: Any = "", *_: Any) -> bytes:
        if not isinstance(text, str) or coding not in ("latin1", "latin-1"):
            raise pickle.UnpicklingError(f"encodes text as {str(coding)[:40]!r}")
        return text.encode("latin-1")


_MULTIARRAY = {"_reconstruct": PickledArray, "scalar": PickledScalar}
STAND_INS: dict[str, Any] = {
    "numpy.ndarray": PickledClass,
    "numpy.dtype": PickledDtype,
    "_codecs.encode": _Encoded(),
    **{
        f"numpy.{core}.{name}": made
        for core in ("core", "_core")  # as numpy 1 and numpy 2 write it
        for name, made in (
            *((f"multiarray.{part}", made) for part, made in _MULTIARRAY.items()),
            ("numeric._frombuffer", PickledView),
        )
    },
}
"""By the names that pickles of arrays call for."""


def _array(data: Any, kind: Any, shape: Any, order: Any) -> NDArray[Any]:
    whole = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
    if not isinstance(kind, PickledDtype) or not whole or order not in ("C", "F"):
        raise ValueError("an array whose type or shape is not told")
    dtype, count = kind.dtype, math.prod(shape)
    if dtype.hasobject:
        if not isinstance(data, list) or len(data) != count:
            raise ValueError(f"an array of {count} objects that has others")
        flat = np.empty(count, dtype=object)
        flat[:] = [_with_arrays(item) for item in data]
    else:
        if not isinstance(data, bytes) or len(data) != count * dtype.itemsize:
            raise ValueError(f"an array of {count} values whose data have another length")
        flat = np.frombuffer(data, dtype=dtype, count=count)
    return flat.reshape(shape, order=order)


def with_arrays(value: Any, num_bytes: int) -> Any:
    """Return what a pickle of so many bytes made with arrays in place of their stand-ins, however deep.

    Raises UnpicklingError, ValueError or TypeError for arrays that cannot be, and for lists within lists that
    come to far more values than the bytes could tell; RecursionError for what is nested too deep.
    """
    if (num_values := _num_values(value, {})) > 4 * num_bytes + 1000:
        raise pickle.UnpicklingError(f"holds {num_values:.2g} values in {num_bytes} bytes")
    return _with_arrays(value)


def _num_values(value: Any, known: dict[int, int]) -> int:
    """Return how many values there are if each is written out; RecursionError for what holds itself."""
    if isinstance(value, PickledArray):
        value = value.state[-1] if isinstance(value.state, tuple) and value.state else None
    if not isinstance(value, dict | list | tuple):
        return 1
    if id(value) not in known:
        items = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_num_values(item, known) for item in items)
    return known[id(value)]


def _with_arrays(value: Any) -> Any:
    if isinstance(value, PickledArray | PickledView):
        return value.array()
    if isinstance(value, PickledScalar):
        return value.number()
    if isinstance(value, PickledDtype | PickledClass) or callable(value):
        raise pickle.UnpicklingError("holds a type, not a value")
    if isinstance(value, dict):
        return {_key(key): _with_arrays(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        made = map(_with_arrays, value)
        return tuple(made) if type(value) is tuple else list(made)
    return value


def _key(key: Any) -> Any:
    return key.number() if isinstance(key, PickledScalar) else key
