"""Damage of files: of bytes, of the values in them, and whole files that nobody's writer makes."""

from __future__ import annotations

import copy
import io
import json
import random
import struct
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

ODD = (
    *(None, "", "x", "AAAA", "${oc.env:HOME}", "nan", True, False, 0, -1, 1, 1.5, -0.0, 2**31),
    *(2**63, 2**64, 10**30, 10**400, 1e300, float("nan"), float("inf"), {}, {"a": 1}, [], [[]]),
    *([None], ["a"], [1, 2], [[1]], [[["a"]]], [[[1.5]]], [[[10**30]]], [0] * 99, "9" * 5000),
)
"""What may stand where a value should."""
_EDGES = (
    0,
    1,
    0x7F,
    0xFF,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
    2**64 - 1,
)
_WORDS = (b"-1", b"NaN", b"Infinity", b"1e309", b"9" * 400, b"null", b"\x00", b"\xff", b"\n", b'"')
_WORDS += (
    b"[" * 200,
    b"{",
    b"}",
    b",",
    b"- &a [*a]",
    b"!!python/name:os.system ''",
    b"\xe2\x80\xa8",
)

# -- bytes --------------------------------------------------------------------------------------------


def of_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes with one to four changes: flips, cuts, lengths, swaps, foreign words."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        data = rng.choice(_CHANGES)(data, rng) if data else rng.randbytes(rng.randrange(9))
    return data


def _at(data: bytes, rng: random.Random) -> int:
    """Return a place; heads and tails, where the structure is, are as likely as all the rest."""
    size = len(data)
    first = rng.choice((0, 0, max(0, size - 64)))
    return rng.randrange(first, min(size, first + rng.choice((16, 64, size))))


def _flip(data: bytes, rng: random.Random) -> bytes:
    at = _at(data, rng)
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _set(data: bytes, rng: random.Random) -> bytes:
    at, size = _at(data, rng), rng.choice((1, 2, 4, 8))
    number = rng.choice(_EDGES) & (1 << 8 * size) - 1
    return data[:at] + number.to_bytes(size, rng.choice(("little", "big"))) + data[at + size :]


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: _at(data, rng)]


def _behead(data: bytes, rng: random.Random) -> bytes:
    return data[_at(data, rng) :]


def _swap(data: bytes, rng: random.Random) -> bytes:
    first, second, size = *sorted((_at(data, rng), _at(data, rng))), rng.randrange(1, 64)
    size = min(size, second - first)
    one, other = data[first : first + size], data[second : second + size]
    return data[:first] + other + data[first + size : second] + one + data[second + size :]


def _drop(data: bytes, rng: random.Random) -> bytes:
    at = _at(data, rng)
    return data[:at] + data[at + rng.randrange(1, 64) :]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    at, size = _at(data, rng), rng.randrange(1, 64)
    return data[:at] + data[at : at + size] * rng.choice((2, 3, 50)) + data[at + size :]


def _fill(data: bytes, rng: random.Random) -> bytes:
    at, size = _at(data, rng), rng.randrange(1, 64)
    return data[:at] + rng.choice((b"\x00", b"\xff")) * size + data[at + size :]


def _word(data: bytes, rng: random.Random) -> bytes:
    at = _at(data, rng)
    return data[:at] + rng.choice(_WORDS) + data[at + rng.choice((0, 1, 4)) :]


def _number(data: bytes, rng: random.Random) -> bytes:
    """Put another word where the text has a number."""
    places = [i for i in range(1, len(data)) if data[i : i + 1].isdigit()]
    if not places:
        return _word(data, rng)
    at = rng.choice(places)
    return data[:at] + rng.choice(_WORDS) + data[at + 1 :]


_CHANGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(_flip, _flip, _set, _set, _cut, _behead, _swap, _drop, _repeat, _fill, _word, _number),
)

# -- values -------------------------------------------------------------------------------------------


def of_value(value: Any, rng: random.Random) -> Any:
    """Return a copy of nested lists and dicts of which one value is gone or an odd one."""
    found = list(_places(value))
    if not found:
        return rng.choice(ODD)
    *path, last = rng.choice(found)
    value = copy.deepcopy(value)
    target = value
    for key in path:
        target = target[key]
    if rng.random() < 0.15:
        del target[last]
    elif rng.random() < 0.1 and isinstance(target, dict):
        target[rng.choice(("x", "", 3, None, "a.b"))] = target.pop(last)
    else:
        target[last] = rng.choice(ODD)
    return value


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    entries = enumerate(value[:6]) if isinstance(value, list) else ()
    for key, item in value.items() if isinstance(value, dict) else entries:
        yield from _places(item, (*at, key))


def of_text(data: bytes, suffix: str, rng: random.Random) -> bytes | None:
    """Return JSON, JSON lines, YAML or CSV with one odd value; None for what is none of these."""
    text = data.decode("utf-8")
    if suffix == ".json":
        return json.dumps(of_value(json.loads(text), rng)).encode()
    if suffix == ".jsonl":
        values = of_value([json.loads(line) for line in text.splitlines()], rng)
        return "".join(json.dumps(value) + "\n" for value in values).encode()
    if suffix == ".yaml":
        return yaml.safe_dump(of_value(yaml.safe_load(text), rng)).encode()
    if suffix == ".csv":
        rows = of_value([line.split(",") for line in text.splitlines()], rng)
        rows = [row if isinstance(row, list) else [row] for row in rows]
        return "\n".join(",".join(map(str, row)) for row in rows).encode()
    return None


# -- tables and arrays --------------------------------------------------------------------------------

_KINDS = (pa.int8(), pa.int64(), pa.float16(), pa.float64(), pa.string(), pa.bool_(), pa.binary())


def of_parquet(data: bytes, rng: random.Random) -> bytes:
    """Return a whole Parquet file of another content: types, nulls, names, rows, metadata."""
    table = pq.read_table(io.BytesIO(data))
    for _ in range(rng.choice((1, 1, 2))):
        table = rng.choice((_retyped, _nulled, _renamed, _reordered, _nested, _annotated))(
            table, rng
        )
    file = io.BytesIO()
    options: dict[str, Any] = {"compression": rng.choice(("zstd", "snappy", "none"))}
    if rng.random() < 0.5:
        options["row_group_size"] = rng.choice((1, 3, 1000))
    pq.write_table(table, file, **options)
    return file.getvalue()


def _column(table: pa.Table, rng: random.Random, made: Callable[[Any], pa.Array]) -> pa.Table:
    at = rng.randrange(table.num_columns) if table.num_columns else -1
    if at < 0:
        return table
    return table.set_column(at, table.column_names[at], made(table.column(at)))


def _retyped(table: pa.Table, rng: random.Random) -> pa.Table:
    kind, odd = rng.choice(_KINDS), rng.choice((0, 1, -1, "x", float("nan"), 2**31, True))

    def made(column: Any) -> pa.Array:
        try:
            return column.cast(kind)
        except (pa.ArrowException, ValueError):
            return pa.array([odd] * len(column))

    return _column(table, rng, made)


def _nulled(table: pa.Table, rng: random.Random) -> pa.Table:
    def made(column: Any) -> pa.Array:
        values = column.to_pylist()
        if values:
            values[rng.randrange(len(values))] = None
        return pa.array(values if rng.random() < 0.7 else [None] * len(values), column.type)

    return _column(table, rng, made)


def _nested(table: pa.Table, rng: random.Random) -> pa.Table:
    """Wrap a column's values in lists or structs, or take one cell of a list away."""

    def made(column: Any) -> pa.Array:
        values = column.to_pylist()
        how = rng.randrange(4)
        if how == 0 and values and isinstance(values[0], list):
            values[-1] = [None, *values[-1][1:]] if values[-1] else values[-1]
            return pa.array(values, column.type)
        if how == 1:
            return pa.array([{"a": value} for value in values])
        if how == 2 and values and not isinstance(values[0], list | dict):
            return pa.chunked_array([pa.array(values, column.type).dictionary_encode()])
        return pa.array([[value] for value in values])

    return _column(table, rng, made)


def _renamed(table: pa.Table, rng: random.Random) -> pa.Table:
    names = list(table.column_names)
    if rng.random() < 0.4 and len(names) > 1:
        return table.drop_columns([rng.choice(names)])
    if names:
        names[rng.randrange(len(names))] = rng.choice((*names, "x", "", "é\n"))
    return table.rename_columns(names)


def _reordered(table: pa.Table, rng: random.Random) -> pa.Table:
    rows = list(range(len(table)))
    how = rng.randrange(3)
    if how == 0:
        rng.shuffle(rows)
    elif how == 1 and rows:
        rows.insert(0, rng.choice(rows))
    else:
        rows = rows[: rng.randrange(3)]
    return table.take(rows)


def _annotated(table: pa.Table, rng: random.Random) -> pa.Table:
    """Damage the JSON that the metadata hold."""
    metadata = dict(table.schema.metadata or {})
    for key, text in list(metadata.items()):
        if key == b"ARROW:schema":
            continue
        try:
            metadata[key] = json.dumps(of_value(json.loads(text), rng)).encode()
        except ValueError:
            metadata[key] = rng.choice((b"", b"\xff\xfe", b"{}", b"[" * 9999, b"null"))
        if rng.random() < 0.1:
            metadata[key] = rng.choice((b"", b"\xff\xfe", b"{}", b"[" * 99999, b"null"))
    return table.replace_schema_metadata(metadata)


_DTYPES = ("i1", "<u8", ">i4", "<f2", ">f8", "?", "c16", "U3", "S2", "M8[s]", "V3", "O")


def _array(array: np.ndarray, rng: random.Random) -> np.ndarray:
    """Return an array of another dtype, shape, order or content."""
    how = rng.randrange(6)
    with np.errstate(all="ignore"):
        try:
            if how == 0:
                return array.astype(rng.choice(_DTYPES))
            if how == 1:
                return array.reshape(rng.choice(((-1,), (*array.shape, 1), (1, *array.shape))))
            if how == 2:
                return np.asfortranarray(array)
            if how == 3:
                return array[: rng.randrange(2)]
            if how == 4:
                return np.zeros(rng.choice(((), (0,), (0, 3, 4), (2, 0, 2))), array.dtype)
            array = array.copy()
            array.flat[rng.randrange(array.size)] = rng.choice((-1, 2**15, 255, 2**62))
        except (ValueError, TypeError, OverflowError):
            pass
    return array


def of_npz(data: bytes, rng: random.Random) -> bytes:
    """Return an archive of which one array is another, is gone, or has another name."""
    with np.load(io.BytesIO(data), allow_pickle=True) as held:
        arrays = {name: held[name] for name in held}
    name = rng.choice(sorted(arrays))
    if rng.random() < 0.15:
        del arrays[name]
    else:
        arrays[name] = _array(arrays[name], rng)
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def of_npy(data: bytes, rng: random.Random) -> bytes:
    """Return an array file of another array, or whose header lies."""
    file = io.BytesIO()
    array = _array(np.load(io.BytesIO(data)), rng)
    np.save(file, array)
    made = file.getvalue()
    if rng.random() < 0.4:
        made = made.replace(
            b"'shape': (", b"'shape': (%d, " % rng.choice((2**40, 2**62, 10**6, -1))
        )
    return made


def mutated(data: bytes, suffix: str, rng: random.Random) -> bytes:
    """Return damaged bytes of a file; half of the damage keeps the format whole, where one is known."""
    if rng.random() < 0.5:
        whole = {".parquet": of_parquet, ".npz": of_npz, ".npy": of_npy}.get(suffix)
        try:
            if whole is not None:
                return whole(data, rng)
            if (made := of_text(data, suffix, rng)) is not None:
                return made
        except (pa.ArrowException, ValueError, TypeError, OverflowError, LookupError):
            pass  # such a content cannot be written
    return of_bytes(data, rng)


# -- whole files --------------------------------------------------------------------------------------


def _bomb(member: str, size: int) -> bytes:
    file = io.BytesIO()
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"descr": "|u1", "fortran_order": False, "shape": (size,)}
    )
    with (
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open(member, "w", force_zip64=True) as out,
    ):
        out.write(head.getvalue())
        for _ in range(size >> 24):
            out.write(bytes(1 << 24))
    return file.getvalue()


def _lying_npz(names: tuple[str, ...]) -> bytes:
    """An archive of arrays of 8 TB by their headers, with no data behind them."""
    file, head = io.BytesIO(), io.BytesIO()
    shape = (2**10, 2**20, 2**10)
    np.lib.format.write_array_header_1_0(
        head, {"descr": "<f8", "fortran_order": False, "shape": shape}
    )
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(f"{name}.npy", head.getvalue())
    return file.getvalue()


_LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
_LOOP = "&a [*a, *a]\n"
_LOOPS = "a: &a {b: *a}\nrows: &r [*r, {id: *r}]\n"


@cache
def special(suffix: str) -> dict[str, bytes]:
    """Return files by name that no damage of a whole one leads to."""
    files = {
        "empty": b"",
        "newline": b"\n",
        "mark": b"\xef\xbb\xbf",
        "utf-16": '{"a": 1}\n'.encode("utf-16"),
        "latin-1": "é: ü\n".encode("latin-1"),
        "zeros": bytes(4096),
        "ones": b"\xff" * 4096,
        "null": b"null\n",
        "number": b"3\n",
        "text": b'"text"\n',
        "long line": b"1," * 200_000,
        "deep JSON": b"[" * 100_000,
        "deep JSON closed": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        "many digits": b'{"a": ' + b"9" * 100_000 + b"}",
    }
    if suffix == ".yaml":
        files |= {
            "laughs": _LAUGHS.encode(),
            "laughs in rows": ("rows: [{id: a, value: *a9}]\n").join((_LAUGHS, "")).encode(),
            "laughs in a list": f"- {{{_LAUGHS.replace(chr(10), ',')} id: *a9}}\n".encode(),
            "loop": _LOOP.encode(),
            "loops": _LOOPS.encode(),
            "deep YAML": b"[" * 20_000 + b"]" * 20_000,
            "deep mappings": b"".join(b" " * n + b"a:\n" for n in range(3000)),
            "object": b"!!python/object/apply:os.system ['echo broken']\n",
            "tag": b"a: !x y\n",
            "two documents": b"a: 1\n---\nb: 2\n",
            "merge": b"a: &a {b: 1}\nc:\n  <<: [*a, *a]\n  <<: 3\n",
            "date": b"2026-01-01: 2026-01-01\nrows: [{id: 2026-01-01, value: 0x10}]\n",
            "sets": b"!!set {a, b}\n",
            "binary": b"a: !!binary AAAA\n",
        }
    if suffix == ".npz":
        names = ("experts", "meta", "routed_experts", "request_id", "expert_ids", "facts")
        files |= {f"bomb {name}": _bomb(f"{name}.npy", 1 << 30) for name in ("experts", "facts")}
        files["bomb routed_experts"] = _bomb("routed_experts.npy", 1 << 30)
        files["lengths that lie"] = _lying_npz(names)
    if suffix == ".gguf":
        files |= {
            "many tensors": b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0) + bytes(64),
            "long text": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**31 - 1) + b"a",
            "long array": b"GGUF"
            + struct.pack("<IQQQ", 3, 0, 1, 1)
            + b"a"
            + struct.pack("<IIQ", 9, 0, 2**31),
            "arrays of nothing": b"GGUF"
            + struct.pack("<IQQQ", 3, 0, 1, 1)
            + b"a"
            + struct.pack("<IIQ", 9, 9, 2**40)
            + struct.pack("<IQ", 0, 0) * 9,
        }
    if suffix == ".safetensors":
        files["long head"] = (99_999_999).to_bytes(8, "little") + b"{"
    if suffix == ".parquet":
        files |= {
            "encrypted": b"PARE" + bytes(64) + struct.pack("<I", 40) + b"PARE",
            "long footer": b"PAR1" + bytes(64) + struct.pack("<I", 2**31 - 1) + b"PAR1",
            "no columns": _table_bytes(pa.table({})),
            "no rows": _table_bytes(pa.table({"a": pa.array([], pa.int32())})),
        }
    return files


def _table_bytes(table: pa.Table) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


def put(path: Path, data: bytes) -> None:
    """Write over what is there."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)
