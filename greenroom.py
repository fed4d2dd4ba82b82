"""Greenroom from Python: what the commands do, as functions that give tables of pandas.

    import greenroom

    run = greenroom.simulate("cache.ratio=0.25", policy="lru")
    run.summary["tokens_per_s"], run.steps

    sweep = greenroom.sweep("cache.ratio=0.125,0.25", policies=["lru", "saem", "belady"])
    sweep.table, sweep.league("lru")

    greenroom.predict("model=gpt_oss_120b", "machine=rtx4090", "placement.cpu_layers=24")

Overrides are those of the command line, and so are the results, to the last digit. Tables need pandas
(``pip install -e ".[notebook]"``); ``validate`` needs torch. Importing this module loads neither of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sim.api import compare, load_trace, simulate, sweep
from sim.api_answers import Advice, Prediction, Stats, advise, check_policy, predict, stats
from sim.api_results import Comparison, Run, Sweep
from sim.types import ConfigError
from traces.schema import Trace

if TYPE_CHECKING:
    from real.validate_api import Validated

__all__ = [
    "Advice",
    "Comparison",
    "ConfigError",
    "Prediction",
    "Run",
    "Stats",
    "Sweep",
    "Trace",
    "advise",
    "check_policy",
    "compare",
    "load_trace",
    "predict",
    "simulate",
    "stats",
    "sweep",
    "validate",
]


def validate(
    *overrides: str,
    quick: bool = False,
    config_dirs: Sequence[str | os.PathLike[str]] = (),
    **settings: Any,
) -> Validated:
    """Run policies on this machine and in the simulator, as ``greenroom validate`` does.

    See :func:`real.validate_api.validate`; it needs torch.
    """
    from real.validate_api import validate as run

    return run(*overrides, quick=quick, config_dirs=config_dirs, **settings)
