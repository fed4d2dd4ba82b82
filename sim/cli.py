"""The ``greenroom`` command: finds the subcommand and hands over; imports nothing heavy itself."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module

COMMANDS = {
    "sim": (
        "sim.run",
        "simulate offloading policies on a trace; -m sweeps (--help for the options)",
    ),
    "sweep": (
        "sim.sweeps.cli",
        "many simulations at once, on all cores, SLURM or Ray; goes on where it was stopped",
    ),
    "plot": ("sim.plot_cli", "draw the figures of a run or a sweep"),
    "report": ("sim.report_cli", "put a run or a sweep into one HTML file"),
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
    "completion": (
        "sim.completion",
        "print what a shell needs to complete commands, groups and keys",
    ),
}


_PURPOSES = {
    "Traces": ("record", "import", "export", "stats", "stages", "synth"),
    "Simulate": ("sim", "sweep", "policies", "check-policy"),
    "Plan a machine": ("predict", "advise", "model", "machines", "published", "calibrate"),
    "With real weights": ("measure", "generate", "replay", "validate", "remoe"),
    "Look at results": ("plot", "report"),
    "The shell": ("completion",),
}
"""What commands are for, in the order of the help."""
_FIRST = (
    ("greenroom sim policy=saem cache.ratio=0.25", "one policy on the bundled trace"),
    ("greenroom sweep policy=lru,saem cache.ratio=0.125,0.25", "policies beside each other"),
    ("greenroom predict model=gpt_oss_120b machine=rtx4090", "how fast will it be here?"),
)
_WITH_WEIGHTS = ("torch", "transformers", "safetensors")
"""What commands with real weights need, and the others do not."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a file system says that takes no more."""
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
    code = 0
    try:
        try:
            code = _run(arguments)
        finally:  # --help ends by an exception
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("greenroom: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `greenroom ... | head`
        _say_no_more()
        return 0
    except OSError as error:
        if error.errno not in _FULL:
            raise
        if code == 0:  # else the command has said it
            print(f"greenroom: error: stdout cannot be written: {error.strerror}", file=sys.stderr)
        _say_no_more()
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
    for word in arguments:
        if not word.isprintable() and _is_no_utf8(word):
            print(f"greenroom: error: {word!r}: must be UTF-8", file=sys.stderr)
            return 2
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(COMMANDS)})"
        print(f"greenroom: error: command = {name}: no such command{hint}", file=sys.stderr)
        return 2
    try:
        here = os.getcwd()
    except OSError as error:
        print(f"greenroom: error: the current folder: {error.strerror}", file=sys.stderr)
        return 2
    if here not in sys.path:  # a user's policies lie there; last, so as to hide nothing
        sys.path.append(here)
    command: Callable[[list[str]], int] = import_module(COMMANDS[name][0]).main
    try:
        return command(rest)
    except ModuleNotFoundError as error:
        if error.name not in _WITH_WEIGHTS:
            raise
        told = f"{error.name} is not installed; pip install 'greenroom[torch]', in a checkout: {_INSTALL}"
        print(f"greenroom {name}: error: {told}", file=sys.stderr)
        return 2


def _say_no_more() -> None:
    """Send what is still to be written to nowhere, so that the end of the process does not complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a stream without a file beneath
            os.dup2(nowhere, stream.fileno())


def _is_no_utf8(word: str) -> bool:
    """Tell whether bytes of an argument were no UTF-8, and so stand in it as halves of characters."""
    return any("\ud800" <= char <= "\udfff" for char in word)


def _help() -> str:
    lines = []
    for purpose, names in _PURPOSES.items():
        lines += [f"{purpose}:", *(f"  {name:12} {COMMANDS[name][1]}" for name in names), ""]
    width = max(len(command) for command, _ in _FIRST)
    return "\n".join(
        [
            "Greenroom: what a Mixture-of-Experts model does on too little GPU memory.",
            "",
            "usage: greenroom COMMAND [ARGUMENTS]",
            "",
            *lines,
            "Three to begin with:",
            *(f"  {command:{width}}   {text}" for command, text in _FIRST),
            "",
            "`greenroom COMMAND --help` tells more, with examples; `greenroom completion` is for Tab.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
