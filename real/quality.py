"""What a policy makes of a model's answers: agreement of tokens, and perplexity, on given texts.

A text is forced: the model is given its prompt, then one token after another as if it had generated them,
so that a policy sees prompt and decoding as in a run. Each answer is the model's own greedy choice.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from traces.record_rows import Request

Enter = Callable[[Request], AbstractContextManager[object]]
"""Called around each text: what must be told that it begins and ends."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What a model said along texts.

    Parameters
    ----------
    greedy
        The likeliest token at each position after the prompt, int64[n] a text.
    loss
        Minus the log of the probability that the text's own token had there, in nats, float64[n] a text.
    """

    greedy: tuple[NDArray[np.int64], ...]
    loss: tuple[NDArray[np.float64], ...]

    @property
    def num_tokens(self) -> int:
        """Positions in all texts."""
        return sum(map(len, self.greedy))

    @property
    def perplexity(self) -> float | None:
        """Exp of the mean loss; None without any position."""
        return math.exp(float(np.concatenate(self.loss).mean())) if self.num_tokens else None


def agreement(left: Answers, right: Answers) -> float | None:
    """Return the share of positions at which two models' greedy tokens agree; None without any."""
    same = [a == b for a, b in zip(left.greedy, right.greedy, strict=True)]
    return float(np.concatenate(same).mean()) if left.num_tokens else None


@torch.no_grad()
def forced(model: Any, texts: Sequence[Request], enter: Enter | None = None) -> Answers:
    """Return a model's answers along texts, one text after another, a token at a time after the prompt."""
    found = []
    for text in texts:
        with nullcontext() if enter is None else enter(text):
            found.append(_answers(_steps(model, text), text))
    return _joined(found)


@torch.no_grad()
def answers_at_once(model: Any, texts: Sequence[Request]) -> Answers:
    """Return a model's answers along texts, each in one forward pass: for a model without a policy."""
    found = []
    for text in texts:
        ids = torch.tensor([text.tokens[:-1]], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, text.num_prompt_tokens - 1 :]
        found.append(_answers([logits], text))
    return _joined(found)


def _steps(model: Any, text: Request) -> Iterable[torch.Tensor]:
    """Yield logits [1, vocabulary] for each token after the prompt."""
    from transformers import DynamicCache

    tokens = torch.tensor([text.tokens], device=model.device)
    asked = inspect.signature(model.forward).parameters
    cache = DynamicCache(config=model.config)
    given: dict[str, Any] = {"cache" if "cache" in asked else "past_key_values": cache}
    if "logits_to_keep" in asked:
        given["logits_to_keep"] = 1
    done, end = 0, text.num_prompt_tokens
    while end < len(text.tokens):
        yield model(input_ids=tokens[:, done:end], use_cache=True, **given).logits[0, -1:]
        done, end = end, end + 1


def _answers(
    parts: Iterable[torch.Tensor], text: Request
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return greedy tokens and losses of logits for the tokens after a text's prompt."""
    greedy, losses = [], []
    tokens = torch.tensor(text.tokens[text.num_prompt_tokens :], dtype=torch.long)
    done = 0
    for part in parts:
        logits = part.double().cpu()
        own = tokens[done : done + len(logits)]
        greedy.append(logits.argmax(dim=-1))
        losses.append(torch.nn.functional.cross_entropy(logits, own, reduction="none"))
        done += len(logits)
    if not greedy:
        return np.empty(0, dtype=np.int64), np.empty(0)
    return torch.cat(greedy).numpy(), torch.cat(losses).numpy()


def _joined(found: Sequence[tuple[NDArray[np.int64], NDArray[np.float64]]]) -> Answers:
    return Answers(tuple(g for g, _ in found), tuple(loss for _, loss in found))
