"""``greenroom generate``: a Hugging Face MoE generates with its experts behind a policy.

torch and transformers are imported only when a run starts, so ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from real.result_folder import result_folder
from sim.command_line import Parser
from sim.mistakes import complain
from sim.own_options import add_config_dirs, check_folders
from sim.settings import did_you_mean
from sim.types import ConfigError
from traces.schema import GATE_COLUMNS

if TYPE_CHECKING:
    from real.live_model import LiveSubject
    from real.live_options import LiveOptions
    from real.live_run import LiveRun

PROGRAM = "greenroom generate"
DEFAULT_REQUESTS = 4
LARGEST_CHECKED_BYTES = 1_000_000_000
"""Models up to this size are compared with the unmodified one unless --no-check is given."""
_TIERS = ("ram", "storage")
_LARGEST_SEED = 2**63 - 1
_MOST_BYTES = 1e14
"""Of memory: well below what the machine of a live run's policies is taken to have."""
_MOST_AHEAD = len(GATE_COLUMNS)
_EPILOG = """examples:
  greenroom generate policy=saem cache.ratio=0.25
  greenroom generate --tier storage --memory 1.5e6 --batch-size 4 policy=lru
  greenroom generate --model ./Qwen3-30B-A3B --prompts questions.txt --tier storage --store experts.bin
  greenroom generate --record run.parquet --sample --seed 1 policy=prefetch_next_gate

Settings are those of `greenroom sim`: policy, cache.*, engine, machine (what policies believe of this
machine), trace.path (a trace of this model, from which policies that learn beforehand do so). Nothing is
downloaded."""


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    try:
        options = make_parser().parse_intermixed_args(arguments)
        _check(options)
        return _run(options)
    except Exception as error:
        return complain(PROGRAM, error)


def make_parser() -> Parser:
    """Return what reads the command's arguments."""
    parser = Parser(
        prog=PROGRAM,
        description="Let a Hugging Face MoE generate with its experts in a slower tier, behind a policy.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="settings, as of greenroom sim")
    add("--model", default="tiny", help="'tiny' (the bundled one, default), a folder with safetensors, or a "
        "config.json (random weights)")  # fmt: skip
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="a prompt a line, or .jsonl as for greenroom record",
    )
    add("--requests", type=int, help=f"default: all of --prompts, else {DEFAULT_REQUESTS}")
    add("--batch-size", type=int, default=1, help="requests at one time (default: 1)")
    add("--max-new-tokens", type=int, help="default: 640 for tiny, else 256")
    add("--sample", action="store_true", help="sample at --temperature instead of greedy choice")
    add("--temperature", type=float, help="with --sample; default: 1")
    add("--seed", type=int, default=0, help="of sampling, random weights and tiny's problems")
    add("--tier", default="ram", help="where experts wait: ram (default) or storage, a file read past "
        "the page cache")  # fmt: skip
    add("--store", type=Path, metavar="FILE", help="the file of --tier storage: used again if it is there; "
        "default: a temporary one")  # fmt: skip
    add("--device", default="auto", help="what computes: auto (default), cpu, cuda or cuda:N")
    add("--threads", type=int, help="CPU threads (default: torch's own)")
    add("--memory", metavar="BYTES", help="budget of the compute device for dense weights, cached experts "
        "and staging slots, say 4e9; instead of cache.ratio")  # fmt: skip
    add("--record", type=Path, metavar="FILE.parquet", help="write the trace of the run")
    add("--logits", action="store_true", help="with the router logits")
    add(
        "--gates-ahead",
        type=int,
        metavar="N",
        help="with what later gates guess (default: 1)",
    )
    add("--licence", help="of the model and the prompts, for the trace's header")
    add("--check", action=argparse.BooleanOptionalAction, help="compare with the unmodified model (default: "
        "for models up to 1 GB)")  # fmt: skip
    add("--out", type=Path, metavar="DIR", help="folder of the tables (default: outputs/DATE/TIME)")
    add_config_dirs(parser)
    return parser


def _check(options: argparse.Namespace) -> None:
    """Refuse, before anything heavy is loaded, what can be seen to be wrong."""
    for name in ("requests", "max_new_tokens", "batch_size", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} = {value}: must be >= 1")
    if not 0 <= options.seed <= _LARGEST_SEED:
        raise ConfigError(f"--seed = {options.seed}: must be in [0, 2^63 - 1]")
    if options.tier not in _TIERS:
        hint = did_you_mean(options.tier, _TIERS)
        raise ConfigError(f"--tier = {options.tier}: must be ram or storage{hint}")
    if options.store is not None and options.tier != "storage":
        raise ConfigError(f"--store = {options.store}: must be left out without --tier storage")
    if options.temperature is not None and (
        not options.sample or not 0 < options.temperature < math.inf
    ):
        raise ConfigError(
            f"--temperature = {options.temperature}: must be > 0 and finite, and needs --sample"
        )
    if options.prompts is not None and not options.prompts.is_file():
        raise ConfigError(f"--prompts = {options.prompts}: no such file")
    if options.model != "tiny" and not Path(options.model).exists():
        raise ConfigError(
            f"--model = {options.model}: must be 'tiny', a folder or a .json file that exists"
        )
    _check_trace(options)
    for flag, path in (("--record", options.record), ("--store", options.store)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{flag} = {path}: no such folder: {path.absolute().parent}")
    options.memory = _bytes(options.memory)
    check_folders(options.config_dirs)


def _check_trace(options: argparse.Namespace) -> None:
    """Refuse what is wrong with the trace to write, and what is asked of one that is not written."""
    if options.record is not None and options.record.suffix != ".parquet":
        raise ConfigError(f"--record = {options.record}: must end in .parquet")
    ahead = options.gates_ahead
    if ahead is not None and not 0 <= ahead <= _MOST_AHEAD:
        raise ConfigError(f"--gates-ahead = {ahead}: must be in [0, {_MOST_AHEAD}]")
    for name in ("logits", "gates_ahead", "licence"):
        value = getattr(options, name)
        if options.record is None and value not in (None, False):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag}: is of the trace; must be left out without --record")


def _bytes(text: str | None) -> int | None:
    """Return a size, for which 4e9 is as good as 4000000000."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= _MOST_BYTES or value != int(value):
        raise ConfigError(
            f"--memory = {text}: must be a whole number of bytes >= 1, as 4e9, at most {_MOST_BYTES:g}"
        )
    return int(value)


def _run(options: argparse.Namespace) -> int:
    with _with_torch():
        _import()
    from real import live_build
    from real.device import open_device
    from real.generate_report import print_result, print_texts
    from real.live_run import LiveRun
    from real.replay_run import use_threads

    if options.threads is not None:
        use_threads("--threads", options.threads)
    config = live_build.compose_live(options.overrides, options.config_dirs)
    device = open_device(options.device)
    subject, live_options = _prepare(options)
    with (
        result_folder(options.out) as folder,
        device.faults(),
        LiveRun(subject, config, live_options, device, _store_progress) as run,
    ):
        with _progress(len(subject.subject.prompts)) as advance:
            result = run.run(folder, lambda made: advance(len(made)))
        _write(folder, run, result.summary, options)
    print_texts(subject.subject, result.requests)
    print_result(result.summary, result.notes, folder, options.record)
    return 0


def _import() -> None:
    import torch  # noqa: F401
    import transformers  # noqa: F401


def _prepare(options: argparse.Namespace) -> tuple[LiveSubject, LiveOptions]:
    """Load the model, and say how it is to be run."""
    from real.live_model import load_live
    from real.live_options import LiveOptions
    from real.rig import Tier
    from traces.record import Generation

    if options.requests is None and options.prompts is None:
        options.requests = DEFAULT_REQUESTS
    check = _is_small(options) if options.check is None else options.check
    wanted, options.device = options.device, "cpu"  # dense weights are moved later, experts never
    subject = load_live(options, whole=check)
    options.device = wanted
    temperature = 0.0
    if options.sample:
        temperature = options.temperature or subject.subject.temperature or 1.0
    generation = Generation(
        max_new_tokens=options.max_new_tokens or subject.subject.max_new_tokens,
        temperature=temperature,
        seed=options.seed,
        batch_size=options.batch_size,
    )
    return subject, LiveOptions(
        generation,
        Tier(options.tier),
        options.store,
        options.memory,
        options.record,
        options.logits,
        1 if options.gates_ahead is None else options.gates_ahead,
        check,
    )


def _is_small(options: argparse.Namespace) -> bool:
    """Tell whether the unmodified model may be run as well: all of a folder's weights would be loaded."""
    path = Path(options.model)
    if not path.is_dir():
        return True
    return sum(file.stat().st_size for file in path.glob("*.safetensors")) <= LARGEST_CHECKED_BYTES


@contextmanager
def _with_torch() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{error}; live runs need torch: pip install 'greenroom[torch]', in a checkout: "
            "pip install -c constraints.txt -e '.[torch]'"
        ) from error


def _write(
    folder: Path, run: LiveRun, summary: dict[str, Any], options: argparse.Namespace
) -> None:
    from omegaconf import OmegaConf

    from sim.point import overridden
    from sim.results import finish_run

    summary["overrides"] = overridden(options.overrides)
    finish_run(folder, summary, OmegaConf.to_yaml(OmegaConf.create(run.config)))


# -- progress --------------------------------------------------------------------------------------


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """Give a function that is told how many more requests are done."""
    from sim.progress import step_bar

    with step_bar("requests") as watch:
        if watch is None:
            yield lambda count: None
            return
        advance = watch(total)
        yield lambda count: [advance() for _ in range(count)]


def _store_progress(done: int, total: int) -> None:
    """Say now and then how much of a large store is written."""
    step = max(1, total // 10)
    if total >= 2048 and done % step == 0:
        print(f"{PROGRAM}: {done} of {total} experts stored", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
