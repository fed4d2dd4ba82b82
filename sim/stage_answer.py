"""The answer to whether there are stages in a trace's routing, in plain words."""

from __future__ import annotations

import math

from sim.stage_capture import Capture
from sim.stage_draws import SHIFTED, SHUFFLED, WINDOWS
from sim.stage_findings import Findings
from sim.stage_inference import Contrast

_NULLS = {
    SHIFTED: "the same boundaries shifted",
    SHUFFLED: "the same lengths in random order",
    WINDOWS: "windows of equal length",
}
LOOKS_AT_ROUTING = ("drift", "entropy")
"""Detectors that put boundaries where the routing changes: what is tested is then no news."""


def answer(found: Findings) -> list[str]:
    """Return the answer, a sentence or two a line: locality, reach, token identity, kinds, caches."""
    lines = [_locality(found)]
    is_known = not math.isnan(found.pairs.overall.value)
    if is_known:
        lines.append(_reach(found))
    if is_known and found.beyond is not None:
        lines.append(_beyond(found.beyond.overall, found.pairs.overall))
    if found.kinds is not None:
        kinds = found.kinds
        word = "use" if kinds.overall.is_clear else "do not clearly use"
        lines.append(
            f"Stages of one kind {word} the same experts in other requests: {_percent(kinds.same)} in "
            f"common, of different kinds {_percent(kinds.different)} ({_interval(kinds.overall)}, "
            f"p = {kinds.overall.p_value:.3f})."
        )
    lines += [
        _cache(*pair, found) for pair in zip(found.captures, found.window_captures, strict=True)
    ]
    return lines


def _locality(found: Findings) -> str:
    pairs, overall = found.pairs, found.pairs.overall
    if math.isnan(overall.value):
        return (
            "Unknown: no two pairs of tokens are as far apart within a stage and across a boundary."
        )
    within, across = found.pairs.sides()
    unrelated = ""
    if not math.isnan(found.unrelated):
        unrelated = f"; tokens of different requests share {_percent(found.unrelated)}"
    chance = ", ".join(
        f"{_NULLS[name]} {_points(against.null_mean)} (p = {against.p_value:.3f})"
        for name, against in pairs.against.items()
    )
    return (
        f"{_verdict(found)}: at equal distance two tokens of one stage share {_percent(within)} of their "
        f"experts, two with a boundary between them {_percent(across)}{unrelated}. Difference "
        f"{_interval(overall)}; {chance}."
    )


def _verdict(found: Findings) -> str:
    if found.by in LOOKS_AT_ROUTING:
        return f"Untested, as {found.by} looks for it"
    if found.pairs.is_clear:
        is_made = found.source.startswith("synthetic")
        return "Yes, as the synthetic trace was made" if is_made else "Yes"
    reach = _reach_of(found)
    return f"Only up to {reach} tokens apart" if reach else "No"


def _reach(found: Findings) -> str:
    edges, reach = found.pairs.edges.tolist(), _reach_of(found)
    if not reach:
        return f"Up to {edges[1]} tokens apart there is no clear difference."
    if reach == edges[-1]:
        return f"The difference is clear at all distances up to {reach} tokens."
    return (
        f"The difference is clear at all distances up to {reach} tokens, and not at the next ones; a stage "
        f"has {found.mean_length} in the mean."
    )


def _reach_of(found: Findings) -> int:
    """Return up to how many tokens apart every band has a clear difference; 0: not even the first."""
    reach = 0
    for contrast, high in zip(found.pairs.by_band, found.pairs.edges.tolist()[1:], strict=True):
        if not (contrast.is_clear and contrast.value > 0):
            break
        reach = high
    return reach


def _beyond(rest: Contrast, overall: Contrast) -> str:
    if not rest.is_clear:
        words = ": the words differ by stage, not what they use" if overall.is_clear else ""
        return (
            f"Nothing is clear once each token's usual experts are taken away ({_interval(rest)}, "
            f"p = {rest.p_value:.3f}){words}."
        )
    left = f"Once each token's usual experts are taken away {_interval(rest)} are left"
    if not overall.is_clear:
        return f"{left} (p = {rest.p_value:.3f})."
    return (
        f"{left}, {100 * rest.value / overall.value:.0f} % of it (p = {rest.p_value:.3f}): the words of a "
        "stage make up for the rest."
    )


def _cache(own: Capture, window: Capture, found: Findings) -> str:
    parts = []
    if found.kinds is not None:
        parts.append(f"the kind of the stage is worth {_gain(own, 'kind')}")
    parts += [
        f"the stage before {_gain(own, 'before')}",
        f"the stage itself would be worth {_gain(own, 'itself')}",
        f"the number of a window of equal length is worth {_gain(window, 'kind')}",
    ]
    return (
        f"With {own.slots} experts a layer one set for all stages holds {_percent(own.held['all'])} of the "
        f"uses; over that {', '.join(parts)}."
    )


def _gain(capture: Capture, rule: str) -> str:
    return f"{100 * capture.gain[rule][0]:+.1f} points"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"


def _points(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:+.2f} points"


def _interval(contrast: Contrast) -> str:
    if math.isnan(contrast.low):
        return _points(contrast.value)
    return (
        f"{_points(contrast.value)}, 95 % [{100 * contrast.low:+.2f}, {100 * contrast.high:+.2f}]"
    )
