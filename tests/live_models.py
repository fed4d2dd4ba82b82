"""What the tests of live runs share: small models behind policies, without Hydra's cost for each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from real.adapters import ModelExperts, find_experts
from real.checkpoint import ModuleExperts
from real.device import CPUDevice
from real.live import Live
from real.live_build import LiveShape, compose_live, live_config, live_scenario
from real.live_model import top_k_of
from real.live_steps import LiveBatch
from real.rig import Tier, build_executor
from real.store import build_ram
from tests.configs import CONF
from traces.record import Generation, generate_batch

EOS = (2,)
PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15, 16]]
FAMILIES = ("qwen3_moe", "olmoe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss")
RAM = Tier("ram")


@cache
def _base() -> dict[str, Any]:
    return compose_live([])


def settings(policy: str, ratio: float = 0.25, **cache_settings: Any) -> dict[str, Any]:
    """Return a configuration with a policy of ``conf/policy``; its defaults list is followed by hand."""
    config = {group: dict(v) if isinstance(v, dict) else v for group, v in _base().items()}
    chosen = yaml.safe_load((CONF / "policy" / f"{policy}.yaml").read_text(encoding="utf-8"))
    for entry in chosen.pop("defaults", []):
        if isinstance(entry, dict):
            ((key, option),) = entry.items()
            group, _, role = key.lstrip("/").partition("@")
            file = CONF / group / f"{option}.yaml"
            chosen[role] = yaml.safe_load(file.read_text(encoding="utf-8"))
    config["policy"] = chosen
    config["cache"] |= {"ratio": ratio, **cache_settings}
    return config


def shape_of(model: Any, experts: ModelExperts) -> LiveShape:
    config = model.config.get_text_config(decoder=True)
    first = experts.layers[0]
    form = ModuleExperts([layer.experts for layer in experts.layers]).format
    sizes = len(experts.layers), experts.num_experts, top_k_of(config, first.router, first.block)
    return LiveShape("test", *sizes, config.num_hidden_layers, form)


def scenario_of(model: Any, config: dict[str, Any], batch_size: int, tier: Tier = RAM) -> Any:
    shape = shape_of(model, find_experts(model))
    return live_scenario(live_config(config, shape, batch_size, tier), shape, tier)


def generated(
    model: Any,
    batch_size: int,
    new: int = 5,
    live: Live | None = None,
    given: Sequence[Sequence[int]] = PROMPTS,
) -> list[list[int]]:
    """Return the tokens of all prompts; padded to the left where a batch has several."""
    generation = Generation(max_new_tokens=new, batch_size=batch_size, eos=EOS)
    found = []
    for first in range(0, len(given), batch_size):
        prompts = given[first : first + batch_size]
        if live is not None:
            live.begin_batch(batch_of(prompts, first))
        found += generate_batch(model, prompts, first, generation)
        if live is not None:
            live.end_batch()
    return [request.tokens for request in found]


def batch_of(prompts: Sequence[Sequence[int]], first: int = 0) -> LiveBatch:
    numbers = range(first, first + len(prompts))
    return LiveBatch(numbers, [len(prompt) for prompt in prompts], EOS, str)


@contextmanager
def attached(model: Any, config: dict[str, Any], batch_size: int = 1, **how: Any) -> Any:
    """Give (live, executor) of a model whose experts wait in host memory."""
    scenario = scenario_of(model, config, batch_size)
    experts, device = find_experts(model), CPUDevice()
    store = build_ram(ModuleExperts([layer.experts for layer in experts.layers]), device)
    made = {"activation": experts.activation, "combine": experts.combine}
    executor = build_executor(scenario, store, device, RAM, **made, **how)
    with store, executor, Live(model, experts, executor) as live:
        yield live, executor


def policies() -> list[str]:
    return sorted(file.stem for file in (CONF / "policy").glob("*.yaml"))


def saved(model: Any, folder: Path) -> Path:
    """Save a model in several files, with a tokenizer that reads numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder
