"""The transform of a trace, done live: what it costs the bundled model to reuse experts without training."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from real.remoe_gates import Gates
from real.remoe_tasks import TaskResult


def transformed_live(
    target_eor: float, values: Mapping[str, Tensor], num_problems: int, folder: Path
) -> dict[str, Any]:
    """Let the bundled model answer with its old gates and the policy ``reuse``, beside trained gates.

    Parameters
    ----------
    target_eor
        What the transform is asked to reach: that of the trained gates.
    values
        The trained gates, judged on the same texts.
    num_problems
        Held-out problems solved greedily; perplexity is of the answers of at most eight.
    folder
        Where the run's tables go.
    """
    from real.device import open_device
    from real.live_build import compose_live
    from real.live_model import load_live
    from real.live_options import LiveOptions
    from real.live_run import LiveRun
    from real.quality import answers_at_once
    from traces.record import Generation
    from traces.tiny.evaluate import EVAL_SEED

    asked = Namespace(
        model="tiny",
        prompts=None,
        requests=num_problems,
        seed=EVAL_SEED,
        device="cpu",
        licence=None,
    )
    subject = load_live(asked, whole=True)
    generation = Generation(max_new_tokens=subject.subject.max_new_tokens)
    config = compose_live(["policy=reuse", f"+policy.routing.target_eor={target_eor}"])
    options = LiveOptions(generation, check=True)
    with LiveRun(subject, config, options, open_device("cpu")) as run:
        result = run.run(folder)
    solved = _solved([request.tokens for request in result.requests], num_problems)
    gates = Gates(subject.model, reference=False)
    gates.set(values)
    trained = answers_at_once(subject.model, subject.texts())
    quality = result.summary["quality"]
    return {
        "target_eor": target_eor,
        "problems": num_problems,
        "accuracy": solved.accuracy,
        "accuracy_error": solved.standard_error,
        "perplexity": quality["perplexity"],
        "perplexity_before": quality["unmodified_perplexity"],
        "perplexity_trained": trained.perplexity,
        "perplexity_tokens": quality["perplexity_tokens"],
        "token_agreement": quality["token_agreement"],
        "substituted_mass_rate": result.summary.get("substituted_mass_rate"),
    }


def _solved(answers: list[list[int]], num_problems: int) -> TaskResult:
    """Judge answers, token ids with their prompts, to the first held-out problems."""
    from itertools import islice

    from traces.tiny import CHECKPOINT_DIR
    from traces.tiny.data import problems
    from traces.tiny.evaluate import EVAL_SEED
    from traces.tiny.scoring import final_number
    from traces.tiny.tokenizer import CharTokenizer

    tokenizer = CharTokenizer.load(CHECKPOINT_DIR)
    texts = islice(problems(EVAL_SEED, held_out=True), num_problems)
    right = [
        final_number(tokenizer.decode(answer).removeprefix(text.prompt)) == text.answer
        for answer, text in zip(answers, texts, strict=True)
    ]
    return TaskResult(tuple(right))
