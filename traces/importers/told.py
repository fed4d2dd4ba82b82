"""What a user can tell of a recording whose file does not say it.

``sim/told_options.py`` fills it from a command line: a model's name, its ``config.json``, or numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from traces.trace import NO_EXPERT, TraceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Facts of the model and the run; None where nobody told. A file that says otherwise wins nothing:
    it is refused (:func:`agreed`).
    """

    model: str | None = None
    num_experts: int | None = None  # routed experts a layer
    top_k: int | None = None  # experts a token had in the run
    native_top_k: int | None = None  # experts a token has in the model as published
    num_hidden_layers: int | None = None  # dense layers counted too
    layer_indices: tuple[int, ...] | None = None  # absolute indices of the MoE layers, ascending
    num_shared_experts: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None  # of one expert
    scoring: str | None = None
    normalized: bool | None = None
    tokenizer: str | None = None
    licence: str | None = None
    context_tokens: int | None = None  # length of the contexts that a text was cut into
    prompt_tokens: int | None = None  # of every request, where the file does not part them

    @property
    def prompt_or_first(self) -> int:
        """Prompt tokens of every request, the first one where nobody tells."""
        return 1 if self.prompt_tokens is None else self.prompt_tokens

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < (0 if name in _MAY_BE_ZERO else 1):
                least = 0 if name in _MAY_BE_ZERO else 1
                raise TraceError(f"{name} is {value}: must be >= {least}")
        layers = self.layer_indices
        if layers is not None and (not layers or list(layers) != sorted({*layers})):
            raise TraceError(f"layer_indices are {layers}: must be ascending, one a MoE layer")
        if layers and min(layers) < 0:
            raise TraceError(f"layer_indices are {layers}: must be >= 0")


_COUNTS = (
    "num_experts",
    "top_k",
    "native_top_k",
    "num_hidden_layers",
    "num_shared_experts",
    "hidden_size",
    "intermediate_size",
    "context_tokens",
    "prompt_tokens",
)
_MAY_BE_ZERO = ("num_shared_experts", "prompt_tokens")

NOTHING = Told()
"""Nobody told anything."""


def agreed(name: str, field: str, told: int | None, found: int | None) -> int | None:
    """Return what user and file say of ``field``; ``name`` is the file.

    Raises
    ------
    TraceError
        If both say something and it differs.
    """
    if told is not None and found is not None and told != found:
        raise TraceError(f"{name}: {field} is {found}: must be {told}, as you said")
    return found if told is None else told


def needed(name: str, field: str, value: int | None, option: str, *, top: int = NO_EXPERT) -> int:
    """Return ``value``, which an importer cannot do without; ``option`` is how a user gives it.

    Raises
    ------
    TraceError
        If nobody gave it, or it is not in 1..top - 1.
    """
    if value is None:
        raise TraceError(f"{name}: does not tell {field}: give {option}")
    if not 1 <= value < top:
        raise TraceError(f"{name}: {field} is {value}: must lie in 1..{top - 1}")
    return value


def parse_layers(text: str) -> tuple[int, ...]:
    """Return layer indices of ``3-60``, ``1-59:2`` (every second), ``0,2,5`` or a mix of them."""
    indices: list[int] = []
    for part in text.split(","):
        span, colon, step = part.partition(":")
        first, dash, last = span.partition("-")
        numbers = (first, last if dash else first, step if colon else "1")
        known = all(number.strip().isdecimal() for number in numbers)
        if not known or int(numbers[2]) < 1 or int(numbers[1]) >= NO_EXPERT:
            rule = f"must be indices < {NO_EXPERT} as 3-60, 1-59:2 or 0,2,5"
            raise TraceError(f"layers are {text!r}: {rule}")
        indices.extend(range(int(numbers[0]), int(numbers[1]) + 1, int(numbers[2])))
    return _ascending(text, indices)


def _ascending(text: str, indices: Sequence[int]) -> tuple[int, ...]:
    if not indices or list(indices) != sorted({*indices}):
        raise TraceError(f"layers are {text!r}: must be ascending, each once")
    return tuple(indices)
