"""Record real router traces: let a torch MoE model generate, and write down its routing.

``RouterRecorder`` (from ``traces.record_hooks``) watches a model; ``record_batches`` generates
with it and yields one piece of a trace per batch, ``record_generate`` returns the whole trace.

A request of T_prompt prompt tokens and T_new generated ones has T_prompt + T_new - 1 rows: the
last token is sampled but never processed. Rows of padding, of rejected drafts and of sequences
that have ended are dropped, though the engine computed them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from traces.record_hooks import ForwardRecord, MoeLayer, RouterRecorder
from traces.record_meta import build_meta
from traces.record_noise import SeededNoise
from traces.record_rows import Annotation, DroppedRows, Request, assemble, join_records
from traces.schema import Trace, TraceError, TraceMeta, concat

__all__ = [
    "Annotation",
    "DroppedRows",
    "Generation",
    "RouterRecorder",
    "SeededNoise",
    "check_prompts",
    "describe",
    "eos_tokens",
    "generate_batch",
    "header",
    "record_batches",
    "record_generate",
]

PROBE_TOKENS = 64
REFUSED_OPTIONS = ("num_beams", "num_return_sequences")
OWN_OPTIONS = ("do_sample", "temperature", "top_p", "eos_token_id", "max_new_tokens", "input_ids")


@dataclass(frozen=True)
class Generation:
    """How to generate.

    ``temperature`` 0 is greedy. Otherwise request r draws its token at position p with noise that
    depends on (seed, r, p) alone, so a request's text does not depend on the batch it is in
    (short of near-ties, which batch shapes can flip), and torch's random state is not touched;
    the model's own top_k and top_p are not applied.
    ``options`` go to ``model.generate`` (say ``prompt_lookup_num_tokens`` or
    ``cache_implementation``); beams and several sequences a prompt are refused.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    batch_size: int = 1
    eos: Sequence[int] | None = None  # None: the model's own; empty: never stop early
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise TraceError(f"{name} is {getattr(self, name)}: must be >= 1")
        if self.seed < 0:
            raise TraceError(f"seed is {self.seed}: must be >= 0")
        if not 0 <= self.temperature < float("inf"):
            raise TraceError(f"temperature is {self.temperature}: must be finite and >= 0")
        for name in REFUSED_OPTIONS:
            if self.options.get(name, 1) != 1:
                raise TraceError(f"{name} is {self.options[name]}: must be 1, a row is one request")
        for name in OWN_OPTIONS:
            if name in self.options:
                raise TraceError(f"options must not hold {name!r}: Generation sets it")


def record_generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    generation: Generation | None = None,
    *,
    annotation: Annotation | None = None,
    logits: bool = False,
    gates_ahead: int = 1,
    on_batch: Callable[[int, int], None] | None = None,
    **described: Any,
) -> Trace:
    """Generate from token-id ``prompts`` and return the trace, requests in the given order.

    ``step`` counts the decoder calls of the whole run. ``described`` goes to ``build_meta``
    (name, source, tokenizer, licence, notes). ``on_batch(done, total)`` hears of finished
    requests. Raises TraceError for what cannot be recorded faithfully.
    """
    pieces, dropped = [], DroppedRows()
    run = record_batches(
        model,
        prompts,
        generation,
        annotation=annotation,
        logits=logits,
        gates_ahead=gates_ahead,
        dropped=dropped,
        **described,
    )
    done = 0
    with closing(run):  # the hooks come off even if on_batch fails
        for piece in run:
            pieces.append(piece)
            done += piece.num_requests
            if on_batch is not None:
                on_batch(done, len(prompts))
    trace = concat(pieces)
    notes = (*trace.meta.notes, *dropped.notes())
    return replace(trace, meta=replace(trace.meta, notes=notes))


def record_batches(
    model: Any,
    prompts: Sequence[Sequence[int]],
    generation: Generation | None = None,
    *,
    annotation: Annotation | None = None,
    logits: bool = False,
    gates_ahead: int = 1,
    dropped: DroppedRows | None = None,
    **described: Any,
) -> Generator[Trace, None, None]:
    """Generate in batches of left-padded prompts, and yield the trace of each.

    All pieces share one header, so they can be streamed to a file. ``dropped`` is filled with
    what was computed but not recorded. Other arguments as in ``record_generate``.
    """
    generation, annotation = generation or Generation(), annotation or Annotation()
    check_prompts(model, prompts, generation.max_new_tokens)
    generation = replace(generation, eos=eos_tokens(model, generation.eos))
    meta = describe(model, prompts[0], generation, annotation, described)
    dropped = dropped if dropped is not None else DroppedRows()
    with RouterRecorder(model, logits=logits, gates_ahead=gates_ahead) as recorder:
        for first in range(0, len(prompts), generation.batch_size):
            batch = prompts[first : first + generation.batch_size]
            requests = generate_batch(model, batch, first, generation)
            rows = join_records(recorder.take())
            dropped.padding = recorder.num_padding_rows
            yield assemble(meta, rows, requests, annotation, dropped)


def check_prompts(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raise TraceError for prompts that the model cannot be given."""
    if not prompts:
        raise TraceError("prompts are empty: at least one is needed")
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None) or sys.maxsize
    if max_new_tokens >= limit:
        raise TraceError(
            f"max_new_tokens is {max_new_tokens}: must be < {limit}, the model's positions"
        )
    for index, prompt in enumerate(prompts):
        if not 1 <= len(prompt) <= limit - max_new_tokens:
            raise TraceError(
                f"prompt {index} has {len(prompt)} tokens: must be 1 to {limit - max_new_tokens}, "
                f"the model's {limit} positions less max_new_tokens {max_new_tokens}"
            )
        if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
            raise TraceError(f"prompt {index} has ids outside 0..{config.vocab_size - 1}")


def eos_tokens(model: Any, eos: Sequence[int] | None) -> tuple[int, ...]:
    """Return the ids that end a sequence: the given ones, or the model's own."""
    if eos is None:
        config = getattr(model, "generation_config", None)
        eos = getattr(config, "eos_token_id", None)
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(int(token) for token in eos)


def describe(
    model: Any,
    prompt: Sequence[int],
    generation: Generation,
    annotation: Annotation,
    described: Mapping[str, Any],
) -> TraceMeta:
    """Run the first prompt once with logits to see how the routers score; build the header."""
    ids = torch.tensor([list(prompt[:PROBE_TOKENS])], device=model.device)
    with RouterRecorder(model, logits=True, gates_ahead=0) as probe, torch.no_grad():
        model(input_ids=ids, use_cache=False)
        (record,) = probe.take()
    return header(model, probe.layers, record, generation, annotation, described)


def header(
    model: Any,
    layers: Sequence[MoeLayer],
    probe: ForwardRecord,
    generation: Generation,
    annotation: Annotation,
    described: Mapping[str, Any],
) -> TraceMeta:
    """Return the header of a trace; ``probe`` is one record with logits, ``described`` as elsewhere."""
    sampling = {
        "max_new_tokens": generation.max_new_tokens,
        "temperature": generation.temperature,
        "batch_size": generation.batch_size,
        "eos": list(generation.eos or ()),
        "options": dict(generation.options),
        "method": "gumbel noise seeded by (seed, request, position)"
        if generation.temperature
        else "greedy",
    }
    return build_meta(
        model,
        layers,
        probe,
        seed=generation.seed,
        sampling=sampling,
        stage_names=annotation.stage_names,
        **described,
    )


def generate_batch(
    model: Any, prompts: Sequence[Sequence[int]], first: int, generation: Generation
) -> list[Request]:
    """Generate from one batch; return each request cut after its first end token."""
    longest = max(len(prompt) for prompt in prompts)
    pads = [longest - len(prompt) for prompt in prompts]
    eos = list(generation.eos or ())
    pad = _pad_token(model, eos)
    ids = [[pad] * gap + list(prompt) for gap, prompt in zip(pads, prompts, strict=True)]
    mask = [[0] * gap + [1] * len(prompt) for gap, prompt in zip(pads, prompts, strict=True)]
    numbers = range(first, first + len(prompts))
    noise = SeededNoise(generation.seed, generation.temperature, numbers, pads)
    out = model.generate(
        input_ids=torch.tensor(ids, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        max_new_tokens=generation.max_new_tokens,
        do_sample=False,
        num_beams=1,
        pad_token_id=pad,
        eos_token_id=eos or None,
        logits_processor=[noise] if generation.temperature else None,
        return_dict_in_generate=False,
        disable_compile=True,  # hooks do not fire in a compiled graph
        **{
            name: value for name, value in generation.options.items() if name not in REFUSED_OPTIONS
        },
    )
    rows = zip(numbers, out.tolist(), pads, prompts, strict=True)
    return [
        Request(number, _cut(row[gap:], len(prompt), eos), len(prompt))
        for number, row, gap, prompt in rows
    ]


def _pad_token(model: Any, eos: Sequence[int]) -> int:
    config = model.config.get_text_config(decoder=True)
    pad = getattr(config, "pad_token_id", None)
    if pad is not None and pad >= 0:
        return int(pad)
    return int(eos[0]) if eos else 0


def _cut(tokens: list[int], num_prompt_tokens: int, eos: Sequence[int]) -> list[int]:
    """Return ``tokens`` up to and with the first generated end token."""
    for place in range(num_prompt_tokens, len(tokens)):
        if tokens[place] in eos:
            return tokens[: place + 1]
    return tokens
