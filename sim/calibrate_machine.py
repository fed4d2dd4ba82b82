"""Makes all files of a machine from the rows of ``greenroom measure``: drafts, a fit, and tables.

Experts of each dtype have kernels of their own, so that each gets a machine: the first dtype measured has the
plain name, the others are NAME_DTYPE and share link and storage with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hwmodels.bench_kinds import KINDS
from hwmodels.microbench import COLUMNS, Measurement
from sim.calibrate import Calibrated, calibrate, results_folder
from sim.calibrate_draft import PARTS, Draft, Measured, Part
from sim.calibrate_edit import as_yaml, set_source, set_value
from sim.calibrate_misses import misses_of
from sim.calibrate_names import Keys, Options
from sim.calibrate_report import changes_of, print_report, write_report
from sim.calibrate_spec import Specification
from sim.calibrate_tables import read_table
from sim.calibrate_write import write_files
from sim.types import ConfigError

HEAD = "# Written by greenroom measure"
_BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "int8": 8.0}
_CPU = ("machine", "cpu")
_DRAM: Keys = ("dram_bytes_per_s",)
_SHARED = ("link", "storage")
"""Parts that are the same for all dtypes."""


@dataclass(frozen=True, slots=True)
class Made:
    """A machine's files.

    files      texts, by path in a folder of options
    fits       by name of a machine
    misses     how far its files miss its rows by kind: median and largest relative error
    """

    files: dict[Path, str]
    fits: dict[str, Calibrated]
    misses: dict[str, dict[str, tuple[float, float]]]


def run_whole(
    spec: Specification, out: str | None, results: str | None, brief: bool = False
) -> None:
    """Make the files, report, and write them; ``brief`` leaves out the tables of rows and parameters."""
    if out is None:
        raise ConfigError(f"--out: missing, must be given: {spec.name} makes files of a machine")
    made = make_machine(spec, Path(out))
    folder = results_folder(results)
    for name, found in made.fits.items():
        write_report(found, folder if name == spec.machine else folder / name)
    write_files(made.files)
    if not brief:
        print_report(made.fits[str(spec.machine)])
    for name, found in made.fits.items():
        misses = [f"{kind} {own[0]:.0%} ({own[1]:.0%})" for kind, own in made.misses[name].items()]
        print(f"{name}: its rows are missed, in the median (at most), by: {', '.join(misses)}")
        for table in found.tables:
            print(f"{table.field.name}: a table of {len(table.value)} rows: {table.why}")
    print(f"Results: {folder}")
    for path in made.files:
        print(f"Written: {path}")


def make_machine(spec: Specification, out: Path) -> Made:
    """Return the files of a machine called ``spec.machine`` from ``spec.rows``, and the fits.

    Raises
    ------
    ConfigError
        The machine has no name or another's, a file is there that nobody measured, or rows are missing.
    """
    name = spec.machine
    if name is None:
        raise ConfigError(
            f"--machine: missing, must be given: what {spec.rows.name} is to be called"
        )
    check_name(name, out)
    facts = _facts(spec.rows)
    table = read_table(spec.rows)
    files: dict[Path, str] = {}
    fits: dict[str, Calibrated] = {}
    misses = {}
    for dtype in _dtypes(spec.rows, facts, table):
        own = name if not fits else f"{name}_{dtype}"
        rows = [row for row in table if _is_about(row, dtype, facts)]
        given = [
            _measured(row, f"{spec.rows.name}: row {i}") for i, row in enumerate(rows, start=1)
        ]
        texts, found = _machine(spec, own, name, dtype, given, rows, facts)
        fits[own] = found
        shared = {path.relative_to(out): text for path, text in files.items()}
        misses[own] = misses_of({**texts, **shared}, own, found, given)
        for path, text in texts.items():
            files.setdefault(out / path, text)
    for path in files:
        _check_free(path)
    return Made(files, fits, misses)


def check_name(name: str, out: Path) -> None:
    """Raise ConfigError for a name that cannot be that of a new machine."""
    if not name.replace("_", "").isalnum():
        raise ConfigError(f"machine = {name}: must be letters, digits and _")
    files = [Path("machine") / f"{name}.yaml"]
    files += [Path("machine") / part / f"{name}.yaml" for part in PARTS]
    options = Options()
    for file in files:
        if options.is_bundled(file.parent.as_posix(), name):
            rule = "is the name of an option that comes with Greenroom; choose another"
            raise ConfigError(f"machine = {name}: {rule}")
        _check_free(out / file)


def _check_free(path: Path) -> None:
    if path.is_file() and not path.read_text(encoding="utf-8").startswith(HEAD):
        rule = "is there already and was not written by greenroom measure; move it or choose a name"
        raise ConfigError(f"{path}: {rule}")


# -- what was measured -----------------------------------------------------------------------------


def _facts(rows: Path) -> dict[str, Any]:
    """Return what lies beside the rows."""
    path = rows.with_suffix(".json")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        device, setting = facts["machine"]["device"], facts["setting"]
        known = {"device": device["kind"], "dtypes": setting["dtypes"], "date": facts["date"]}
    except FileNotFoundError:
        rule = (
            "must lie beside the rows, as greenroom measure writes it: it tells what the machine is"
        )
        raise ConfigError(f"{path}: no such file; {rule}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: is not what greenroom measure writes: {error}") from error
    for key, value in known.items():
        if not value:
            raise ConfigError(f"{path}: is not what greenroom measure writes: {key} is {value}")
    return dict(facts)


def _dtypes(path: Path, facts: Mapping[str, Any], table: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the dtypes of experts that there are rows of, in the order they were asked for."""
    found = {_bits(row) for row in table if row.get("kind") == "expert_gpu"}
    dtypes = [str(name) for name in facts["setting"]["dtypes"] if _BITS.get(name) in found]
    if not dtypes:
        raise ConfigError(f"{path}: has no row of kind expert_gpu; measure for longer")
    return dtypes


def _is_about(row: Mapping[str, Any], dtype: str, facts: Mapping[str, Any]) -> bool:
    """Tell whether a row counts for experts of a dtype, and for the activations that they have."""
    active = facts["setting"]["activations"].get(dtype, dtype)
    kind, bits = row.get("kind"), _bits(row)
    if kind in ("expert_gpu", "expert_cpu"):
        return bits == _BITS[dtype]
    return bits is None or bits == _BITS[active]


def _bits(row: Mapping[str, Any]) -> float | None:
    text = row.get("bits") or row.get("kv_bits")
    return float(text) if text else None


def _measured(row: Mapping[str, Any], where: str) -> Measured:
    own = {key: value for key, value in row.items() if key in COLUMNS}
    measurement = Measurement.from_mapping(own, where)
    return Measured(measurement, int(row.get("repeats") or 1), float(row.get("spread") or 0))


# -- one machine -----------------------------------------------------------------------------------


def _machine(
    spec: Specification,
    own: str,
    name: str,
    dtype: str,
    given: Sequence[Measured],
    rows: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
) -> tuple[dict[Path, str], Calibrated]:
    """Return the files of a machine for one dtype, by path below a folder of options, and the fit."""
    draft = Draft(spec.rows, given, facts)
    files = _draft_files(draft, own, name, dtype, facts)
    fitted = [{**row, "machine": own} for row in rows if own == name or not _is_shared(row)]
    with TemporaryDirectory() as folder:
        write_files({Path(folder) / path: text for path, text in _unbounded(files).items()})
        table = Path(folder) / f"{spec.rows.stem}.yaml"
        table.write_text(json.dumps(fitted), encoding="utf-8")
        options = Options([folder])
        found = calibrate(replace(spec, rows=table, machine=own), options, [folder], ())
    found = replace(found, spec=spec)
    tables = {table.field for table in found.tables}
    for field, (value, source) in changes_of(found).items():
        path = Path(field.group) / f"{field.option}.yaml"
        rows_of = "measured" if field in tables else f"to {spec.rows.name}"
        source = source.replace(rows_of, f"{rows_of}, {draft.tool}", 1)
        files[path] = set_source(set_value(files[path], field.at, value), field.at, source)
    return _bounded(files, draft), found


def _is_shared(row: Mapping[str, Any]) -> bool:
    return KINDS[row["kind"]].part in _SHARED


def _unbounded(files: Mapping[Path, str]) -> dict[Path, str]:
    """Return files in which all readers of memory together do not bound what one of them is fitted to."""
    return {
        path: set_value(text, _DRAM, 10**15) if path.parts[:2] == _CPU else text
        for path, text in files.items()
    }


def _bounded(files: Mapping[Path, str], draft: Draft) -> dict[Path, str]:
    """Return files in which all readers of memory get at least what experts alone are fitted to."""
    import yaml

    found = dict(files)
    for path in [path for path in files if path.parts[:2] == _CPU]:
        cpu = yaml.safe_load(files[path])
        rate = cpu["memory_bytes_per_s"]
        if rate > cpu["dram_bytes_per_s"]:
            source = f"I: as memory_bytes_per_s, which is more than two readers had at once ({draft.tool})"
            found[path] = set_source(set_value(files[path], _DRAM, rate), _DRAM, source)
    return found


def _draft_files(
    draft: Draft, own: str, name: str, dtype: str, facts: Mapping[str, Any]
) -> dict[Path, str]:
    titles = _titles(facts)
    files, choices = {}, {}
    for part, figures_of in PARTS.items():
        figures = figures_of(draft)
        if figures is None:
            choices[part] = "null"
            continue
        option = name if part in _SHARED else own
        choices[part] = option
        files[Path("machine") / part / f"{option}.yaml"] = _text(
            titles[part], figures, facts, dtype
        )
    lines = [f"  - {part}: {option}" for part, option in choices.items()]
    head = f"{HEAD} on {facts['date']}: {titles['gpu']}, experts in {dtype}."
    whole = [head, "defaults:", *lines, "  - _self_", f"name: {own}", ""]
    return {Path("machine") / f"{own}.yaml": "\n".join(whole), **files}


def _titles(facts: Mapping[str, Any]) -> dict[str, str]:
    machine, setting = facts["machine"], facts["setting"]
    threads, device = setting["threads"], machine["device"]
    plural = "" if threads == 1 else "s"
    storage = setting.get("storage") or {}
    disk = storage.get("model") or storage.get("device") or "storage"
    if device["kind"] == "cuda":
        return {
            "gpu": device["name"],
            "link": f"link of {device['name']}",
            "cpu": machine["cpu"],
            "storage": disk,
        }
    return {
        "gpu": f"{machine['cpu']}, {threads} thread{plural} as the device",
        "link": "memory to memory by one thread",
        "cpu": machine["cpu"],
        "storage": disk,
    }


def _text(title: str, figures: Part, facts: Mapping[str, Any], dtype: str) -> str:
    """Return the text of a part's file."""
    lines = [f"{HEAD} on {facts['date']}, experts in {dtype}.", f"name: {as_yaml(title)}"]
    if "curve" not in figures and "h2d_bytes_per_s" in figures:
        lines.append("pinned: true")
    for name, (value, _) in figures.items():
        shown = as_yaml(value, indent=2)
        lines.append(f"{name}:{shown if shown.startswith(chr(10)) else f' {shown}'}")
    lines.append("sources:")
    lines += [f"  {name}: {as_yaml(source)}" for name, (_, source) in figures.items() if source]
    return "\n".join([*lines, ""])
