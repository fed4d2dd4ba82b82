"""Made-up requests with routing, and the answers that engines would send for them."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.importers.told import Told
from traces.schema import Trace

NUM_LAYERS, DENSE, NUM_EXPERTS, TOP_K = 4, 1, 16, 2
TOLD = Told(num_experts=NUM_EXPERTS, top_k=TOP_K, num_hidden_layers=NUM_LAYERS)


@dataclass
class Sample:
    """A request: its tokens, and ids [tokens - 1, layers, k] with the dense layers as zeros."""

    prompt: list[int]
    output: list[int]
    ids: NDArray[np.int32]

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def moe_ids(self) -> NDArray[np.int32]:
        return self.ids[:, DENSE:]


def distinct_ids(rng: np.random.Generator, num_tokens: int, num_layers: int) -> NDArray[np.int32]:
    """Random experts, distinct in each cell, none of them 0 in both slots."""
    scores = rng.random((num_tokens, num_layers, NUM_EXPERTS))
    return scores.argsort(axis=-1)[..., :TOP_K].astype(np.int32)


def sample(num_prompt: int = 3, num_output: int = 4, seed: int = 0) -> Sample:
    rng = np.random.default_rng(seed)
    ids = distinct_ids(rng, num_prompt + num_output - 1, NUM_LAYERS)
    ids[:, :DENSE] = 0
    tokens = rng.integers(1, 1000, num_prompt + num_output).tolist()
    return Sample(tokens[:num_prompt], tokens[num_prompt:], ids)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def npy_b64(ids: NDArray, dtype: str = "uint8") -> str:
    held = io.BytesIO()
    np.save(held, ids.astype(dtype))
    return b64(held.getvalue())


def sglang_native(made: Sample, start: int = 0, **meta) -> dict:
    """What ``/generate`` answers."""
    return {
        "text": "so",
        "output_ids": made.output,
        "meta_info": {
            "id": "a7",
            "finish_reason": {"type": "length", "length": len(made.output)},
            "prompt_tokens": len(made.prompt),
            "completion_tokens": len(made.output),
            "cached_tokens": 0,
            "routed_experts": b64(made.ids[start:].astype("<i4").tobytes()),
            **meta,
        },
    }


def sglang_openai(made: Sample) -> dict:
    """What ``/v1/chat/completions`` of SGLang answers."""
    return {
        "id": "a7",
        "object": "chat.completion",
        "model": "toy",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "so"}, "finish_reason": "stop"}
        ],
        "usage": {
            "prompt_tokens": len(made.prompt),
            "completion_tokens": len(made.output),
            "total_tokens": len(made.tokens),
        },
        "sglext": {"routed_experts": b64(made.ids.astype("<i4").tobytes())},
    }


def vllm_whole(made: Sample, dtype: str = "uint8") -> dict:
    """What vLLM's completions answer, token ids asked for."""
    return {
        "id": "cmpl-7",
        "object": "text_completion",
        "model": "toy",
        "system_fingerprint": "vllm-0.33.0-tp1",
        "choices": [
            {
                "index": 0,
                "text": "so",
                "finish_reason": "length",
                "token_ids": made.output,
                "prompt_token_ids": made.prompt,
                "routed_experts": npy_b64(made.ids, dtype),
            }
        ],
        "usage": {"prompt_tokens": len(made.prompt), "completion_tokens": len(made.output)},
    }


def vllm_tokens_out(made: Sample) -> dict:
    """What vLLM's token-in-token-out API answers: no prompt, no usage."""
    choice = {"index": 0, "token_ids": made.output, "finish_reason": "length"}
    choice["routed_experts"] = npy_b64(made.ids)
    return {"request_id": "7", "choices": [choice]}


def vllm_split(made: Sample) -> dict:
    """What vLLM 0.21 answers: lists, MoE layers only, the prompt's apart."""
    cut = len(made.prompt)
    return {
        "id": "cmpl-7",
        "choices": [
            {
                "index": 0,
                "text": "so",
                "routed_experts": made.moe_ids[cut:].tolist(),
                "token_ids": None,
            }
        ],
        "usage": {"prompt_tokens": cut, "completion_tokens": len(made.output)},
        "prompt_routed_experts": made.moe_ids[:cut].tolist(),
    }


def check_rows(
    trace: Trace, made: list[Sample], tokens: bool = True, rows: slice = slice(None)
) -> None:
    """Compare a trace with what it was made of, request by request."""
    assert trace.num_requests == len(made)
    for number, one in enumerate(made):
        part = trace.take(trace.request_id == number)
        wanted = one.moe_ids[rows]
        places = np.arange(len(one.ids))[rows]
        assert np.array_equal(part.expert_ids, wanted)
        assert part.position.tolist() == places.tolist()
        assert part.phase.tolist() == [int(at >= len(one.prompt)) for at in places]
        if tokens:
            assert part.token_id.tolist() == one.tokens[:-1][rows]
