"""The ``greenroom`` command: finds the subcommand and hands over; imports nothing heavy itself."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module

_COMMANDS = {
    "sim": (
        "sim.run",
        "simulate offloading policies on a trace; -m sweeps (--help for the options)",
    ),
    "measure": (
        "real.measure_cli",
        "time this machine: copies, storage, kernels; rows and a machine file",
    ),
    "generate": (
        "real.generate_cli",
        "run a Hugging Face MoE with its experts behind a policy",
    ),
    "replay": (
        "real.replay_cli",
        "run the same policies on this machine: a trace's routing, actual copies and kernels",
    ),
    "validate": (
        "real.validate_cli",
        "run policies on this machine and in the simulator, and tell how far apart they are",
    ),
    "model": (
        "sim.model_cli",
        "list the models, show one, or make a file of a config.json, GGUF or safetensors",
    ),
    "machines": ("sim.machines_cli", "list the machines and their parts, or show one with sources"),
    "policies": ("sim.catalogue", "list the policies that come with it, or show one"),
    "check-policy": (
        "sim.check_cli",
        "hold a policy, yours included, against what must hold of all",
    ),
    "stages": (
        "sim.stage_report",
        "hold detectors of reasoning stages against a trace's annotated stages",
    ),
    "predict": (
        "sim.predict_cli",
        "predict speed, memory and bottleneck of a model on a machine, without a run",
    ),
    "advise": (
        "sim.advise_cli",
        "search engines, placements and quantisations for the fastest that fits",
    ),
    "calibrate": (
        "sim.calibrate",
        "fit figures of machine and engine files to measured rows",
    ),
    "published": (
        "sim.published_cli",
        "predict what others published, and show how far off that is",
    ),
    "record": (
        "sim.record_cli",
        "record a router trace: of a torch MoE, or of a running vLLM or SGLang",
    ),
    "import": ("sim.import_cli", "make a trace of what another tool recorded"),
    "export": ("sim.export_cli", "write a trace in another tool's format"),
    "stats": ("sim.stats_cli", "measure a trace's locality: does it suit offloading?"),
    "synth": (
        "sim.synth_cli",
        "fit a model of routing to a trace and write synthetic traces of any shape",
    ),
    "remoe": (
        "real.remoe_cli",
        "fine-tune a model's gates to reuse experts (ReMoE), and tell what it gains and costs",
    ),
}


_WITH_WEIGHTS = ("torch", "transformers", "safetensors")
"""What commands with real weights need, and the others do not."""
_INSTALL = "pip install -c constraints.txt -e '.[torch]'"


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for name in (
        "stdout",
        "stderr",
    ):  # closed by the caller, as with `2>&-`: nobody wants to read it
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # open to the end
    for sign in ("SIGTERM", "SIGHUP"):  # as Ctrl-C: what is unfinished is taken away
        if hasattr(signal, sign):
            signal.signal(getattr(signal, sign), signal.default_int_handler)
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("greenroom: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `greenroom ... | head`
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"greenroom: error: {error.strerror}", file=sys.stderr)
        return 2


def _run(arguments: list[str]) -> int:
    """Run what the arguments ask for; return the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    name, rest = arguments[0], arguments[1:]
    if name in ("-V", "--version"):
        from importlib.metadata import version

        print(f"greenroom {version('greenroom')}")
        return 0
    if name not in _COMMANDS:
        near = get_close_matches(name, _COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(_COMMANDS)})"
        print(f"greenroom: error: command = {name}: no such command{hint}", file=sys.stderr)
        return 2
    if os.getcwd() not in sys.path:  # a user's policies lie there; last, so as to hide nothing
        sys.path.append(os.getcwd())
    command: Callable[[list[str]], int] = import_module(_COMMANDS[name][0]).main
    try:
        return command(rest)
    except ModuleNotFoundError as error:
        if error.name not in _WITH_WEIGHTS:
            raise
        told = f"{error.name} is not installed; pip install 'greenroom[torch]', in a checkout: {_INSTALL}"
        print(f"greenroom {name}: error: {told}", file=sys.stderr)
        return 2


def _help() -> str:
    lines = [f"  {name:12} {text}" for name, (_, text) in _COMMANDS.items()]
    return "\n".join(
        [
            "Greenroom: what a Mixture-of-Experts model does on too little GPU memory.",
            "",
            "usage: greenroom COMMAND [ARGUMENTS]",
            "",
            *lines,
            "",
            "`greenroom COMMAND --help` tells more.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
