"""One live run, from a model and a configuration to its summary and its tables. No printing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from real.device import Device
from real.executor import Executor
from real.live import Live
from real.live_build import live_config, live_scenario
from real.live_memory import PeakMemory, Reserve, model_bytes, reserve_of, within
from real.live_model import LiveSubject, to_device
from real.live_options import LiveOptions, LiveResult
from real.live_record import LiveRecorder
from real.live_steps import LiveBatch
from real.live_store import open_store
from real.quality import Answers, agreement, answers_at_once, forced
from real.rig import build_executor
from real.store import Progress, Store, with_low_copies
from sim.build import Scenario
from sim.metrics import RunTables, Totals
from sim.result_tables import streamed_tables
from sim.routing import ordering
from sim.types import ConfigError
from traces.record import check_prompts, eos_tokens, generate_batch
from traces.record_rows import Request

OnBatch = Callable[[Sequence[Request]], None]


class LiveRun:
    """A model, a policy and the memory between them, as a context manager; :meth:`run` runs it.

    Parameters
    ----------
    subject
        The model and its prompts.
    config
        What ``compose_live`` gave.
    options, device
        How, and on what.
    on_store
        Is told how many experts are written to the store.

    Raises
    ------
    ConfigError
        The policy cannot run live, or the budget is too small.
    RealError
        Files or memory fail.
    """

    def __init__(
        self,
        subject: LiveSubject,
        config: Mapping[str, Any],
        options: LiveOptions,
        device: Device,
        on_store: Progress | None = None,
    ) -> None:
        model, generation = subject.model, options.generation
        check_prompts(model, subject.subject.prompts, generation.max_new_tokens)
        if options.check and not subject.is_whole:
            raise ConfigError(
                "--check needs the unmodified model, whose experts must be loaded too"
            )
        eos = eos_tokens(model, subject.subject.eos)
        self._generation = replace(generation, eos=eos)
        self._subject, self._options, self._device = subject, options, device
        self._prompts = subject.subject.prompts
        self._peak = PeakMemory(device)
        self.reserve = self._reserve()
        self.config = self._sized(config)
        """The whole configuration, as it is run."""
        self._scenario: Scenario | None = (
            self._build()
        )  # mistakes are found before anything is written
        self.lossy = self._scenario.offloader.policies.lossy
        self._open = ExitStack()
        self._on_store = on_store
        self._store: Store | None = None

    def __enter__(self) -> LiveRun:
        to_device(self._subject.model, self._subject.experts, self._device, self._options.check)
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    # -- before the run ---------------------------------------------------------------------------

    def _reserve(self) -> Reserve:
        longest = max(map(len, self._prompts)) + self._generation.max_new_tokens
        subject, size = self._subject, self._generation.batch_size
        return reserve_of(subject.model, subject.experts, self._device, size, longest)

    def _sized(self, config: Mapping[str, Any]) -> dict[str, Any]:
        shape, options = self._subject.shape(), self._options
        made = live_config(config, shape, self._generation.batch_size, options.tier)
        if options.memory_bytes is None:
            return made
        formats = [shape.format]
        if made["policy"].get("low") is not None:
            formats.append(with_low_copies(self._subject.source).low_format)
        staging = min(shape.num_experts, shape.top_k * self._generation.batch_size + 2)
        return within(made, options.memory_bytes, self.reserve, formats, staging)

    def _build(self) -> Scenario:
        subject = self._subject
        return live_scenario(self.config, subject.shape(), self._options.tier, subject.is_bundled)

    # -- the run ----------------------------------------------------------------------------------

    def run(self, folder: Path, on_batch: OnBatch | None = None) -> LiveResult:
        """Generate from all prompts; tables go to ``folder`` while it goes on.

        ``on_batch`` is given the requests of every batch that has ended.
        """
        unmodified = self._generate(None, None) if self._options.check else None
        self._store = self._open.enter_context(self._open_store())
        scenario, totals, provenance = self._take_scenario(), Totals(), self._provenance()
        self._peak.set_base(model_bytes(self._subject.model))
        with ExitStack() as opened:  # what is opened last closes first: the model, then the tables
            shape = self._shape_of_tables(scenario)
            tables = opened.enter_context(streamed_tables(folder, totals, provenance, **shape))
            live = opened.enter_context(self._live(scenario, tables))
            recorder = self._recorder(opened)
            self._peak.begin()
            requests = self._generate(live, recorder, on_batch)
            peak_bytes = self._peak.process_bytes()
        summary = self._summary(scenario, totals, peak_bytes)
        notes = self._notes(scenario, recorder)
        if unmodified is not None:
            summary["quality"] = self._compare(unmodified, requests)
        summary["provenance"] = provenance
        return LiveResult(summary, requests, notes)

    def _open_store(self) -> AbstractContextManager[Store]:
        subject, options = self._subject, self._options
        low = self.config["policy"].get("low") is not None
        source = with_low_copies(subject.source) if low else subject.source
        return open_store(source, options.tier, self._device, options.store_path, self._on_store)

    def _take_scenario(self) -> Scenario:
        """Return a scenario that no run has used."""
        scenario, self._scenario = self._scenario, None
        return self._build() if scenario is None else scenario

    @contextmanager
    def _live(self, scenario: Scenario, tables: RunTables | None = None) -> Iterator[Live]:
        assert self._store is not None
        experts = self._subject.experts
        executor = build_executor(
            *(scenario, self._store, self._device, self._options.tier, tables),
            activation=experts.activation,
            combine=experts.combine,
        )
        self._executor: Executor = executor
        order = ordering(self.config["workload"]["expert_order"])
        with executor, Live(self._subject.model, experts, executor, order) as live:
            yield live

    def _generate(
        self, live: Live | None, recorder: LiveRecorder | None, on_batch: OnBatch | None = None
    ) -> list[Request]:
        """Generate from all prompts, by the model as it is where ``live`` is None."""
        found: list[Request] = []
        size = self._generation.batch_size
        for first in range(0, len(self._prompts), size):
            prompts = self._prompts[first : first + size]
            if live is not None:
                live.begin_batch(self._batch(range(first, first + len(prompts)), prompts))
            made = generate_batch(self._subject.model, prompts, first, self._generation)
            if live is not None:
                live.end_batch()
            if recorder is not None:
                recorder.end_batch(made)
            if on_batch is not None:
                on_batch(made)
            found += made
        return found

    def _batch(self, numbers: Sequence[int], prompts: Sequence[Sequence[int]]) -> LiveBatch:
        piece = self._subject.subject.annotation.piece
        eos = self._generation.eos or ()
        return LiveBatch(numbers, [len(prompt) for prompt in prompts], eos, piece)

    def _recorder(self, opened: ExitStack) -> LiveRecorder | None:
        """Return what records the run, if that is asked for; ``opened`` closes it."""
        subject, options = self._subject.subject, self._options
        if options.record is None:
            return None
        recorder = LiveRecorder(
            *(subject.model, options.record, self._generation, subject.annotation),
            subject.described,
            logits=options.logits,
            gates_ahead=options.gates_ahead,
        )
        return opened.enter_context(recorder)

    # -- what came of it --------------------------------------------------------------------------

    def _compare(self, unmodified: list[Request], requests: list[Request]) -> dict[str, Any]:
        """Return how the answers differ from the unmodified model's; a lossy policy's along given texts."""
        same = [a.tokens == b.tokens for a, b in zip(unmodified, requests, strict=True)]
        found: dict[str, Any] = {"same_texts": sum(same), "texts": len(same)}
        if not self.lossy:
            return found
        model, own_texts = self._subject.model, self._subject.texts()
        plain = answers_at_once(model, unmodified)
        judged = answers_at_once(model, own_texts) if own_texts else plain
        with self._live(self._take_scenario()) as live:
            made = self._forced(live, unmodified)
            ours = self._forced(live, own_texts) if own_texts else made
        return found | {
            "token_agreement": agreement(plain, made),
            "agreement_tokens": plain.num_tokens,
            "perplexity": ours.perplexity,
            "unmodified_perplexity": judged.perplexity,
            "perplexity_tokens": judged.num_tokens,
            "perplexity_text": "held-out problems" if own_texts else "the unmodified model's own",
        }

    def _forced(self, live: Live, texts: Sequence[Request]) -> Answers:
        @contextmanager
        def entered(text: Request) -> Iterator[None]:
            live.begin_batch(
                self._batch([text.request_id], [text.tokens[: text.num_prompt_tokens]])
            )
            yield
            live.end_batch()

        return forced(self._subject.model, texts, entered)

    def _shape_of_tables(self, scenario: Scenario) -> dict[str, Any]:
        return {
            "num_experts": scenario.shape.num_experts,
            "record_events": self.config["output"]["events"],
            "num_layers": scenario.shape.num_moe_layers,
            "lossy": self.lossy,
        }

    def _summary(
        self, scenario: Scenario, totals: Totals, process_bytes: int | None
    ) -> dict[str, Any]:
        """Return the run's row: choices, metrics of the tables, memory."""
        budget = scenario.budget
        return {
            "policy": self.config["policy"]["name"],
            "model": self._subject.name,
            "device": self._device.name,
            "tier": self._options.tier.kind,
            "lossy": self.lossy,
            "batch_size": self._generation.batch_size,
            "temperature": self._generation.temperature,
            "threads": torch.get_num_threads(),
            "cache_ratio": budget.cache_ratio,
            "cache_bytes": budget.cache_bytes,
            "staging_slots": budget.staging_slots,
            **totals.summary(),
            "wasted_prefetch_bytes": scenario.offloader.wasted_prefetch_bytes,
            "stages": scenario.offloader.stage_score.num_found,
            "memory": self._memory(scenario, process_bytes),
        }

    def _memory(self, scenario: Scenario, process_bytes: int | None) -> dict[str, Any]:
        """Return the budget and what was taken."""
        dense, arena = self.reserve.dense_bytes, self._executor.parts.arena.num_bytes
        found: dict[str, Any] = {
            "budget_bytes": self._options.memory_bytes or dense + arena,
            "is_budget_set": self._options.memory_bytes is not None,
            "dense_bytes": dense,
            "arena_bytes": arena,
            "expert_bytes": scenario.budget.all_expert_bytes,
            "peak_device_bytes": self._peak.device_bytes(dense, arena),
        }
        if self._options.tier.kind == "storage":  # else the process holds the experts as well
            found["peak_process_bytes"] = process_bytes
        return found

    def _notes(self, scenario: Scenario, recorder: LiveRecorder | None) -> list[str]:
        policies, notes = scenario.offloader.policies, []
        if policies.former is not None:
            notes.append("its former has no choice: a batch stays together until it ends")
        if self.lossy and not self._options.check:
            notes.append("this policy changes the model's answer; --check tells by how much")
        crowded = scenario.budget.crowded(scenario.shape.top_k)
        if crowded:
            notes.append(crowded)
        if recorder is not None:
            notes += recorder.dropped.notes()
        return notes

    def _provenance(self) -> dict[str, Any]:
        return {
            "kind": "live",
            "model": self._subject.name,
            "weights": self._subject.source.source,
            "torch": torch.__version__,
            "seed": self._generation.seed,
        }
