"""From a composed configuration to a case that can be predicted; every user's mistake is found here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hwmodels.cost import CostModel
from hwmodels.engine import Engine
from hwmodels.machine import Machine
from hwmodels.model_shape import ModelShape
from hwmodels.placement import Placement
from hwmodels.predict import Case
from hwmodels.usage import Usage
from sim.own_options import with_folders
from sim.settings import did_you_mean, is_whole
from sim.types import ConfigError

GROUPS = ("model", "machine", "engine", "placement", "usage")
_WORK = ("prompt_tokens", "context_tokens", "batch_size", "prefill_chunk")


@dataclass(frozen=True, slots=True)
class Composed:
    """A configuration as plain dicts and lists, and which option of each group it was made of."""

    config: dict[str, Any]
    choices: dict[str, str]


def compose_case(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> Composed:
    """Compose ``conf/predict.yaml`` with overrides as on the command line.

    ``config_dirs``: folders of the user's own options, of which an earlier one hides a later one's of the
    same name. Costs about a tenth of a second.
    """
    from hydra import compose
    from omegaconf import OmegaConf, open_dict

    from sim.composing import composing

    given = with_folders(overrides, config_dirs)
    with composing():
        whole = compose("predict", overrides=given, return_hydra_config=True)
        choices = {
            str(group): str(option)
            for group, option in whole.hydra.runtime.choices.items()
            if option is not None and str(group).split("/")[0] in GROUPS
        }
        with open_dict(whole):
            del whole["hydra"]
        config: Any = OmegaConf.to_container(whole, resolve=True)
    return Composed(config, choices)


def case_of(config: Mapping[str, Any]) -> Case:
    """Build a case from plain values; raises HardwareError or ConfigError for the first mistake."""
    _check_keys(config)
    shape = ModelShape.from_mapping(config["model"], _where(config, "model"))
    machine = Machine.from_mapping(config["machine"], _where(config, "machine"))
    engine = Engine.from_mapping(config["engine"], _where(config, "engine"))
    placement = Placement.from_mapping(config["placement"], _where(config, "placement"))
    usage = Usage.from_mapping(config["usage"], _where(config, "usage"))
    if placement.pinned is not None and machine.link is not None:
        machine = replace(machine, link=replace(machine.link, pinned=placement.pinned))
    costs = CostModel(shape, machine, engine)
    return Case(costs, placement, usage, **_work(config["work"]))


def _where(config: Mapping[str, Any], group: str) -> str:
    given = config[group]
    return f"{group}/{given.get('name')}" if isinstance(given, Mapping) else group


def _check_keys(config: Mapping[str, Any]) -> None:
    known = (*GROUPS, "work")
    for key in known:
        if key not in config:
            raise ConfigError(f"{key}: missing, must be given")
    for key, value in config.items():
        if key not in known:
            raise ConfigError(f"{key} = {value}: unknown setting{did_you_mean(key, known)}")


def _work(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"work = {given}: must be a group of settings")
    for key, value in given.items():
        if key not in _WORK:
            raise ConfigError(f"work.{key} = {value}: unknown setting{did_you_mean(key, _WORK)}")
        if key == "prefill_chunk" and value is None:
            continue
        if not is_whole(value) or not 1 <= value <= 10**9:
            raise ConfigError(f"work.{key} = {value}: must be a whole number >= 1, at most 1e9")
    for key in _WORK[:3]:
        if key not in given:
            raise ConfigError(f"work.{key}: missing, must be given")
    return dict(given)
