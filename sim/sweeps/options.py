"""The command line of ``greenroom sweep``."""

from __future__ import annotations

import argparse

from sim.command_line import Parser
from sim.own_options import add_config_dirs
from sim.types import ConfigError

_EPILOG = """examples:
  greenroom sweep policy=lru,saem,fiddler cache.ratio=0.125,0.25,0.5
  greenroom sweep +experiment=demo                          an experiment file names the points
  greenroom sweep policy=lru,saem machine=rtx4090,gh200 sweep.dry_run=true
  greenroom sweep policy=saem 'cache.ratio=interval(0.05,0.9)' sweep.search=lhs sweep.points=100
  greenroom sweep --resume multirun/2026-11-30/12-00-00     go on with a sweep that was stopped
  greenroom sweep sweep=slurm sweep.partition=cpu +experiment=demo
  greenroom sweep sweep=ray sweep.address=auto +experiment=demo

Words are those of `greenroom sim -m`: GROUP=OPTION,OPTION and KEY=VALUE,VALUE. How the sweep is done:
  sweep=pool|serial|slurm|ray   on this machine's cores (default), in this process, on a cluster
  sweep.dir=DIR                 where to; the same words again go on where the sweep was stopped
  sweep.search=                 grid (default), list (sweep.list=FILE), random, lhs, optuna (sweep.points=N)
  sweep.workers=N               points at one time (default: one a core)
  sweep.tables=true             keep each point's step and request tables too
  sweep.dry_run=true            how many points, the first and last, and how long it would take
  sweep.overwrite=true          replace another sweep in the same folder
`greenroom sweep --cfg job` shows all settings with their values.

A point that fails is recorded with its error (N/error.json, errors.csv) and stops no other; the exit code
is then 2. DIR/results.parquet and results.csv have a row a point; DIR/N/summary.json is that of point N."""


def make_parser() -> Parser:
    """Return what reads the command's arguments."""
    parser = Parser(
        prog="greenroom sweep",
        description="Simulate many points of one question at the same time, and go on where it was stopped.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE,...", help="what to vary, and what to set"
    )
    add_config_dirs(parser)
    parser.add_argument(
        "--resume", metavar="DIR", help="go on with the sweep in this folder, with the words it had"
    )
    parser.add_argument(
        "--cfg", choices=("job", "hydra", "all"), help="show the configuration, run nothing"
    )
    parser.add_argument(
        "--package", "-p", metavar="KEY", help="with --cfg: only what stands there, as policy.cache"
    )
    parser.add_argument("--resolve", action="store_true", help="with --cfg: resolve interpolations")
    return parser


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line; flags may stand between overrides.

    Raises ConfigError for what is no option and no override.
    """
    options = make_parser().parse_intermixed_args(arguments)
    for word in options.overrides:
        if "=" not in word and not word.startswith("~"):
            raise ConfigError(f"{word}: must be KEY=VALUE or GROUP=OPTION")
    return options
