"""Train the tiny model: ``python -m traces.tiny.train`` writes the checkpoint and its log.

The data of every step follow from the seed and the step number, so a resumed run sees the texts
that it would have seen anyway. Float results depend on the thread count and on the processor.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeForCausalLM

from traces.tiny import CHECKPOINT_DIR
from traces.tiny.batching import Batch, batches
from traces.tiny.config import TrainConfig, rate
from traces.tiny.data import problems
from traces.tiny.decode import generate
from traces.tiny.model import RouterTap, new_model, save_model
from traces.tiny.optim import make_optimisers
from traces.tiny.parallel import average, place, team
from traces.tiny.scoring import exact_share
from traces.tiny.tokenizer import CharTokenizer

STATE_FILE = "state.pt"
SMOKE_SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "moe_intermediate_size": 16}


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
        "loss": (each * batch.weights).sum() / batch.total,
        "balance": tap.balance_loss((batch.ids != 0).flatten()),
        "results": right.sum() / batch.results.sum(),
    }


class Trainer:
    """The state of a run: model, optimisers, step count, tokens seen, and seconds spent."""

    def __init__(self, config: TrainConfig, out: Path, sizes: dict[str, int]) -> None:
        """Start a run from scratch; the process of rank 0 writes to ``out``."""
        self.config, self.out = config, out
        self.rank, self.workers = place()
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
        if self.rank == 0:
            self._trim_log()

    def _trim_log(self) -> None:
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
        share = batch.part(self.rank, self.workers)
        parts = losses(self.model, self.tap, share)
        (parts["loss"] + self.config.balance * parts["balance"]).backward()
        record = average(self.model, parts)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        factor = rate(self.config, self.step)
        for optimiser, base in zip(self.optimisers, self.bases, strict=True):
            optimiser.param_groups[0]["lr"] = base * factor
            optimiser.step()
            optimiser.zero_grad()
        self.step += 1
        self.tokens += int((batch.ids != 0).sum())
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
            if self.rank == 0:
                self._report(record)

    def _report(self, record: dict[str, float]) -> None:
        """Log, save and evaluate after the steps where that is due, and after the last one."""
        config, last = self.config, self.step == self.config.steps
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
    parser.add_argument("--workers", type=int, default=2, help="processes that share each batch")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--resume", action="store_true", help="continue from the saved state")
    parser.add_argument("--smoke", action="store_true", help="a model and run of seconds")
    return parser.parse_args(arguments)


def configure(options: argparse.Namespace) -> TrainConfig:
    """Return the hyper-parameters that the command line asks for."""
    config = TrainConfig(seed=options.seed, steps=options.steps)
    if options.smoke:
        config = replace(config, steps=3, batch=4, pool=2, eval_size=2, eval_every=3)
    return config


def work(rank: int, options: argparse.Namespace) -> None:
    """Train as one process of the team; that of rank 0 keeps the log and the checkpoint."""
    torch.set_num_threads(options.threads)
    config = configure(options)
    trainer = Trainer(config, options.out, SMOKE_SIZES if options.smoke else {})
    if options.resume:
        trainer.load()
    elif rank == 0:
        trainer.log_path.unlink(missing_ok=True)
    if rank == 0:
        run = {**asdict(config), "threads": options.threads, "workers": options.workers}
        text = json.dumps(run, indent=2)
        (options.out / "train_config.json").write_text(text + "\n", encoding="utf-8")
    trainer.run()


def main(arguments: list[str] | None = None) -> None:
    """Train according to the command line."""
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    with team(options.workers, work, options):
        work(0, options)


if __name__ == "__main__":
    main()
