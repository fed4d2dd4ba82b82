"""``greenroom calibrate``: fits named figures of option files to measured rows.

Reads a specification, fits, leaves rows out in turn, reports, and writes option files on request. What is
fitted how is in :mod:`hwmodels.fitting`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from hwmodels.fitting import Problem, Solution, best
from hwmodels.leave_out import LeftOut, leave_out
from hwmodels.uncertainty import Estimate, Fit, judge
from sim.calibrate_curves import TABULATED, Table, expert_tables, measured_tables
from sim.calibrate_names import Field, Options, resolve
from sim.calibrate_rows import Row, read_rows
from sim.calibrate_spec import ALONE, Specification, known_specifications, read_specification
from sim.calibrate_values import Predictions, changed, parameter_of
from sim.cases import Composed
from sim.command_line import Parser
from sim.mistakes import complain
from sim.own_options import add_config_dirs, check_folders
from sim.types import ConfigError
from traces.out_file import check_out, check_out_folder, is_special

_EPILOG = """examples:
  greenroom calibrate                                       the calibrations that come with it
  greenroom calibrate published                             fit to the published rows
  greenroom calibrate my_fit.yaml --out my_conf             and write what was fitted as option files
  greenroom calibrate microbench --rows mine.csv --machine rtx4090 --out my_conf
  greenroom calibrate measured --rows mine.csv --machine mine --out my_conf   a machine of its own

The files are then used as in `greenroom sim --config-dir my_conf machine=rtx4090_fitted`."""
_SILENT = "since no row depends on them"
_FELT = 0.005


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What a calibration found.

    ``rows`` are those of the fit, ``felt`` the parameters that each depends on; ``names`` has the field of
    each name in the specification, ``fields`` those that were fitted, in order; ``unused`` says of the
    others why not;
    ``fit`` is None where there was nothing to fit; ``left_out`` has the rows as the others predict them, by
    what was left out together.
    """

    spec: Specification
    rows: list[Row]
    names: dict[str, Field]
    fields: list[Field]
    felt: list[list[Field]]
    unused: dict[str, Any]
    fit: Fit | None
    left_out: dict[str, list[LeftOut]]
    tables: list[Table]
    notes: list[str]
    every: list[Row]
    """The rows of tables too."""

    @property
    def estimates(self) -> tuple[Estimate, ...]:
        """The fitted parameters."""
        return () if self.fit is None else self.fit.estimates


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    try:
        options = make_parser().parse_args(arguments)
        if options.calibration is None:
            print("\n".join(known_specifications()))
            return 0
        _run(options)
    except Exception as error:
        return complain("greenroom calibrate", error)
    return 0


def make_parser() -> Parser:
    """Return what reads the command's arguments."""
    parser = Parser(
        prog="greenroom calibrate",
        description="Fit figures of machine and engine files to measured rows.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("calibration", nargs="?", help="a name, or a YAML file of your own; none: list them")
    add(
        "--rows", metavar="TABLE", help="rows in place of the calibration's (.csv, .yaml, .parquet)"
    )
    add("--machine", metavar="NAME", help="machine of the microbenchmark rows that name none")
    add_config_dirs(parser)
    add("--out", metavar="DIR", help="write the fitted options there")
    add("--name", default="fitted", metavar="SUFFIX", help="of their names (default: fitted)")
    add("--results", metavar="DIR", help="where the report's files go (default: outputs/DATE/TIME)")
    add("--no-leave-one-out", action="store_true", help="skip the fits without each row")
    add(
        "--errors",
        metavar="FILE",
        help="also leave out each machine, and write the errors from which predictions get intervals",
    )
    return parser


def _run(options: argparse.Namespace) -> None:
    from sim.calibrate_report import changes_of, print_report, write_errors, write_report
    from sim.calibrate_write import option_files, write_files

    if not options.name.replace("_", "").isalnum():
        raise ConfigError(f"--name {options.name}: must be letters, digits and _")
    for flag, folder in (("--out", options.out), ("--results", options.results)):
        if folder is not None:
            check_out_folder(Path(folder), f"{flag} is")
    if options.errors is not None and not is_special(Path(options.errors)):
        check_out(Path(options.errors), None, "--errors is")
    spec = read_specification(options.calibration, options.rows, options.machine)
    if spec.whole:
        if options.errors is not None:
            raise ConfigError(
                f"--errors: {spec.name} makes files of a machine, without such errors"
            )
        from sim.calibrate_machine import run_whole

        run_whole(spec, options.out, options.results)
        return
    check_folders(options.config_dirs)
    files = Options(options.config_dirs)
    if options.errors is not None and options.no_leave_one_out:
        raise ConfigError("--errors: needs the fits that --no-leave-one-out skips")
    kinds = [] if options.no_leave_one_out else [spec.leave_out]
    kinds += ["machine"] if options.errors is not None else []
    found = calibrate(spec, files, options.config_dirs, kinds)
    if options.errors is not None and found.fit is None:
        raise ConfigError(f"--errors: without a fit there are none. {' '.join(found.notes)}")
    written = {}
    if options.out is not None:
        machines = [row.composed.choices for row in found.every]
        name, out = options.name, Path(options.out)
        written = option_files(out, name, spec.name, changes_of(found), machines, files)
    folder = results_folder(options.results)
    write_report(found, folder)
    if options.errors is not None:
        write_errors(found, Path(options.errors))
    write_files(written)
    print_report(found)
    if options.errors is not None:
        print(f"Errors: {options.errors}")
    print(f"Results: {folder}")
    for path in written:
        print(f"Written: {path}")


def results_folder(given: str | None) -> Path:
    """Return where a report's files go."""
    now = datetime.now()
    return Path(given or f"outputs/{now:%Y-%m-%d}/{now:%H-%M-%S.%f}")


def calibrate(
    spec: Specification,
    options: Options,
    config_dirs: Sequence[str] = (),
    leave_out_by: Sequence[str] = (ALONE,),
) -> Calibrated:
    """Fit a specification's parameters, and again without each group of rows.

    ``leave_out_by`` are columns whose rows of one value make a group, or ``row``. Raises ConfigError or
    HardwareError for the first mistake.
    """
    every = read_rows(spec, config_dirs)
    tables = measured_tables(every, options)
    curves = {table.field: table.value for table in tables}
    rows = [_with(row, curves) for row in every if row.metric not in TABULATED]
    if not rows:
        kinds = " and ".join(dict.fromkeys(row.metric for row in every))
        notes = [f"All rows are of kind {kinds}: there is nothing to fit."]
        return Calibrated(spec, [], {}, [], [], {}, None, {}, tables, notes, every)
    names, unused = resolve(spec, rows, options)
    problem, solution, used = _solved(spec, rows, names, options, unused)
    fit, notes = judge(problem, solution), []
    if not solution.converged:
        notes.append("The search ended before it had converged; the values may not be the best.")
    left = {by: leave_out(problem, solution, _groups(rows, by)) for by in leave_out_by}
    fields = list(used.values())
    felt = _felt(problem, solution, fields, _FELT)
    notes += [
        f"{f.name}: at this value another figure limits every row, so that any beyond fits as well."
        for f in fields
        if not any(f in own for own in _felt(problem, solution, fields, 1e-6))
    ]
    tables += expert_tables(spec, rows, fit, fields, felt, options, notes)
    return Calibrated(spec, rows, names, fields, felt, unused, fit, left, tables, notes, every)


def _groups(rows: Sequence[Row], column: str) -> list[str] | None:
    return None if column == ALONE else [str(row.facts.get(column)) for row in rows]


def _solved(
    spec: Specification,
    rows: Sequence[Row],
    names: Mapping[str, Field],
    options: Options,
    unused: dict[str, str],
) -> tuple[Problem, Solution, dict[str, Field]]:
    """Return the fit of the parameters that rows depend on; the others go to ``unused``."""
    reached = Predictions(rows, list(names.values()), options).felt
    used = {name: f for name, f in names.items() if any(f in own for own in reached)}
    while True:
        unused |= {f.name: _SILENT for name, f in names.items() if name not in used}
        if not used:
            rule = f"none of the {len(rows)} rows depends on any"
            raise ConfigError(f"{spec.path}: parameters: {rule}")
        parameters = [
            parameter_of(spec, wish, used[wish.name], _first(rows, reached, used[wish.name]))
            for wish in spec.wishes
            if wish.name in used
        ]
        predictions = Predictions(rows, list(used.values()), options)
        measured, sigmas = [row.measured_ns for row in rows], [row.sigma for row in rows]
        problem = Problem(parameters, predictions, measured, sigmas, spec.loss)
        solution = best(problem)
        started = [parameter.inner(parameter.start) for parameter in problem.parameters]
        begun = replace(solution, jacobian=problem.jacobian(np.array(started)))
        ends = [_felt(problem, end, list(used.values()), 1e-6) for end in (begun, solution)]
        felt = {f for rows_felt in ends for own in rows_felt for f in own}
        if felt == set(used.values()):
            return problem, solution, used
        used = {name: field for name, field in used.items() if field in felt}


def _first(rows: Sequence[Row], reached: Sequence[Sequence[Field]], field: Field) -> Row:
    return next(row for row, own in zip(rows, reached, strict=True) if field in own)


def _felt(
    problem: Problem, solution: Solution, fields: Sequence[Field], least: float
) -> list[list[Field]]:
    """Return of each row the parameters whose plausible moves change its time by a share of ``least``."""
    effects = np.abs(solution.jacobian) * problem.sigmas[:, None] * problem.spreads.clip(max=1)
    return [
        [f for f, effect in zip(fields, row, strict=True) if effect >= least] for row in effects
    ]


def _with(row: Row, curves: Mapping[Field, Any]) -> Row:
    """Return a row whose machine has the storage curves that the other rows measured."""
    own = {f: value for f, value in curves.items() if row.composed.choices.get(f.group) == f.option}
    if not own:
        return row
    config = changed(row.composed.config, own)
    return replace(row, composed=Composed(config, row.composed.choices))
