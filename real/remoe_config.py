"""What ``greenroom remoe`` is asked, checked: ``conf/remoe.yaml`` with what the user overrides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from real.remoe_loss import LossWeights
from real.remoe_tasks import TEMPERATURES
from real.remoe_train import TrainSettings
from sim.composing import compose_config
from sim.settings import SWITCH, TEXT, Rule, at_least, check_group, is_number, is_whole, one_of

DTYPES = ("float32", "bfloat16", "float16")


def _is_list(value: Any, good: Callable[[Any], bool], least: int = 1) -> bool:
    return isinstance(value, list) and len(value) >= least and all(good(item) for item in value)


def _is_count(value: Any) -> bool:
    return is_whole(value) and value >= 1


def _is_pair(value: Any) -> bool:
    return _is_list(value, lambda item: is_whole(item) and item >= 0) and len(value) == 2


def _is_share(value: Any) -> bool:
    return is_number(value) and 0 < value <= 1


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _are_overrides(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_list(each, _is_word) for each in value.values())


WEIGHT: Rule = (
    lambda value: is_number(value) and 0 <= value < float("inf"),
    "must be a number >= 0",
)
POSITIVE: Rule = (
    lambda value: is_number(value) and 0 < value < float("inf"),
    "must be a number > 0",
)
COUNTS: Rule = (lambda value: _is_list(value, _is_count), "must be a list of whole numbers >= 1")
FACTORS: Rule = (lambda value: _is_list(value, WEIGHT[0]), "must be a list of numbers >= 0")
SPAN: Rule = (
    lambda value: _is_pair(value) and value[0] < value[1],
    "must be [first, last + 1] of whole numbers",
)
LENGTHS: Rule = (
    lambda value: _is_pair(value) and min(value) >= 1,
    "must be [prompt, output] in tokens, each >= 1",
)
SHARES: Rule = (lambda value: _is_list(value, _is_share), "must be a list of numbers in (0, 1]")
NAMES: Rule = (lambda value: _is_list(value, _is_word), "must be a list of names")
RULES: dict[str, dict[str, Rule]] = {
    "loss": {
        **dict.fromkeys(("trust", "reuse", "smooth", "lag", "window"), WEIGHT),
        "lags": COUNTS,
        "window_tokens": at_least(2),
    },
    "train": {
        **dict.fromkeys(("steps", "batch", "accumulate", "save_every"), at_least(1)),
        "warm_up": at_least(0),
        "learning_rate": POSITIVE,
        "decay": SWITCH,
        "clip": POSITIVE,
        "length": at_least(2),
        "seed": at_least(0),
        "dtype": one_of(*DTYPES),
        "device": TEXT,
        "threads": at_least(1),
    },
    "evaluate": {
        "texts": at_least(1),
        "problems": at_least(0),
        "decodings": (
            lambda value: _is_list(value, TEMPERATURES.__contains__),
            f"must be a list of {', '.join(TEMPERATURES)}",
        ),
        "slots": COUNTS,
    },
    "frontier": {"factors": FACTORS, "steps": at_least(1), "problems": at_least(0)},
    "speed": {
        **dict.fromkeys(("requests", "new_tokens"), at_least(1)),
        "seed": at_least(0),
        "replayed": SPAN,
        "policies": NAMES,
        "ratios": SHARES,
        "simulated": (_are_overrides, "must give a list of overrides by name"),
        "transform": SWITCH,
        "real": (lambda value: isinstance(value, Mapping), "must be a group of settings"),
        "live": at_least(0),
    },
    "speed.real": {
        "model": TEXT,
        "ratios": (
            lambda value: _is_list(value, _is_share, least=0),
            "must be a list of numbers in (0, 1]; may be empty",
        ),
        "requests": SPAN,
        "length": LENGTHS,
        "turn_steps": at_least(1),
    },
}
"""By group what each setting must be."""


@dataclass(frozen=True, slots=True)
class RemoeConfig:
    """A checked configuration; ``plain`` is all of it as it was composed."""

    loss: LossWeights
    train: TrainSettings
    plain: Mapping[str, Any]

    @classmethod
    def composed(cls, overrides: Sequence[str] = ()) -> RemoeConfig:
        """Compose ``conf/remoe.yaml``.

        Raises
        ------
        ConfigError
            For the first setting that is wrong; Hydra's own errors for unknown ones.
        """
        plain = compose_config("remoe", overrides)
        for name, rules in RULES.items():
            found: Any = plain
            for key in name.split("."):
                found = found[key]
            check_group(name, found, rules)
        loss, train = plain["loss"], plain["train"]
        return cls(
            LossWeights(**{**loss, "lags": tuple(loss["lags"])}),
            TrainSettings(
                steps=train["steps"],
                warm_up_steps=train["warm_up"],
                save_every=train["save_every"],
                learning_rate=float(train["learning_rate"]),
                decay=train["decay"],
                clip=float(train["clip"]),
                accumulate=train["accumulate"],
            ),
            plain,
        )
