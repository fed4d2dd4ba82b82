"""What the values of options, arguments and settings are taken from, where it is few or files."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

CONFIGS = {
    "sim": "config",
    "sweep": "sweep",
    "generate": "config",
    "replay": "replay",
    "validate": "validate",
    "remoe": "remoe",
    "predict": "predict",
    "advise": "predict",
    "stages": "config",
    "check-policy": "config",
    "machines": "config",
}
"""The file in ``conf/`` whose settings a command takes as KEY=VALUE."""
_DEVICES = ["auto", "cpu", "cuda"]
_OF = {
    "sim cfg": ["job", "hydra", "all"],
    "sim package": ["@node"],
    "sim config_dir": ["@folder"],
    "sim config_path": ["@folder"],
    "generate model": ["tiny", "@file"],
    "generate tier": ["ram", "storage"],
    "generate device": _DEVICES,
    "replay device": _DEVICES,
    "measure device": _DEVICES,
    "measure dtypes": ["float32", "bfloat16", "float16", "int8", ","],
    "measure scratch": ["@folder"],
    "validate device": _DEVICES,
    "validate dtype": ["auto", "float32", "bfloat16", "float16"],
    "validate tiers": ["ram", "storage", "link", ","],
    "validate policies": ["@policy", ","],
    "validate scratch": ["@folder"],
    "remoe model": ["tiny", "@folder"],
    "record model": ["tiny", "@file", "@model"],
    "record device": ["cpu", "cuda"],
    "record scheduler": ["fifo", "prefill_first"],
    "record engine": ["vllm", "sglang"],
    "record interface": ["completions", "chat", "tokens", "native"],
    "import model": ["@model"],
    "synth model": ["@model"],
    "model name": ["@model", "from-config", "from-gguf", "from-safetensors"],
    "machines name": ["@machine", "@parts"],
    "policies name": ["@policy"],
    "check-policy policy": ["@policy", "@file"],
    "calibrate calibration": ["@calibration", "@file"],
    "calibrate machine": ["@machine"],
    "calibrate errors": ["@file"],
    "plot policies": ["@policy", ","],
    "plot baseline": ["@policy"],
    "plot format": ["png", "pdf", "svg", ","],
    "plot trace": ["@trace", "@file"],
    "report folder": ["@file"],
    "report baseline": ["@policy"],
    "stages only": ["@stages", ","],
    "stages by": ["annotated", "@stages"],
    "advise engines": ["@engine", ","],
    "advise sim_trace": ["@trace", "@file"],
    "advise trace": ["@trace", "@file"],
    "predict trace": ["@trace", "@file"],
    "stats trace": ["@trace", "@file"],
    "synth like": ["@trace", "@file"],
    "export path": ["@trace", "@file"],
}
"""By command and the name under which the parser keeps the value; all others tell by themselves."""
_FILE_SETTINGS = ("trace.path", "calibration.trace", "real.store", "sweep.list")
_FOLDER_SETTINGS = ("hydra.run.dir", "hydra.sweep.dir", "sweep.dir")
_FOLDERS = ("DIR", "FOLDER")
_FILES = re.compile(r"FILE|PATH|TABLE|TRACE")


def values_of(command: str, action: argparse.Action) -> list[str]:
    """Return the sources of an option's or argument's value; an empty list for any text."""
    own = _of_catalogues(command, action.dest) or _OF.get(f"{command} {action.dest}")
    if own is not None:
        return own
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    metavar = str(action.metavar or "")
    if metavar.startswith("KEY=VALUE") or action.dest == "overrides":
        return ["@settings"]
    if metavar in _FOLDERS:
        return ["@folder"]
    if _FILES.search(metavar) or action.type is Path:
        return ["@file"]
    return []


def places_of(command: str, actions: Sequence[argparse.Action]) -> list[list[str]]:
    """Return the sources of each positional argument."""
    if command == "plot":  # of one action, results and then figures
        from sim.figures.table import FIGURES

        return [["@file"], list(FIGURES)]
    return [values_of(command, action) for action in actions]


def _of_catalogues(command: str, name: str) -> list[str] | None:
    """Return what is listed in code."""
    if name == "quant":
        from hwmodels.file_types import SCHEMES

        return [*SCHEMES, ","] if command == "advise" else list(SCHEMES)
    if (command, name) == ("import", "format"):
        from traces.importers.formats import FORMATS

        return [known.name for known in FORMATS]
    if (command, name) == ("export", "format"):
        from traces.exporters.formats import EXPORTS

        return [known.name for known in EXPORTS]
    return None


def settings_values() -> dict[str, list[str]]:
    """Return the sources of the values of settings, by dotted key: what a rule names, files, policies."""
    from sim.settings import SETTINGS
    from sim.sweeps.settings import ENGINES, SEARCHES

    found = {
        f"{group}.{key}": re.findall(r"'([^']+)'", words)
        for group, rules in SETTINGS.items()
        for key, (_, words) in rules.items()
        if "must be '" in words
    }
    return {
        **found,
        "workload.arrivals": ["closed", "poisson", "@file"],
        **{key: ["@file"] for key in _FILE_SETTINGS},
        **{key: ["@folder"] for key in _FOLDER_SETTINGS},
        "output.baseline": ["@policy"],
        "sweep.search": list(SEARCHES),
        "sweep.engine": list(ENGINES),
        "sweep.direction": ["maximize", "minimize"],
        "real.tier": ["ram", "storage", "link"],
        "real.device": _DEVICES,
        "real.dtype": ["float32", "bfloat16", "float16", "int8"],
    }
