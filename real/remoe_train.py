"""Train a model's gates: ReMoE's loss, or cross entropy alone as its control; may be stopped and resumed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from real.remoe_gates import Gates, Judged
from real.remoe_loss import LossWeights, locality, trust, weighted
from real.remoe_texts import TextBatch, Texts
from sim.results import whole_file
from sim.types import ConfigError

STATE, LOG = "state.pt", "log.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """How to train; what each means stands in conf/remoe.yaml. Rates are per step of the optimiser."""

    steps: int
    warm_up_steps: int  # of the learning rate and of alpha
    learning_rate: float
    decay: bool
    clip: float
    accumulate: int  # batches a step
    save_every: int  # steps

    def rate(self, step: int) -> float:
        """Return the learning rate of a step: a linear warm-up, then constant or linear to zero."""
        warm = min(1.0, (step + 1) / max(1, self.warm_up_steps))
        left = (self.steps - step) / max(1, self.steps - self.warm_up_steps)
        return self.learning_rate * (min(warm, left) if self.decay else warm)

    def alpha(self, step: int) -> float:
        """Return min(1, t / T_warm), the paper's weight of the locality terms at step t (from 0)."""
        return min(1.0, step / self.warm_up_steps) if self.warm_up_steps else 1.0


class GateTrainer:
    """The state of one arm of a run: gates in float32, optimiser, steps done.

    Gates are stepped in float32 (`masters`) and rounded to the model's dtype, as an engine would hold them;
    everything else is frozen by ``Gates``, which must be entered.

    Parameters
    ----------
    model, gates, texts
        What to train, on which texts.
    settings, loss
        How; a loss without trust and locality is the control.
    folder
        Where state and log go; made with the first of them.
    made
        What the run is: a state of another one is refused.
    """

    def __init__(
        self,
        model: Any,
        gates: Gates,
        texts: Texts,
        settings: TrainSettings,
        loss: LossWeights,
        folder: Path,
        made: Mapping[str, Any],
    ) -> None:
        self.step = 0
        self._model, self._gates, self._texts = model, gates, texts
        self._settings, self._loss = settings, loss
        self._folder, self._made = folder, json.dumps(dict(made), sort_keys=True)
        self._masters = {
            name: weight.detach().float().clone().requires_grad_(True)
            for name, weight in gates.weights.items()
        }
        self._optimiser = torch.optim.AdamW(
            list(self._masters.values()), lr=settings.learning_rate, weight_decay=0.0
        )
        self._lines: list[str] = []

    def resume(self) -> bool:
        """Continue from the saved state if there is one; tell whether there was.

        Raises
        ------
        ConfigError
            The state cannot be read, or is of a run with other settings.
        """
        path = self._folder / STATE
        if not path.exists():
            return False
        try:
            state = torch.load(path, weights_only=True)
            made, masters = state["made"], state["masters"]
        except Exception as error:  # torch raises many kinds for a file that is broken
            raise ConfigError(f"{path}: cannot be read; must be left out to begin anew") from error
        if made != self._made:
            raise ConfigError(
                f"{path}: is of a run with other settings; {_first_other(made, self._made)}"
            )
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(masters[name])
        self._optimiser.load_state_dict(state["optimiser"])
        self.step, self._lines = state["step"], state["lines"]
        self._put()
        return True

    def run(self, tell: Callable[[dict[str, float]], None] | None = None) -> None:
        """Train up to the last step; ``tell`` hears of each."""
        number = self._settings.accumulate
        stream = self._texts.batches(self.step * number)
        while self.step < self._settings.steps:
            began = time.monotonic()
            record = self._update(islice(stream, number))
            record["seconds"] = round(time.monotonic() - began, 3)
            self._lines.append(json.dumps(record))
            if self.step % self._settings.save_every == 0 or self.step == self._settings.steps:
                self._save()
            if tell is not None:
                tell(record)

    def _update(self, batches: Iterator[TextBatch]) -> dict[str, float]:
        """Do one step of the optimiser; return its losses."""
        alpha = self._settings.alpha(self.step)
        total: dict[str, float] = {}
        for batch in batches:
            parts = losses(self._model, self._gates, batch, self._loss)
            loss = objective(parts, self._loss, alpha) / self._settings.accumulate
            if not math.isfinite(float(loss.detach())):
                raise ConfigError(
                    f"step {self.step}: the loss is {float(loss.detach())}: must be finite; "
                    f"train.learning_rate = {self._settings.learning_rate:g} may be too large"
                )
            loss.backward()
            for name, part in parts.items():
                share = float(part.detach()) / self._settings.accumulate
                total[name] = total.get(name, 0.0) + share
        norm = self._descend()
        self.step += 1
        rounded = {name: round(value, 6) for name, value in total.items()}
        return {"step": self.step, "alpha": alpha, "norm": round(norm, 6), **rounded}

    def _descend(self) -> float:
        """Hand the gates' gradients to their masters, and step those."""
        for name, weight in self._gates.weights.items():
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            self._masters[name].grad, weight.grad = gradient.float(), None
        norm = torch.nn.utils.clip_grad_norm_(list(self._masters.values()), self._settings.clip)
        for group in self._optimiser.param_groups:
            group["lr"] = self._settings.rate(self.step)
        self._optimiser.step()
        self._put()
        return float(norm)

    def _put(self) -> None:
        self._gates.set({name: master.detach() for name, master in self._masters.items()})

    def _save(self) -> None:
        """Write state and log, each whole or not at all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        state = {
            "made": self._made,
            "masters": {name: master.detach() for name, master in self._masters.items()},
            "optimiser": self._optimiser.state_dict(),
            "step": self.step,
            "lines": self._lines,
        }
        with whole_file(self._folder / STATE) as path:
            torch.save(state, path)
        with whole_file(self._folder / LOG) as path:
            path.write_text("".join(f"{line}\n" for line in self._lines), encoding="utf-8")


def losses(model: Any, gates: Gates, batch: TextBatch, weights: LossWeights) -> dict[str, Tensor]:
    """Return the unweighted terms of one batch: ``ce``, then ``trust`` and locality, means over layers."""
    ids, real = batch.ids.to(model.device), batch.real.to(model.device)
    # Padding is on the right and attention causal: no mask is needed. No load-balance loss is asked for.
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    targets, counted = ids[:, 1:], real[:, 1:]
    each = functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), reduction="none"
    )
    terms = {"ce": (each * counted.flatten()).sum() / counted.sum()}
    layers = [_of_layer(judged, real, weights) for judged in gates.take()]
    return terms | {name: torch.stack([t[name] for t in layers]).mean() for name in layers[0]}


def objective(parts: Mapping[str, Tensor], weights: LossWeights, alpha: float) -> Tensor:
    """Return CE + trust * Trust + alpha * (the weighted locality terms)."""
    own = {name: term for name, term in parts.items() if name not in ("ce", "trust", "overlap")}
    total = parts["ce"] + alpha * weighted(own, weights).to(parts["ce"].device)
    return total + weights.trust * parts["trust"] if "trust" in parts else total


def _of_layer(judged: Judged, real: Tensor, weights: LossWeights) -> dict[str, Tensor]:
    """Return the terms of one layer, and the overlap of neighbours' experts (EOR), which is only watched."""
    log_p = judged.log_p.view(*real.shape, -1)
    chosen = judged.chosen.view(*real.shape, -1)
    terms = locality(log_p, chosen, real, weights)
    if weights.trust and judged.log_reference is not None:
        terms["trust"] = trust(log_p, judged.log_reference.view(log_p.shape), real)
    both = (real[:, 1:] & real[:, :-1]).float()
    same = (chosen[:, 1:, :, None] == chosen[:, :-1, None, :]).any(dim=3).float().mean(dim=2)
    return terms | {"overlap": (same * both).sum() / both.sum().clamp(min=1)}


def _first_other(left: str, right: str) -> str:
    """Name the first setting in which two runs differ."""
    one, two = json.loads(left), json.loads(right)
    for key in sorted({*one, *two}):
        if one.get(key) != two.get(key):
            return f"{key} was {one.get(key)}, and is {two.get(key)}"
    return "they are written otherwise"
