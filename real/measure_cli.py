"""``greenroom measure``: times this machine, and makes a machine's files of it that a simulation runs on."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from real.result_folder import result_folder
from sim.command_line import Parser
from sim.mistakes import complain
from sim.screen import screen
from sim.types import ConfigError

if TYPE_CHECKING:
    from real.device import Device
    from real.measure import Measured, Progress
    from real.measure_plan import Setting
    from real.store_file import FileStore

_EPILOG = """examples:
  greenroom measure --out my_conf --name my_machine         about two and a half minutes
  greenroom measure --out my_conf --name my_machine --quick   40 seconds, less sure
  greenroom sim --config-dir my_conf machine=my_machine     a simulation of this machine

Ctrl-C ends the measuring early; what was measured by then is kept. Without a GPU the device is the CPU: one
thread computes, another one copies, and experts on the host are computed by further ones."""
_FEW = 5
_BUSY = 0.3
"""Of the cores, from which on the others that run are told of."""
_LEAST_SECONDS = 1.0
"""For turns, where what is prepared takes all the time."""


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    try:
        options = make_parser().parse_args(arguments)
        with result_folder(options.out, make=True) as out:
            _run(options, out)
    except Exception as error:
        return complain("greenroom measure", error)
    return 0


def make_parser() -> Parser:
    """Return what reads the command's arguments."""
    parser = Parser(
        prog="greenroom measure",
        description="Time copies, storage, kernels and handovers of this machine, in turns.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="where rows and options go (default: outputs/DATE/TIME)",
    )
    add("--name", default="my_machine", help="of the machine (default: my_machine)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    add("--dtypes", metavar="A,B", help="of experts; the first is that of the machine's own file")
    add("--threads", type=int, default=1, metavar="N", help="of the device, if a CPU (default: 1)")
    add("--cpu-threads", type=int, metavar="N", help="of experts on the host")
    add("--quick", action="store_true", help="fewer sizes, and under a minute")
    add(
        "--seconds", type=float, metavar="S", help="until all is measured (default: 130, quick: 30)"
    )
    add("--scratch", metavar="DIR", help="where a file of 1 GiB may be, on storage")
    add("--keep", action="store_true", help="leave that file there for another time")
    add("--no-storage", action="store_true", help="leave storage out")
    add("--rows-only", action="store_true", help="write the rows, and no files of a machine")
    add("--seed", type=int, default=0, help="of the order of turns (default: 0)")
    return parser


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The options, checked."""

    out: Path
    name: str
    seconds: float
    threads: int
    cpu_threads: int
    scratch: Path | None


def _run(options: argparse.Namespace, out: Path) -> None:
    from real.device import open_device
    from real.machine_facts import machine_facts
    from real.measure_kernels import torch_threads
    from real.measure_rows import rows_of, summary_of, write_rows

    device = open_device(options.device)
    facts = machine_facts(device)
    wanted = _wanted(options, out, facts)
    begun = time.monotonic()
    facts["load"] = load = round(os.getloadavg()[0], 2)
    with ExitStack() as stack:
        stack.enter_context(device.faults())
        stack.enter_context(torch_threads(wanted.threads))
        setting = _setting(options, wanted, device, stack)
        _warn_if_busy(load, facts["cores"])
        told = _told(setting, wanted, stack)
        measured = _measure(options.seed, begun + wanted.seconds, setting, facts, stack)
    if measured.was_cut and not measured.samples:
        raise KeyboardInterrupt  # nothing to keep
    if not measured.samples:
        raise ConfigError("nothing was measured: it was stopped before the second round")
    rows = rows_of(measured, wanted.name)
    _print(measured, facts)
    summary = summary_of(measured, facts, told)
    written = write_rows(wanted.out / f"{wanted.name}.csv", rows, summary)
    for path in written:
        print(f"Written: {path}")
    if not options.rows_only:
        _make_machine(written[0], wanted)


def _warn_if_busy(load: float, cores: int) -> None:
    """Warn if as many others wanted a core, in the mean of the minute before, as spoil times."""
    if load > _BUSY * cores:
        _say(
            f"the machine is busy (load {load:.1f} on {cores} cores): work of more than some ms will look "
            "slower than it is"
        )


def _make_machine(rows: Path, wanted: _Wanted) -> None:
    from sim.calibrate_machine import run_whole
    from sim.calibrate_spec import read_specification

    spec = read_specification("measured", str(rows), wanted.name)
    run_whole(spec, str(wanted.out), str(wanted.out / f"{wanted.name}_fit"), brief=True)
    print(f"Use: greenroom sim --config-dir {wanted.out} machine={wanted.name}")


# -- what is asked for -----------------------------------------------------------------------------


def _wanted(options: argparse.Namespace, out: Path, facts: Mapping[str, Any]) -> _Wanted:
    from real.measure_plan import QUICK_SECONDS, SECONDS
    from sim.calibrate_machine import check_name

    cores = facts["cores"]
    usual = cores if facts["device"]["kind"] == "cuda" else max(1, cores - options.threads)
    threads = usual if options.cpu_threads is None else options.cpu_threads
    for flag, value in (("--threads", options.threads), ("--cpu-threads", threads)):
        if not 1 <= value <= cores:
            raise ConfigError(f"{flag} {value}: must be in [1, {cores}], the cores of this machine")
    if options.seed < 0:
        raise ConfigError(f"--seed {options.seed}: must be >= 0")
    seconds = options.seconds
    if seconds is None:
        seconds = QUICK_SECONDS if options.quick else SECONDS
    if not 1 <= seconds <= 86_400:
        raise ConfigError(f"--seconds {seconds:g}: must be in [1, 86400]")
    check_name(options.name, out)
    scratch = None if options.scratch is None else Path(options.scratch)
    return _Wanted(out, options.name, seconds, options.threads, threads, scratch)


def _setting(
    options: argparse.Namespace, wanted: _Wanted, device: Device, stack: ExitStack
) -> Setting:
    from real.experts import DTYPES
    from real.machine_facts import num_cores
    from real.measure_plan import DTYPES as USUAL
    from real.measure_plan import FULL, QUICK, Setting
    from sim.settings import did_you_mean

    dtypes: Sequence[str] = USUAL[device.kind]
    if options.dtypes is not None:
        dtypes = [name.strip() for name in options.dtypes.split(",")]
        for name in dtypes:
            if name not in DTYPES:
                known = ", ".join(DTYPES)
                raise ConfigError(
                    f"--dtypes {name}: must be of {known}{did_you_mean(name, list(DTYPES))}"
                )
    sizes = QUICK if options.quick else FULL
    store = None
    if not options.no_storage:
        store = _scratch(wanted, options.keep, sizes.scratch_bytes)
        stack.callback(store.close)
    return Setting(device, sizes, dtypes, num_cores(), wanted.cpu_threads, store)


def _scratch(wanted: _Wanted, keep: bool, num_bytes: int) -> FileStore:
    from real.measure_storage import open_scratch

    _say(f"a file of {num_bytes >> 20} MiB to read from")
    store = open_scratch(wanted.scratch, num_bytes, keep)
    _say(f"it is in {store.path.parent}{'' if store.is_direct else f'; {store.why_not}'}")
    return store


def _told(setting: Setting, wanted: _Wanted, stack: ExitStack) -> dict[str, Any]:
    """Return how it is measured, for the file beside the rows."""
    from real.machine_facts import storage_facts

    short = "bfloat16" if setting.device.kind == "cuda" else "float32"
    store = setting.store
    storage = None
    if store is not None:
        storage = {**storage_facts(store.path.parent), "is_direct": store.is_direct}
    return {
        "dtypes": list(setting.dtypes),
        "activations": {"int8": short},
        "threads": wanted.threads,
        "cpu_threads": wanted.cpu_threads,
        "storage": storage,
    }


# -- measuring -------------------------------------------------------------------------------------


def _measure(
    seed: int, deadline: float, setting: Setting, facts: Mapping[str, Any], stack: ExitStack
) -> Measured:
    from real.machine_facts import free_bytes
    from real.measure import take_turns
    from real.measure_plan import fill_pools, plan

    pools = fill_pools(setting.device, setting.sizes, facts["cache_bytes"], free_bytes())
    stack.callback(setting.device.give_back, pools.device.buffer.numel())
    probes = plan(setting, pools, stack)
    seconds = max(_LEAST_SECONDS, deadline - time.monotonic())
    _say(f"{len(probes)} pieces of work take turns for {seconds:.0f} s")
    with _progress(seconds) as progress:
        measured = take_turns(probes, seconds, seed=seed, progress=progress)
    if measured.was_cut:
        _say("stopped early: what was measured by then is kept")
    few = sum(len(samples.times_ns) < _FEW for samples in measured.samples)
    if few:
        _say(
            f"{few} of {len(measured.samples)} pieces have fewer than {_FEW} repeats: more --seconds"
        )
    return measured


@contextmanager
def _progress(seconds: float) -> Iterator[Progress | None]:
    """Show how much time went by; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(file=sys.stderr)) as bar:
        task = bar.add_task("measuring", total=seconds)
        yield lambda done, rounds: bar.update(
            task, completed=done, description=f"measuring, {rounds} rounds"
        )


def _say(text: str) -> None:
    print(f"greenroom measure: {text}", file=sys.stderr)


# -- the screen ------------------------------------------------------------------------------------


def _print(measured: Measured, facts: Mapping[str, Any]) -> None:

    from real.measure_table import slowdown_lines, table_of

    console = screen(120)
    device = facts["device"]["name"]
    console.print(
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_bytes'] / 2**30:.0f} GiB, device "
        f"{device}, {facts['system']}, torch {facts['torch']}",
        highlight=False,
    )
    console.print(table_of(measured.samples))
    for line in slowdown_lines(measured):
        console.print(line, highlight=False)
