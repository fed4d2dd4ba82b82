"""What the policies of the catalogue say of themselves, and a trace that each can run on."""

from __future__ import annotations

from typing import Any

from tests.configs import composed

ASSUMED = {
    *("lru_global_next_gate", "prefetch_assumed"),
    *("prefetch_assumed_adapmoe", "prefetch_assumed_qwen3"),
}
ORACLES = ASSUMED | {
    *("belady", "belady_bypass", "lru_union_oracle", "prefetch_perfect", "stage_oracle"),
    "stage_oracle_fixed",
}
WANT_LOGITS = {"cache_prior", "cumulative_sum", "max_rank"}
LOSSY = WANT_LOGITS | {
    *("adapmoe", "buddymoe", "cold_drop", "daop", "hobbit", "ktransformers_deferral"),
    *("reuse", "smoe"),
}


def trace_of(policy: str) -> tuple[str, ...]:
    """Return the overrides that choose a trace with the columns a policy needs, and apart requests."""
    if policy in WANT_LOGITS:
        return ("trace=tiny_logits", "workload.requests=[6,10]", "calibration.requests=[0,6]")
    return ("trace=tiny", "workload.requests=[24,28]", "calibration.requests=[0,24]")


def config_of(policy: str, *overrides: str) -> dict[str, Any]:
    """Return a configuration of a policy on a trace that has what it needs."""
    return composed(f"policy={policy}", *trace_of(policy), *overrides)
