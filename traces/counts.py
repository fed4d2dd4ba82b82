"""How often each expert was used, where a source has lost the order: statistics, not a trace.

Such files (load counters, activation matrices, imatrix) cannot be replayed: a cache lives on order.
They tell popularity, which a static placement and the synthesis of traces can use.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from traces.out_file import whole_output
from traces.schema import COUNTS_KEY, Provenance, TraceError

if TYPE_CHECKING:
    import pyarrow as pa

_BROKEN = (
    *(TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, RecursionError),
)
_CELLS_A_ROW, _MOST_EMPTY = 1000, 1_000_000
"""A row is a cell that is not zero: of larger tables the header lies."""
_NAMES = ("sample", "layer", "expert", "count")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCounts:
    """Uses of each expert, by sample and MoE layer.

    Attributes
    ----------
    counts
        float64[num_samples, num_layers, num_experts], finite and >= 0. A sample is what ``unit`` says: a
        sequence, a forward pass, a text, a window of time.
    layer_indices
        Absolute index of each MoE layer, ascending.
    """

    model: str
    counts: NDArray[np.float64]
    layer_indices: tuple[int, ...]
    unit: str
    provenance: Provenance
    top_k: int | None = None
    recorder: str | None = None
    notes: tuple[str, ...] = ()
    licence: str | None = None

    def __post_init__(self) -> None:
        shape = self.counts.shape
        if len(shape) != 3 or 0 in shape:
            raise TraceError(
                f"counts are {shape}: must be [samples, layers, experts], none of them 0"
            )
        if len(self.layer_indices) != shape[1]:
            rule = f"must be {shape[1]}, one a layer of the counts"
            raise TraceError(f"layer_indices are {len(self.layer_indices)}: {rule}")
        if list(self.layer_indices) != sorted({*self.layer_indices}):
            raise TraceError(f"layer_indices are {self.layer_indices}: must be ascending")
        wrong = np.argwhere(~(np.isfinite(self.counts) & (self.counts >= 0)))
        if len(wrong):
            sample, layer, expert = wrong[0].tolist()
            raise TraceError(
                f"count of sample {sample}, layer {layer}, expert {expert} is "
                f"{self.counts[sample, layer, expert]}: must be finite and >= 0"
            )
        if not self.counts.any():
            raise TraceError("all counts are 0: no expert was ever used")

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self.counts.shape[0]

    @property
    def num_layers(self) -> int:
        """Number of MoE layers."""
        return self.counts.shape[1]

    @property
    def num_experts(self) -> int:
        """Number of routed experts a layer."""
        return self.counts.shape[2]


def write_counts(path: str | os.PathLike[str], counts: ExpertCounts) -> None:
    """Write counts as Parquet, one row a (sample, layer, expert), zeros left out, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    header = {k: v for k, v in asdict(counts).items() if k != "counts"}
    header["shape"] = counts.counts.shape
    places = np.nonzero(counts.counts)
    columns = [*(axis.astype(np.int32) for axis in places), counts.counts[places]]
    table = pa.table(dict(zip(_NAMES, columns, strict=True)))
    table = table.replace_schema_metadata({COUNTS_KEY: json.dumps(header).encode()})
    with whole_output(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def read_counts(path: str | os.PathLike[str]) -> ExpertCounts:
    """Read what :func:`write_counts` wrote; raises TraceError for anything else."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError, UnicodeError) as error:
        raise TraceError(f"{path}: {' '.join(str(error).split())}") from None
    text = (table.schema.metadata or {}).get(COUNTS_KEY)
    if text is None:
        raise TraceError(f"{path}: not expert counts: the metadata has no '{COUNTS_KEY.decode()}'")
    try:
        return _counts_of(table, json.loads(text))
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    except _BROKEN as error:
        raise TraceError(f"{path}: broken expert counts: {' '.join(str(error).split())}") from None


def _counts_of(table: pa.Table, header: dict[str, Any]) -> ExpertCounts:
    shape = header.pop("shape")
    if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
        raise TraceError(f"shape is {shape}: must be [samples, layers, experts], none of them 0")
    most = _CELLS_A_ROW * len(table) + _MOST_EMPTY
    if math.prod(shape) > most:
        rule = f"must have at most {most} cells for {len(table)} rows"
        raise TraceError(f"shape is {shape}: {rule}")
    counts = np.zeros(shape)
    places = tuple(table.column(name).to_numpy() for name in _NAMES[:3])
    counts[places] = table.column("count").to_numpy()
    header["provenance"] = Provenance(**header["provenance"])
    for name in ("layer_indices", "notes"):
        header[name] = tuple(header[name])
    return ExpertCounts(counts=counts, **header)


def is_counts(path: str | os.PathLike[str]) -> bool:
    """Tell whether a Parquet file holds expert counts rather than a trace."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not Path(path).is_file():  # a pipe may be read once only
        return False
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (pa.ArrowException, OSError):
        return False
    return COUNTS_KEY in metadata
