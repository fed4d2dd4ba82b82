"""Reads a table of rows from CSV, YAML or Parquet as plain mappings."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.calibrate_spec import read_yaml
from sim.types import ConfigError


def read_table(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, by its ending; in YAML they are a list, or lie under ``rows``."""
    if path.suffix in (".yaml", ".yml"):
        found = read_yaml(path)
        found = found.get("rows") if isinstance(found, Mapping) else found
        if not isinstance(found, list):
            raise ConfigError(f"{path}: must be a list of rows")
        return found
    if path.suffix == ".csv":
        return _read_csv(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise ConfigError(f"{path}: must be a table with the ending .csv, .yaml or .parquet")


def _read_csv(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = [line for line in csv.reader(file) if line]
    except (UnicodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as CSV: {error}") from error
    if not lines:
        return []
    header = [name.strip() for name in lines[0]]
    for number, line in enumerate(lines[1:], start=1):
        if len(line) != len(header):
            rule = f"must have {len(header)}; is the file cut off?"
            raise ConfigError(f"{path}: row {number}: has {len(line)} cells, {rule}")
    return [dict(zip(header, (cell.strip() for cell in line), strict=True)) for line in lines[1:]]


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return list(pq.read_table(path).to_pylist())
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as Parquet: {error}") from error
