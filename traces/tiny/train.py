"""Train the tiny model: ``python -m traces.tiny.train`` writes the checkpoint and its log.

The data of every step follow from the seed and the step number, so a resumed run sees the texts
that it would have seen anyway. Float results depend on the thread count and on the processor.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeForCausalLM

from traces.tiny import CHECKPOINT_DIR
from traces.tiny.data import Problem, problems, sample_problem
from traces.tiny.decode import generate
from traces.tiny.drill import result_spans, sample_drill
from traces.tiny.model import RouterTap, new_model, save_model
from traces.tiny.optim import make_optimisers
from traces.tiny.scoring import exact_share
from traces.tiny.tokenizer import CharTokenizer

STATE_FILE = "state.pt"
SMOKE_SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "moe_intermediate_size": 16}


@dataclass(frozen=True)
class TrainConfig:
    """Hyper-parameters of a run; they are written beside the checkpoint."""

    seed: int = 0
    steps: int = 1500
    batch: int = 16  # texts per step
    pool: int = 16  # batches drawn together and grouped by length
    warmup: int = 60  # steps
    decay: float = 0.6  # share of the run over which the rate falls to zero
    muon_lr: float = 0.015
    adam_lr: float = 4e-3
    weight_decay: float = 0.05
    clip: float = 1.0
    balance: float = 0.01  # weight of the load-balance loss
    question_weight: float = 0.1  # loss weight of a question character; a solution's has 1
    # The form of the texts is learned first; then the results of the sums get more weight, and
    # drills take a part of each batch until the last part of the run.
    focus_from: int = 400  # step; a multiple of ``pool``, as is the next
    focus_until: int = 1152  # step
    result_weight: float = 4.0
    drills: int = 6  # per batch
    log_every: int = 20
    eval_every: int = 200
    eval_size: int = 32
    save_every: int = 50


@dataclass(frozen=True)
class Batch:
    """Token ids (B, L) padded on the right; for each target (B, L - 1) its loss weight.

    ``results`` (B, L - 1) marks the characters of the sums that a step must compute.
    """

    ids: Tensor
    weights: Tensor
    results: Tensor


@dataclass(frozen=True)
class Weights:
    """Loss weights of a question's characters, of a step's result, and of the rest."""

    question: float = 0.1
    result: float = 1.0


def make_batch(
    texts: list[Problem], drills: list[str], tokenizer: CharTokenizer, weigh: Weights
) -> Batch:
    """Encode problems, and drills of which only the results count; padding has weight 0."""
    everything = [problem.text for problem in texts] + drills
    rows = [tokenizer.encode(text, bos=True, eos=True) for text in everything]
    length = max(map(len, rows))
    ids = torch.full((len(rows), length), tokenizer.pad_id)
    weights, results = torch.zeros(2, len(rows), length)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        if index < len(texts):
            weights[index, : len(row)] = 1.0
            weights[index, : len(texts[index].prompt) + 1] = weigh.question
        for start, stop in result_spans(everything[index]):
            # BOS shifts every character by one place.
            weights[index, start + 1 : stop + 1] = weigh.result
            results[index, start + 1 : stop + 1] = 1.0
    return Batch(ids, weights[:, 1:], results[:, 1:])


def batches(config: TrainConfig, tokenizer: CharTokenizer, start: int) -> Iterator[Batch]:
    """Yield the batches of steps ``start``, ``start + 1``, ... of a run."""
    step = start
    while True:
        pool, skip = divmod(step, config.pool)
        rng = np.random.default_rng([config.seed, pool])
        focus = pool * config.pool >= config.focus_from
        drills = config.drills if focus and pool * config.pool < config.focus_until else 0
        weigh = Weights(config.question_weight, config.result_weight if focus else 1.0)
        count = config.batch - drills
        texts = [sample_problem(rng) for _ in range(config.pool * count)]
        texts.sort(key=lambda problem: len(problem.text))
        for group in rng.permutation(config.pool)[skip:]:
            chosen = texts[group * count : (group + 1) * count]
            extra = [
                sample_drill(np.random.default_rng([config.seed, 1, step, n]))
                for n in range(drills)
            ]
            yield make_batch(chosen, extra, tokenizer, weigh)
            step += 1


def rate(config: TrainConfig, step: int) -> float:
    """Return the factor of the learning rates: warm-up, a plateau, a linear fall to zero."""
    left = (config.steps - step) / (config.decay * config.steps)
    return min(1.0, (step + 1) / config.warmup, left)


def losses(model: Qwen3MoeForCausalLM, tap: RouterTap, batch: Batch) -> dict[str, Tensor]:
    """Return the weighted loss per character, the balance loss, and the share of right results.

    ``results`` counts characters of results whose likeliest token is right, given a right past.
    """
    # Padding is on the right and attention is causal, so no mask is needed.
    logits = model(input_ids=batch.ids, use_cache=False).logits[:, :-1]
    targets = batch.ids[:, 1:]
    each = nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    ).view(targets.shape)
    right = (logits.argmax(dim=2) == targets) * batch.results
    return {
        "loss": (each * batch.weights).sum() / batch.weights.sum(),
        "balance": tap.balance_loss((batch.ids != 0).flatten()),
        "results": right.sum() / batch.results.sum(),
    }


class Trainer:
    """The state of a run: model, optimisers, step count, tokens seen, and seconds spent."""

    def __init__(self, config: TrainConfig, out: Path, sizes: dict[str, int]) -> None:
        """Start a run from scratch that writes to ``out``."""
        self.config, self.out = config, out
        self.tokenizer = CharTokenizer()
        self.model = new_model(self.tokenizer, config.seed, **sizes)
        self.tap = RouterTap(self.model)
        self.optimisers = make_optimisers(
            self.model, config.muon_lr, config.adam_lr, config.weight_decay
        )
        self.bases = [optimiser.param_groups[0]["lr"] for optimiser in self.optimisers]
        self.step, self.tokens, self.seconds = 0, 0, 0.0

    @property
    def state_path(self) -> Path:
        """Where the resumable state lives: beside the checkpoint, not part of it."""
        return self.out.with_name(self.out.name + "_state") / STATE_FILE

    @property
    def log_path(self) -> Path:
        """Where the records of the run go."""
        return self.out / "train_log.jsonl"

    def load(self) -> None:
        """Continue from the last saved state; later records of the log are dropped."""
        state = torch.load(self.state_path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step, self.tokens, self.seconds = state["counters"]
        kept = [
            line
            for line in self.log_path.read_text(encoding="utf-8").splitlines()
            if json.loads(line)["step"] <= self.step
        ]
        self.log_path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")

    def save(self) -> None:
        """Write the checkpoint in bfloat16 and the resumable state in float32."""
        save_model(self.model, self.tokenizer, self.out)
        self.state_path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "counters": (self.step, self.tokens, self.seconds),
        }
        torch.save(state, self.state_path)

    def update(self, batch: Batch) -> dict[str, float]:
        """Do one optimiser step and return its losses."""
        parts = losses(self.model, self.tap, batch)
        (parts["loss"] + self.config.balance * parts["balance"]).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        factor = rate(self.config, self.step)
        for optimiser, base in zip(self.optimisers, self.bases, strict=True):
            optimiser.param_groups[0]["lr"] = base * factor
            optimiser.step()
            optimiser.zero_grad()
        self.step += 1
        self.tokens += int((batch.ids != 0).sum())
        record = {name: part.item() for name, part in parts.items()}
        return {**record, "norm": norm.item(), "lr": factor}

    def accuracy(self) -> dict[str, Any]:
        """Solve a few held-out problems greedily: the exact share, and one text to look at."""
        source = problems(self.config.seed, held_out=True)
        texts = [next(source) for _ in range(self.config.eval_size)]
        outputs = generate(self.model, self.tokenizer, [problem.prompt for problem in texts])
        return {"exact": exact_share(texts, outputs), "sample": outputs[0]}

    def log(self, record: dict[str, Any]) -> None:
        """Append one record to the log and show it on stderr."""
        clock = {"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds, 1)}
        line = json.dumps({**clock, **record})
        with self.log_path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, file=sys.stderr, flush=True)

    def run(self) -> None:
        """Train up to the last step; evaluate, log and save on the way."""
        config = self.config
        for batch in batches(config, self.tokenizer, self.step):
            if self.step >= config.steps:
                break
            began = time.monotonic()
            record = self.update(batch)
            self.seconds += time.monotonic() - began
            last = self.step == config.steps
            if self.step % config.log_every == 0 or last:
                self.log({name: round(value, 4) for name, value in record.items()})
            if self.step % config.save_every == 0 or last:
                self.save()
            if self.step % config.eval_every == 0 or last:
                self.log(self.accuracy())


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=TrainConfig.steps)
    parser.add_argument("--seed", type=int, default=TrainConfig.seed)
    parser.add_argument("--out", type=Path, default=CHECKPOINT_DIR)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="continue from the saved state")
    parser.add_argument("--smoke", action="store_true", help="a model and run of seconds")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Train according to the command line."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    config = TrainConfig(seed=options.seed, steps=options.steps)
    if options.smoke:
        config = replace(config, steps=3, batch=4, pool=2, eval_size=2, eval_every=3)
    trainer = Trainer(config, options.out, SMOKE_SIZES if options.smoke else {})
    options.out.mkdir(parents=True, exist_ok=True)
    if options.resume:
        trainer.load()
    else:
        trainer.log_path.unlink(missing_ok=True)
    text = json.dumps({**asdict(config), "threads": options.threads}, indent=2)
    (options.out / "train_config.json").write_text(text + "\n", encoding="utf-8")
    trainer.run()


if __name__ == "__main__":
    main()
