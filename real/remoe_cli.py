"""``greenroom remoe``: fine-tune the gates of a MoE model so that tokens reuse experts of the last one."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from real.result_folder import result_folder
from sim.command_line import Parser
from sim.mistakes import complain
from sim.show_config import add_show, check_show, show
from sim.types import ConfigError

PROGRAM = "greenroom remoe"
_SECONDS_BETWEEN_LINES = 20.0
_EPILOG = """examples:
  greenroom remoe --out outputs/remoe             # the bundled model; --resume goes on with a stopped run
  greenroom remoe --model ./OLMoE-1B-7B --texts chats.jsonl --out run train.dtype=bfloat16 \\
      train.learning_rate=5e-5 train.steps=2000
  greenroom remoe --gates traces/tiny/remoe_gates.safetensors    # judge the bundled model's trained gates
  greenroom remoe --out outputs/remoe --frontier  # reuse against quality over the loss weights
  greenroom remoe --out outputs/remoe --speed     # its traces, before and after, simulated and measured

Only the gates change; all other weights are compared by their hash. A control is trained on the same texts
with cross entropy alone. Settings (KEY=VALUE) are those of conf/remoe.yaml: loss.*, train.*, evaluate.*,
frontier.*, speed.*. Of --texts a line is a text; of a .jsonl file a string, a list of token ids, or an
object with 'text' or 'tokens'."""


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    try:
        options = make_parser().parse_intermixed_args(arguments)
        check_show(options)
        if options.cfg is not None:
            return show("remoe", options.overrides, options)
        _check(options)
        with result_folder(options.out, make=True) as folder:
            _run(options, folder)
    except Exception as error:
        return complain(PROGRAM, error, "remoe")
    return 0


def make_parser() -> Parser:
    """Return what reads the command's arguments."""
    parser = Parser(
        prog=PROGRAM,
        description="Fine-tune only the gates of a Mixture-of-Experts model for reuse of experts (ReMoE, "
        "arXiv 2605.27081), beside a control, and tell what it gains and costs.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="settings")
    add("--model", default="tiny", help="'tiny' (the bundled model) or a Hugging Face folder")
    add("--texts", type=Path, metavar="FILE", help="to train on: a text a line, or .jsonl")
    add("--held-out", type=Path, metavar="FILE", help="to judge by (default: a tenth of --texts)")
    add("--out", type=Path, metavar="DIR", help="default: a new folder below outputs/")
    add("--resume", action="store_true", help="go on with the run in --out")
    add("--save-model", action="store_true", help="also write the model with its new gates")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--gates", type=Path, metavar="FILE", help="judge these instead of training")
    what.add_argument("--frontier", action="store_true", help="sweep the locality weights")
    what.add_argument("--speed", action="store_true", help="what the run in --out gains in time")
    add_show(parser)
    return parser


def _check(options: argparse.Namespace) -> None:
    """Refuse flags that mean nothing together."""
    for flag in ("resume", "speed"):
        if getattr(options, flag) and options.out is None:
            raise ConfigError(f"--{flag}: --out is missing: must be the folder of a run")
    if options.resume and options.gates is not None:
        raise ConfigError("--resume: only without --gates, with which nothing is trained")
    if options.save_model and (options.frontier or options.speed):
        raise ConfigError("--save-model: only without --frontier and --speed")


def _run(options: argparse.Namespace, folder: Path) -> None:
    from real.remoe_config import RemoeConfig
    from real.remoe_subject import load_gate_subject

    config = RemoeConfig.composed(options.overrides)
    subject = load_gate_subject(options.model, options.texts, options.held_out, config.plain)
    with steps_shown() as tell:
        if options.frontier:
            from real.remoe_frontier import run_frontier
            from real.remoe_report import print_frontier

            print_frontier(run_frontier(subject, config, folder, tell=tell, say=_say), folder)
        elif options.speed:
            from real.remoe_report import print_speed
            from real.remoe_speed import run_speed

            print_speed(run_speed(subject, config, folder, say=_say), folder)
        else:
            from real.remoe_report import print_run
            from real.remoe_run import judge_gates, read_gates, run_remoe, save_model

            if options.gates is not None:
                found = judge_gates(subject, options.gates, config, folder, say=_say)
            else:
                asked = {"resume": options.resume, "tell": tell, "say": _say}
                found = run_remoe(subject, config, folder, **asked)
            if options.save_model:
                save_model(subject, read_gates(folder, "remoe"), folder / "model")
            print_run(found, folder)


@contextmanager
def steps_shown() -> Iterator[Callable[[str, dict[str, float], int], None]]:
    """Give what shows the steps of training on stderr: a bar on a terminal, else a line now and then."""
    from sim.progress import step_bar

    with step_bar("steps") as watch:
        yield _lines() if watch is None else _bars(watch)


def _bars(watch: Callable[..., Callable[[], None]]) -> Callable[[str, dict[str, float], int], None]:
    bars: dict[str, Callable[[], None]] = {}

    def tell(arm: str, step: dict[str, float], total: int) -> None:
        if arm not in bars:
            bars[arm] = watch(total - int(step["step"]) + 1, f"steps of {arm}")
        bars[arm]()

    return tell


def _lines() -> Callable[[str, dict[str, float], int], None]:
    spoken = 0.0

    def tell(arm: str, step: dict[str, float], total: int) -> None:
        nonlocal spoken
        if time.monotonic() - spoken >= _SECONDS_BETWEEN_LINES or step["step"] == total:
            spoken = time.monotonic()
            _say(
                f"{arm}: step {step['step']} of {total}, cross entropy {step['ce']:.4f}, "
                f"EOR {step['overlap']:.3f}, {step['seconds']:.1f} s a step"
            )

    return tell


def _say(line: str) -> None:
    print(f"{PROGRAM}: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
