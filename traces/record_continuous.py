"""Record continuous batching: requests join a running batch and leave it, step by step.

transformers' own engine schedules (``ContinuousBatchingManager``): every step packs what it
processes of each request, whole prompts, pieces of long ones and single tokens, into one row of
tokens. The trace keeps that: ``step`` is the engine's step, shared by the requests of the batch,
and the rows of a step stand together, in the order in which they were packed.

CUDA graphs, compiled steps and double buffering are off, for no hook fires in a graph; so is the
sharing of prefixes, for a prompt that is looked up is not routed.
"""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from traces.record import (
    Annotation,
    DroppedRows,
    Generation,
    RouterRecorder,
    check_prompts,
    describe,
    eos_tokens,
)
from traces.record_calls import Segment
from traces.record_interleaved import Interleaved
from traces.record_noise import PackedNoise
from traces.record_rows import Request
from traces.schema import Trace, TraceError
from traces.trace import near_match

SCHEDULERS = ("fifo", "prefill_first")
SHARE_KEPT_FREE = 0.2  # of the cache: fifo takes no new prompt while less than 15 % is free
SECONDS_BETWEEN_LOOKS = 0.2
ENGINE_LOGGER = "ContinuousBatchingLogger"


@dataclass(frozen=True)
class Scheduling:
    """How the engine packs its steps; ``Generation.batch_size`` is the most requests of one.

    ``max_batch_tokens`` is the most tokens of one step: longer prompts are cut into pieces.
    ``cache_tokens`` is what the KV cache holds; None is enough for ``batch_size`` requests at
    their longest, with less the engine may give a request up and compute it again.
    ``scheduler`` is ``fifo`` (decoding first) or ``prefill_first``.
    """

    max_batch_tokens: int = 512
    cache_tokens: int | None = None
    page_tokens: int = 16
    scheduler: str = "fifo"

    def __post_init__(self) -> None:
        if self.max_batch_tokens < 1:
            raise TraceError(f"max_batch_tokens is {self.max_batch_tokens}: must be >= 1")
        if self.page_tokens < 4:
            raise TraceError(f"page_tokens is {self.page_tokens}: must be >= 4")
        if self.cache_tokens is not None and self.cache_tokens < self.page_tokens:
            raise TraceError(f"cache_tokens is {self.cache_tokens}: must hold a page or more")
        if self.scheduler not in SCHEDULERS:
            rule = f"must be one of {', '.join(SCHEDULERS)}"
            hint = near_match(self.scheduler, SCHEDULERS)
            raise TraceError(f"scheduler is {self.scheduler!r}: {rule}{hint}")


def record_continuous(
    model: Any,
    prompts: Sequence[Sequence[int]],
    generation: Generation | None = None,
    scheduling: Scheduling | None = None,
    *,
    annotation: Annotation | None = None,
    logits: bool = False,
    gates_ahead: int = 1,
    dropped: DroppedRows | None = None,
    on_request: Callable[[int], None] | None = None,
    **described: Any,
) -> Generator[Trace, None, None]:
    """Generate from token-id ``prompts`` by continuous batching, and yield the trace by steps.

    Every prompt waits from the start, so equal arguments give equal steps. A request's tokens are
    those that ``record_generate`` gives it (short of near-ties, which batch shapes can flip), and
    its number is its place in ``prompts``. ``on_request`` hears the rows of each that ends. The other
    arguments are those of ``record_batches``.

    Raises
    ------
    TraceError
        For what cannot be recorded faithfully, and where the engine cannot run the model
        (transformers packs no layers with convolutions, recurrent state or latent attention).
    """
    generation, scheduling = generation or Generation(), scheduling or Scheduling()
    annotation = annotation or Annotation()
    check_prompts(model, prompts, generation.max_new_tokens)
    generation = replace(generation, eos=eos_tokens(model, generation.eos))
    meta = describe(model, prompts[0], generation, annotation, described)
    meta = replace(meta, sampling={**meta.sampling, "continuous": asdict(scheduling)})
    rows = Interleaved(meta, annotation, dropped if dropped is not None else DroppedRows())
    with _engine(model, prompts, generation, scheduling) as manager:
        segments = partial(scheduled, manager)
        recorder = RouterRecorder(model, logits=logits, gates_ahead=gates_ahead, segments=segments)
        with recorder, _sampling(model, generation, segments):
            manager.start()
            for request in _requests(manager, prompts):
                rows.end(request)
                rows.add(recorder.take())
                if on_request is not None:
                    on_request(len(request.tokens) - 1)
                if (piece := rows.release()) is not None:
                    yield piece
    rows.close()


def scheduled(manager: Any) -> list[Segment]:
    """Return whose tokens the step under way processes, in the order of its rows.

    Called from the engine's thread, between its scheduling of a step and the next. To watch an
    engine of your own, give ``partial(scheduled, manager)`` to ``RouterRecorder`` as ``segments``;
    a request's number is that at the end of its id (3 of ``req_3``).
    """
    try:
        states = manager.batch_processor.inputs_and_outputs.requests_in_batch
        return [
            Segment(
                request=_number(one.state.request_id),
                num_tokens=one.query_length,
                end=one.state.position_offset,
                yields=one.has_new_token,
            )
            for one in states
        ]
    except AttributeError as error:
        raise TraceError(
            f"this version of transformers does not tell which requests it packs: {error}"
        ) from error


def _number(request_id: str) -> int:
    digits = re.fullmatch(r"(?:req_)?(\d+)", request_id)
    if digits is None:
        raise TraceError(f"request id {request_id!r}: must be a number, or req_ and a number")
    return int(digits[1])


@contextmanager
def _engine(
    model: Any,
    prompts: Sequence[Sequence[int]],
    generation: Generation,
    scheduling: Scheduling,
) -> Iterator[Any]:
    """Yield a manager with every prompt in its queue, not started; stop it at the end."""
    attention = model.config._attn_implementation
    logger = logging.getLogger(ENGINE_LOGGER)
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # what goes wrong is raised, not logged with its traceback
    manager = None
    try:
        manager = _manager(model, prompts, generation, scheduling)
        for number, prompt in enumerate(prompts):
            manager.add_request(
                list(prompt),
                request_id=str(number),
                max_new_tokens=generation.max_new_tokens,
                eos_token_id=list(generation.eos or ()) or -1,
            )
        yield manager
    finally:
        if manager is not None:
            manager.stop(block=True, hard_stop=True)
            manager.destroy()
        if model.config._attn_implementation != attention:
            model.set_attn_implementation(attention)
        logger.setLevel(level)


def _manager(
    model: Any,
    prompts: Sequence[Sequence[int]],
    generation: Generation,
    scheduling: Scheduling,
) -> Any:
    """Return transformers' engine for the model, as ``scheduling`` wants it."""
    from transformers import ContinuousBatchingConfig

    if not hasattr(model, "init_continuous_batching"):
        raise TraceError(f"{type(model).__name__} has no continuous batching")
    if generation.options:
        names = ", ".join(generation.options)
        raise TraceError(f"options ({names}) are for generate(): continuous batching has none")
    config = copy.deepcopy(model.generation_config)
    config.update(
        do_sample=False,
        num_beams=1,
        num_return_sequences=1,
        max_new_tokens=generation.max_new_tokens,
        eos_token_id=list(generation.eos or ()) or -1,
        return_dict_in_generate=False,
    )
    _refuse_processors(model, config)
    longest = max(len(prompt) for prompt in prompts) + generation.max_new_tokens
    at_once = min(generation.batch_size, len(prompts))  # pages for more would only take memory
    engine = ContinuousBatchingConfig(
        page_size=scheduling.page_tokens,
        num_blocks=_pages(longest, at_once, scheduling),
        max_batch_tokens=max(scheduling.max_batch_tokens, at_once),
        max_requests_per_batch=at_once,
        max_blocks_per_request=0,
        allow_block_sharing=False,
        use_async_batching=False,
        use_cuda_graph=False,
        auto_switch_to_flash=False,
        scheduler_type=scheduling.scheduler,
    )
    try:
        return model.init_continuous_batching(config, engine)
    except (ValueError, AttributeError, NotImplementedError) as error:
        raise _failure(str(error)) from error


def _refuse_processors(model: Any, config: Any) -> None:
    """Refuse a model whose own settings change logits in ways that packed steps do not."""
    processors = [type(processor).__name__ for processor in model._get_logits_processor(config)]
    if processors:
        raise TraceError(
            f"the model's generation settings ask for {', '.join(processors)}: continuous batching "
            "would leave that out"
        )


def _pages(longest: int, batch_size: int, scheduling: Scheduling) -> int:
    """Return how many pages the cache has; ``longest`` is the tokens of the longest request."""
    size = scheduling.page_tokens
    if scheduling.cache_tokens is not None:
        return scheduling.cache_tokens // size
    return math.ceil(math.ceil(longest / size) * batch_size / (1 - SHARE_KEPT_FREE)) + 1


@contextmanager
def _sampling(
    model: Any, generation: Generation, segments: Callable[[], Sequence[Segment]]
) -> Iterator[None]:
    """Add the seeded noise of ``generation`` to the logits; nothing where it is greedy."""
    if not generation.temperature:
        yield
        return
    noise = PackedNoise(generation.seed, generation.temperature, segments)
    handle = model.register_forward_hook(noise, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _requests(manager: Any, prompts: Sequence[Sequence[int]]) -> Iterator[Request]:
    """Yield the requests as they end."""
    waiting = len(prompts)
    while waiting:
        result = manager.get_result(timeout=SECONDS_BETWEEN_LOOKS)
        if result is None:
            if not manager.is_running():
                reason = manager.background_thread_status.fatal_error or "no reason given"
                raise _failure(str(reason))
            continue
        if result.error is not None:
            raise _failure(result.error)
        if result.is_finished():
            number = int(result.request_id)
            tokens = [*prompts[number], *result.generated_tokens]
            waiting -= 1
            yield Request(number, tokens, len(prompts[number]))


def _failure(reason: str) -> TraceError:
    return TraceError(f"continuous batching cannot run this model: {' '.join(reason.split())}")
