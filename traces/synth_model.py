"""What is known of a router after a fit: enough to draw traces like its own, and no row of them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.out_file import whole_output
from traces.schema import TraceError, near_match
from traces.synth_scores import SPAN_TOKENS
from traces.synth_stages import StageChain

FIT_VERSION = 2
_ARRAYS = ("offsets", "correlations", "stays", "sharpness")
_WHOLE_ARRAYS = ("classes", "lengths_tokens")
_CHAINS = ("prefill_chain", "decode_chain")


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthModel:
    """A stage-structured model of a router's choices; see ``traces.synth_scores``.

    Attributes
    ----------
    source
        What it was fitted to: plain values, as ``model``, ``kind`` and ``tokens``; see ``fit``.
    num_layers, num_experts, top_k
        The shape.
    stage_names
        By index.
    stages_told
        Whether the stages are the source's own; else they are clusters of its windows.
    rank
        Dimensions of a hidden state.
    coupling
        Share of a state's variance that all layers have in common, in [0, 1].
    seed
        Of the experts' directions.
    offsets
        float32[num_stages, num_layers, num_experts]: what an expert's score is above the mean.
    classes
        int64[num_layers, num_experts]: each expert's class by popularity, from 0 on; the experts of a
        class see a hidden state that moves at their pace.
    correlations
        float64[num_layers, num_classes, SPAN_TOKENS]: autocorrelation of the moving part by lag; 1 at
        lag 0.
    stays
        float64[num_layers, num_classes]: the share of the variance that stays over a request.
    sharpness
        float64[num_layers]: weights are the softmax of the chosen scores times this.
    lengths_tokens
        int64[num_requests, 2]: prefill and decode rows of the source's requests.
    prefill_chain, decode_chain
        The stages of either phase.
    """

    source: dict[str, Any]
    num_layers: int
    num_experts: int
    top_k: int
    stage_names: tuple[str, ...]
    stages_told: bool
    rank: int
    coupling: float
    seed: int
    offsets: NDArray[np.float32]
    classes: NDArray[np.int64]
    correlations: NDArray[np.float64]
    stays: NDArray[np.float64]
    sharpness: NDArray[np.float64]
    lengths_tokens: NDArray[np.int64]
    prefill_chain: StageChain
    decode_chain: StageChain
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        stages, layers = len(self.stage_names), self.num_layers
        shapes = {
            "offsets": (stages, layers, self.num_experts),
            "classes": (layers, self.num_experts),
            "correlations": (layers, self.num_classes, SPAN_TOKENS),
            "stays": (layers, self.num_classes),
            "sharpness": (layers,),
            "lengths_tokens": (len(self.lengths_tokens), 2),
        }
        for name, shape in shapes.items():
            values = getattr(self, name)
            _require(values.shape == shape, name, values.shape, f"must have the shape {shape}")
            _require(bool(np.isfinite(values).all()), name, "not finite", "must be numbers")
        for name in _CHAINS:
            count = len(getattr(self, name).begins)
            _require(count == stages, name, count, f"must be of {stages} stages")
        _require(1 <= self.top_k < self.num_experts, "top_k", self.top_k, "must be < num_experts")
        _require(self.rank >= 1, "rank", self.rank, "must be >= 1")
        _require(0 <= self.coupling <= 1, "coupling", self.coupling, "must lie in [0, 1]")
        inside = bool((self.stays >= 0).all() and (self.stays < 1).all())
        _require(inside, "stays", self.stays.tolist(), "must lie in [0, 1)")
        inside = bool((self.classes >= 0).all() and (self.classes < self.num_classes).all())
        _require(inside, "classes", "out of range", f"must lie in 0..{self.num_classes - 1}")

    @property
    def num_classes(self) -> int:
        """Classes of experts by popularity."""
        return self.stays.shape[-1] if self.stays.ndim else 1

    def only(self, layers: list[int]) -> SynthModel:
        """Return the model of some of its layers; their directions are drawn anew."""
        return replace(
            self,
            num_layers=len(layers),
            offsets=self.offsets[:, layers],
            classes=self.classes[layers],
            correlations=self.correlations[layers],
            stays=self.stays[layers],
            sharpness=self.sharpness[layers],
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, whole or not at all."""
        with whole_output(Path(path)) as temporary:
            temporary.write_text(json.dumps(self.to_dict()) + "\n", encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        plain["source"] = dict(self.source)
        for name in _ARRAYS:
            plain[name] = np.round(plain[name].astype(np.float64), 5).tolist()
        for name in _WHOLE_ARRAYS:
            plain[name] = plain[name].tolist()
        for name in _CHAINS:
            plain[name] = plain[name].to_dict()
        return {"fit_version": FIT_VERSION, **plain}

    @classmethod
    def from_dict(cls, values: dict[str, Any], name: str) -> SynthModel:
        """Read what ``to_dict`` gave; ``name`` is the file the errors speak of."""
        version = values.get("fit_version")
        if version != FIT_VERSION:
            what = "not a fit" if version is None else f"a fit of version {version!r}"
            rule = f"must be one of version {FIT_VERSION}; fit again with greenroom synth --like"
            raise TraceError(f"{name}: {what}: {rule}")
        known = [item.name for item in fields(cls)]
        given = {key: value for key, value in values.items() if key != "fit_version"}
        for key in given:
            if key not in known:
                raise TraceError(f"{name}: key {key!r} is not known{near_match(key, known)}")
        for key in known:
            if key not in given:
                raise TraceError(f"{name}: key {key!r} is missing")
        try:
            return cls(**_arguments(given))
        except TraceError as error:
            raise TraceError(f"{name}: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise TraceError(f"{name}: not a fit: {' '.join(str(error).split())}") from None


def load_model(path: str | os.PathLike[str]) -> SynthModel:
    """Read a fit that ``SynthModel.save`` wrote."""
    path = Path(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise TraceError(f"{path}: not a fit: must be a JSON object")
    return SynthModel.from_dict(values, str(path))


def _arguments(values: dict[str, Any]) -> dict[str, Any]:
    """Turn parsed JSON into constructor arguments."""
    _check_plain(values)
    kinds: dict[str, Any] = dict.fromkeys(_ARRAYS, np.float64) | {"offsets": np.float32}
    kinds |= dict.fromkeys(_WHOLE_ARRAYS, np.int64)
    arrays = {name: np.array(values[name], dtype=kind) for name, kind in kinds.items()}
    chains = {name: StageChain.from_dict(values[name]) for name in _CHAINS}
    names = {name: tuple(values[name]) for name in ("stage_names", "notes")}
    return {**values, **arrays, **chains, **names}


def _check_plain(values: dict[str, Any]) -> None:
    """Refuse plain values of other kinds than ``to_dict`` writes, so that nothing fails later on."""
    for key in ("num_layers", "num_experts", "top_k", "rank", "seed"):
        value = values[key]
        _require(type(value) is int and value >= 0, key, repr(value), "must be a number >= 0")
    _require(
        type(values["stages_told"]) is bool, "stages_told", values["stages_told"], "must be bool"
    )
    coupling = values["coupling"]
    _require(type(coupling) in (int, float), "coupling", repr(coupling), "must be a number")
    for key in ("stage_names", "notes"):
        good = isinstance(values[key], list) and all(isinstance(v, str) for v in values[key])
        _require(good, key, repr(values[key]), "must be a list of strings")
    source = values["source"]
    _require(isinstance(source, dict), "source", repr(source), "must be an object")
    for key in ("name", "kind", "model", "tokens", "licence", "shape"):
        _require(key in source, f"source.{key}", "missing", "must be given")
    shape = source["shape"]
    good = isinstance(shape, list | tuple) and len(shape) == 3
    _require(
        good and all(type(v) is int for v in shape), "source.shape", shape, "must be 3 numbers"
    )
    licence = source["licence"]
    _require(licence is None or isinstance(licence, str), "source.licence", licence, "must be text")


def _require(good: bool, name: str, value: object, rule: str) -> None:
    if not good:
        raise TraceError(f"{name} is {value}: {rule}")
