"""``greenroom check-policy``: does a policy, yours included, keep what every policy must keep?"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from sim.build import build
from sim.command_line import Parser
from sim.conformance import CHECKS, Finding, findings, short_run
from sim.lockstep import run_lockstep
from sim.mistakes import complain
from sim.settings import check_settings
from sim.types import ConfigError

_EPILOG = """examples:
  greenroom check-policy lru                      a policy of the catalogue
  greenroom check-policy my_conf/policy/mine.yaml your own; its classes may lie beside it
  greenroom check-policy mine.yaml policy.cache.decay=0.9 trace=tiny_logits

exit code: 0 all checks hold, 1 one fails, 2 the policy cannot be built"""
_LIMIT = 4.0
"""Times LRU in lockstep beyond which a sweep becomes slow enough to be told."""


def main(arguments: list[str]) -> int:
    """Run the checks; return the exit code."""
    try:
        options = make_parser().parse_intermixed_args(arguments)
        config = compose_policy(options.policy, options.overrides)
        return _report(config)
    except Exception as error:
        return complain("greenroom check-policy", error)


def make_parser() -> Parser:
    """Return what reads the command's arguments."""
    parser = Parser(
        prog="greenroom check-policy",
        description="Run the conformance suite and the laws on a policy.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("policy", metavar="POLICY", help="a name of the catalogue, or a YAML file")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="settings, as in `greenroom sim`")
    return parser


def compose_policy(policy: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the configuration of a run of a policy, named or from a file.

    Classes that a file names are found beside it, beside its configuration folder, and where one is.
    """
    from hydra import compose
    from omegaconf import OmegaConf

    from sim.composing import composing
    from sim.yaml_aliases import check_aliases

    file, search = Path(policy), list[str]()
    if file.suffix in (".yaml", ".yml"):
        if not file.is_file():
            raise ConfigError(f"policy = {policy}: no such file")
        name, folder = file.stem, file.resolve().parent
        if folder.name == "policy":
            search, folder = [f"hydra.searchpath=[file://{folder.parent}]"], folder.parent
        for place in (file.resolve().parent, folder, folder.parent):
            if str(place) not in sys.path:
                sys.path.append(str(place))
    else:
        name = policy
    with composing():
        if file.suffix and not search:
            check_aliases(file)
            config = compose("config", overrides=list(overrides))
            OmegaConf.set_struct(config, False)
            config.policy = OmegaConf.load(file)
        else:
            config = compose("config", overrides=[*search, f"policy={name}", *overrides])
    plain: Any = OmegaConf.to_container(config, resolve=True)
    if not isinstance(plain.get("policy"), Mapping):
        raise ConfigError(f"policy = {policy}: must be a mapping with name, scope and cache")
    check_settings(plain)
    return dict(plain)


def _report(config: dict[str, Any]) -> int:
    """Print each finding as it comes, then the verdict; return the exit code."""
    name = config["policy"].get("name")
    print(f"policy {name} on trace {config['trace']['name']}")
    seen: list[Finding] = []
    for finding in findings(config):
        seen.append(finding)
        print(f"  {_MARKS[finding.verdict]} {finding.check}: {finding.detail}", flush=True)
    failed = [finding for finding in seen if finding.verdict == "fails"]
    if len(seen) < len(CHECKS):
        print(f"{name} breaks off; the other {len(CHECKS) - len(seen)} rules were not looked at.")
        return 1
    ratio = cost_ratio(config, {**config, "policy": compose_policy("lru", [])["policy"]})
    slow = f", more than {_LIMIT:.0f}: sweeps will be slow" if ratio > _LIMIT else ""
    print(f"  time: {ratio:.1f} times LRU per layer and step in lockstep{slow}")
    if failed:
        print(f"{name} breaks {len(failed)} of {len(seen)} rules.")
        return 1
    print(f"{name} keeps every rule that concerns it.")
    return 0


def cost_ratio(config: Mapping[str, Any], baseline: Mapping[str, Any], repeats: int = 5) -> float:
    """Return how much longer a lockstep run of ``config`` takes than one of ``baseline``.

    Both take turns, and the fastest of each counts, for other work on the machine slows either.
    """
    pair = short_run(config), short_run(baseline)
    times_s = [[_lockstep_s(one) for one in pair] for _ in range(repeats)]
    ours, theirs = (min(column) for column in zip(*times_s, strict=True))
    return ours / theirs


def _lockstep_s(config: Mapping[str, Any]) -> float:
    scenario = build(config)
    begin_s = perf_counter()
    run_lockstep(scenario.workload, scenario.offloader)
    return perf_counter() - begin_s


_MARKS = {"ok": "ok  ", "fails": "FAIL", "does not apply": "-   "}
