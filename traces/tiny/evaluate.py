"""Evaluate a checkpoint on held-out problems: ``python -m traces.tiny.evaluate``.

Writes ``eval.json`` beside the checkpoint: accuracy (greedy and sampled), the form of the texts,
the loss per character, and how evenly every layer uses its experts.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from traces.tiny import CHECKPOINT_DIR
from traces.tiny.batching import Weights, make_batch
from traces.tiny.data import Problem, problems
from traces.tiny.decode import generate
from traces.tiny.experts import register
from traces.tiny.model import SAMPLING_TEMPERATURE, RouterTap, load_model
from traces.tiny.scoring import exact_share, final_number, in_form, unhedged_sums_right
from traces.tiny.stages import QUESTION, SOLUTION_STAGES, stage_of_positions
from traces.tiny.tokenizer import CharTokenizer
from traces.tiny.train import losses

EVAL_SEED = 1000  # other problems than the ones watched during training
TEMPERATURES = (0.7, SAMPLING_TEMPERATURE)
GROUP = 50  # prompts decoded together


def solve(
    model: Qwen3MoeForCausalLM, tokenizer: CharTokenizer, texts: list[Problem], temperature: float
) -> list[str]:
    """Generate a solution for every problem, ``GROUP`` at a time."""
    out: list[str] = []
    for start in range(0, len(texts), GROUP):
        prompts = [problem.prompt for problem in texts[start : start + GROUP]]
        out += generate(model, tokenizer, prompts, temperature, seed=EVAL_SEED + start)
    return out


def by_family(texts: list[Problem], solutions: list[str]) -> dict[str, float]:
    """Return the exact share of each problem family."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for problem, solution in zip(texts, solutions, strict=True):
        groups[problem.chain.family].append(final_number(solution) == problem.answer)
    return {name: round(sum(right) / len(right), 3) for name, right in sorted(groups.items())}


def report(texts: list[Problem], solutions: list[str]) -> dict[str, Any]:
    """Summarise generated solutions: accuracy, length in characters, waits, form, sums."""
    waits = ["Wait" in solution for solution in solutions]
    exact = [final_number(s) == p.answer for p, s in zip(texts, solutions, strict=True)]
    waited = [right for right, wait in zip(exact, waits, strict=True) if wait]
    count = len(solutions)
    return {
        "exact": round(exact_share(texts, solutions), 4),
        "exact_by_family": by_family(texts, solutions),
        "exact_where_wait": round(sum(waited) / max(1, len(waited)), 4),
        "wait_share": round(sum(waits) / count, 4),
        "mean_characters": round(sum(map(len, solutions)) / count, 1),
        "in_form_share": round(sum(map(in_form, solutions)) / count, 4),
        "sums_right_share": round(sum(map(unhedged_sums_right, solutions)) / count, 4),
        "distinct_texts": len(set(solutions)),
    }


def _entropy(shares: torch.Tensor) -> float:
    """Return the entropy of shares (E,), 1 where all experts serve the same."""
    positive = shares[shares > 0]
    entropy = -(positive * positive.log()).sum() / torch.log(torch.tensor(float(len(shares))))
    return round(float(entropy), 4)


def stage_ids(texts: list[Problem], length: int) -> Tensor:
    """Return each token's stage number (B * length,), -1 for padding; BOS is in the question."""
    names = (QUESTION, *SOLUTION_STAGES)
    ids = torch.full((len(texts), length), -1)
    for row, problem in zip(ids, texts, strict=True):
        labels = [QUESTION, *stage_of_positions(problem.text)]
        row[: len(labels)] = torch.tensor([names.index(label) for label in labels])
    return ids.flatten()


def layer_use(tap: RouterTap, index: int, stages: Tensor) -> dict[str, float]:
    """Describe how one layer uses its experts, over all real tokens and by stage."""
    shares = tap.shares(index, stages >= 0)
    present = [stage for stage in stages.unique().tolist() if stage >= 0]
    shifts = [
        float((tap.shares(index, stages == stage) - shares).abs().sum() / 2) for stage in present
    ]
    return {
        "entropy": _entropy(shares),
        "smallest_share": round(float(shares.min()), 4),
        "largest_share": round(float(shares.max()), 4),
        "stage_shift": round(sum(shifts) / len(shifts), 4),
    }


@torch.inference_mode()
def expert_use(
    model: Qwen3MoeForCausalLM, tokenizer: CharTokenizer, texts: list[Problem]
) -> dict[str, Any]:
    """Return the loss per solution character on reference texts and every layer's expert use.

    ``stage_shift`` is the total variation distance between a stage's expert shares and the
    shares over all stages, averaged over the stages: 0 where stages use the same experts.
    """
    tap = RouterTap(model)
    batch = make_batch(texts, [], tokenizer, Weights(question=0.0))
    parts = {name: round(float(part), 4) for name, part in losses(model, tap, batch).items()}
    stages = stage_ids(texts, batch.ids.shape[1])
    layers = [layer_use(tap, index, stages) for index in sorted(tap.chosen)]
    tap.close()
    return {**parts, "layers": layers}


def evaluate(folder: Path, count: int) -> dict[str, Any]:
    """Evaluate the checkpoint in ``folder`` on ``count`` held-out problems."""
    model, tokenizer = load_model(folder)
    model.set_experts_implementation(register())
    texts = list(itertools.islice(problems(EVAL_SEED, held_out=True), count))
    return {
        "problems": count,
        "seed": EVAL_SEED,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "greedy": report(texts, solve(model, tokenizer, texts, 0.0)),
        "recording_temperature": SAMPLING_TEMPERATURE,
        "sampled": {
            str(temperature): report(texts, solve(model, tokenizer, texts, temperature))
            for temperature in TEMPERATURES
        },
        "reference": expert_use(model, tokenizer, texts[:64]),
    }


def main(arguments: list[str] | None = None) -> None:
    """Evaluate according to the command line and write ``eval.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT_DIR)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    text = json.dumps(evaluate(options.checkpoint, options.problems), indent=2)
    (options.checkpoint / "eval.json").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
