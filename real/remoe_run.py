"""A run of ReMoE: the same steps on the same texts with its loss and with cross entropy alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from real.remoe_config import RemoeConfig
from real.remoe_gates import Gates, load_gates, save_gates
from real.remoe_loss import LossWeights
from real.remoe_metrics import GateQuality, measure_gates
from real.remoe_subject import GateSubject
from real.remoe_tasks import TaskResult, solve_tasks
from real.remoe_train import STATE, GateTrainer, TrainSettings
from sim.results import whole_file
from sim.types import ConfigError

ARMS = ("remoe", "control")
"""What is trained; ``before`` is the model as it was."""
RESULT, JUDGED, GATES = "remoe.json", "judged.json", "gates.safetensors"
Tell = Callable[[str, dict[str, float], int], None]
"""Hears of each step: the arm, what it was, and how many there will be."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one set of gates is worth; ``tasks`` is by way of decoding, empty where there are none."""

    quality: GateQuality
    tasks: Mapping[str, TaskResult]


def losses_of(arm: str, weights: LossWeights) -> LossWeights:
    """Return what an arm trains with: the control has neither trust nor locality."""
    return weights if arm == "remoe" else replace(weights.scaled(0.0), trust=0.0)


def train_arm(
    subject: GateSubject,
    arm: str,
    weights: LossWeights,
    settings: TrainSettings,
    folder: Path,
    *,
    resume: bool,
    tell: Tell | None = None,
) -> dict[str, Tensor]:
    """Train one arm from the model's own gates; write and return its gates. The model is then as before.

    Raises
    ------
    ConfigError
        ``folder`` holds a run already and ``resume`` is not asked for; a weight that is no gate changed.
    """
    if not resume and (folder / STATE).exists():
        raise ConfigError(f"--out {folder.parent}: holds a run already; --resume goes on with it")
    made = {**subject.described, **asdict(settings), **asdict(weights), "arm": arm}
    with Gates(subject.model, reference=bool(weights.trust)) as gates:
        before, digest = gates.values(), gates.digest_of_the_rest()
        trainer = GateTrainer(subject.model, gates, subject.texts, settings, weights, folder, made)
        if resume:
            trainer.resume()
        try:
            trainer.run(None if tell is None else lambda step: tell(arm, step, settings.steps))
            trained = gates.values()
            if gates.digest_of_the_rest() != digest:
                raise ConfigError(f"{arm}: weights that are no gates changed: nothing is written")
        finally:
            gates.set(before)
    save_gates(folder / GATES, trained, {**made, "rest_sha256": digest})
    return trained


def judge(
    subject: GateSubject,
    values: Mapping[str, Tensor] | None,
    evaluate: Mapping[str, Any],
    tell: Callable[[str], None] | None = None,
) -> Judgement:
    """Return what gates are worth on held-out texts and problems; None: the model's own."""
    with Gates(subject.model) as gates:
        before = gates.values()
        try:
            if values is not None:
                gates.set(values)
            held_out = subject.texts.held_out()
            quality = measure_gates(subject.model, gates, held_out, evaluate["slots"])
            number, decodings = evaluate["problems"], evaluate["decodings"]
            tasks = solve_tasks(subject, number, decodings, tell) if number else {}
        finally:
            gates.set(before)
    return Judgement(quality, tasks)


def judged(
    folder: Path,
    subject: GateSubject,
    values: Mapping[str, Tensor] | None,
    evaluate: Mapping[str, Any],
    made: Mapping[str, Any],
    tell: Callable[[str], None] | None = None,
) -> Judgement:
    """Return ``judge`` as kept in ``folder``, if it was of the same gates and texts, else judge and keep it.

    ``evaluate`` is the group of that name; ``made`` is what the gates came from.
    """
    asked = json.loads(json.dumps({**subject.described, **evaluate, **made}))
    path = folder / JUDGED
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        kept = {}
    if isinstance(kept, dict) and kept.get("asked") == asked:
        return judgement_of(kept)
    found = judge(subject, values, evaluate, tell)
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        partial.write_text(json.dumps({"asked": asked, **asdict(found)}) + "\n", encoding="utf-8")
    return found


def judgement_of(plain: Mapping[str, Any]) -> Judgement:
    """Return a judgement from what ``asdict`` and JSON made of it."""
    quality: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in plain["quality"].items()
    }
    for key in ("eor_by_lag", "lru_hit_rate"):
        quality[key] = {int(number): value for number, value in quality[key].items()}
    tasks = {name: TaskResult(tuple(task["right"])) for name, task in plain["tasks"].items()}
    return Judgement(GateQuality(**quality), tasks)


def run_remoe(
    subject: GateSubject,
    config: RemoeConfig,
    folder: Path,
    *,
    resume: bool = False,
    tell: Tell | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, Judgement]:
    """Train both arms and judge them beside the model as it was; write ``remoe.json``.

    ``say`` hears in a line what begins.
    """
    evaluate = config.plain["evaluate"]
    trained: dict[str, dict[str, Tensor] | None] = {"before": None}
    for arm in ARMS:
        weights = losses_of(arm, config.loss)
        trained[arm] = train_arm(
            subject, arm, weights, config.train, folder / arm, resume=resume, tell=tell
        )
    found = {}
    for name, values in trained.items():
        if say is not None:
            say(f"{name}: held-out texts and problems")
        made = {**asdict(config.train), **asdict(losses_of(name, config.loss))} if values else {}
        found[name] = judged(folder / name, subject, values, evaluate, made, say)
        write_result(folder, subject, config, found)
    return found


def judge_gates(
    subject: GateSubject,
    path: Path,
    config: RemoeConfig,
    folder: Path,
    *,
    say: Callable[[str], None] | None = None,
) -> dict[str, Judgement]:
    """Judge gates from a file beside the model's own; write ``remoe.json``.

    Raises
    ------
    ConfigError
        They were trained for other weights than this model's, or ``folder`` holds a run of its own.
    """
    if (folder / "remoe" / STATE).exists():
        raise ConfigError(
            f"--out {folder}: holds a run, whose gates would be lost: must be another"
        )
    values, made = load_gates(path)
    with Gates(subject.model, reference=False) as gates:
        if made.get("rest_sha256") != gates.digest_of_the_rest():
            told = f"{subject.described['model']} in {subject.described['dtype']}"
            raise ConfigError(
                f"--gates {path}: were trained for other weights than those of {told}"
            )
    evaluate, found = config.plain["evaluate"], {}
    for name, these in (("before", None), ("remoe", values)):
        found[name] = judged(folder / name, subject, these, evaluate, made if these else {}, say)
    save_gates(folder / "remoe" / GATES, values, made)
    write_result(folder, subject, config, found)
    return found


def save_model(subject: GateSubject, values: Mapping[str, Tensor], folder: Path) -> None:
    """Write the model with these gates as a folder that transformers loads, and its tokenizer."""
    with Gates(subject.model, reference=False) as gates:
        before = gates.values()
        try:
            gates.set(values)
            subject.model.save_pretrained(folder)
        finally:
            gates.set(before)
    save = subject.tokenizer.save if subject.is_tiny else subject.tokenizer.save_pretrained
    save(folder)


def write_result(
    folder: Path, subject: GateSubject, config: RemoeConfig, found: Mapping[str, Judgement]
) -> None:
    """Write what was found so far as ``remoe.json``."""
    plain = {
        "model": subject.described,
        "settings": {name: config.plain[name] for name in ("loss", "train", "evaluate")},
        "found": {name: asdict(judgement) for name, judgement in found.items()},
    }
    with whole_file(folder / RESULT) as path:
        path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


def read_gates(folder: Path, arm: str) -> dict[str, Tensor]:
    """Return the gates of an arm of a finished run.

    Raises
    ------
    ConfigError
        There are none.
    """
    return load_gates(folder / arm / GATES)[0]
