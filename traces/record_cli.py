"""``greenroom record`` of a model in this process: let it generate, write the trace of its routing.

torch and transformers are imported only when a recording starts, so ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from traces.out_file import check_out
from traces.record_prompts import UsageError
from traces.record_subject import (
    DEFAULT_REQUESTS,
    LONGEST_REASON,
    Subject,
    load_subject,
    plain_errors,
)
from traces.trace import GATE_COLUMNS, TraceError

if TYPE_CHECKING:
    from traces.record import DroppedRows, Generation

PROGRAM = "greenroom record"
SECONDS_BETWEEN_LINES = 10.0
_EPILOG = """examples:
  greenroom record --model tiny --out mine.parquet --requests 4
  greenroom record --model ./Qwen3-30B-A3B --prompts questions.txt --out qwen3.parquet --gates-ahead 3
  greenroom record --url http://localhost:8000 --help       of a running vLLM or SGLang server

A line of a .jsonl file is a string, a list of token ids, or an object with 'prompt' (text) or 'tokens' (ids).
The trace goes to --out; greenroom stats mine.parquet and greenroom sim trace.path=mine.parquet read it."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(argv: list[str]) -> int:
    """Run the command; return 0, or 2 after one line on stderr about the user's mistake."""
    try:
        run(make_parser().parse_args(argv))
    except (UsageError, TraceError) as error:
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace) -> None:
    """Record, and say where the trace is; raises UsageError or TraceError for a user's mistake."""
    _check(options)
    rows = record(options)
    print(f"{options.out}: {rows} rows of {options.requests} requests")


def make_parser(kind: type[argparse.ArgumentParser] = _Parser) -> argparse.ArgumentParser:
    """Return what reads the command's arguments."""
    parser = kind(
        prog=PROGRAM,
        description="Record the router trace of a MoE model.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help="'tiny' (the chain-of-thought MoE shipped with Greenroom), a Hugging Face model "
        "folder, or a config.json (random weights)",
    )
    add("--out", required=True, type=Path, metavar="FILE.parquet", help="the trace to write")
    add("--requests", type=int, help=f"default: all of --prompts, else {DEFAULT_REQUESTS}")
    add("--prompts", type=Path, metavar="FILE", help="a prompt a line, or .jsonl, see below")
    add("--max-new-tokens", type=int, help="default: 640 for tiny, else 256")
    add("--temperature", type=float, help="0 is greedy (default: 1 for tiny, else 0)")
    add("--batch-size", type=int, default=8, help="default: 8")
    add("--seed", type=int, default=0, help="of sampling, random weights and tiny's problems")
    add("--logits", action="store_true", help="record the router logits too")
    add(
        "--gates-ahead",
        type=int,
        default=1,
        metavar="N",
        help="record what the gates of the next N MoE layers guess early (default: 1; at most 3)",
    )
    add(
        "--no-next-gate",
        action="store_const",
        dest="gates_ahead",
        const=0,
        help="the same as --gates-ahead 0",
    )
    add(
        "--continuous",
        action="store_true",
        help="continuous batching: requests join and leave the batch; steps are the engine's",
    )
    add(
        "--max-batch-tokens",
        type=int,
        metavar="N",
        help="with --continuous: tokens of a step at most; longer prompts are cut (default: 512)",
    )
    add("--scheduler", help="with --continuous: fifo (the default) or prefill_first")
    add("--threads", type=int, help="CPU threads (default: torch's own)")
    add("--device", default="cpu", help="torch device (default: cpu)")
    add("--licence", help="of the model and the prompts, for the header")
    return parser


def _check(options: argparse.Namespace) -> None:
    """Refuse, before anything heavy is loaded, what can be seen to be wrong."""
    for name in ("requests", "max_new_tokens", "batch_size", "threads", "max_batch_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {value}: must be >= 1")
    if not 0 <= options.gates_ahead <= len(GATE_COLUMNS):
        raise UsageError(
            f"--gates-ahead is {options.gates_ahead}: must be 0 to {len(GATE_COLUMNS)}"
        )
    for name in ("max_batch_tokens", "scheduler"):
        if getattr(options, name) is not None and not options.continuous:
            raise UsageError(f"--{name.replace('_', '-')} goes with --continuous")
    if options.device.partition(":")[0] == "meta":
        raise UsageError(f"--device is {options.device}: computes nothing: must be cpu, cuda, ...")
    if options.seed < 0:
        raise UsageError(f"--seed is {options.seed}: must be >= 0")
    check_out(options.out)
    if options.prompts is not None and not options.prompts.is_file():
        raise UsageError(f"--prompts is {options.prompts}: no such file")
    if options.model != "tiny" and not Path(options.model).exists():
        raise UsageError(
            f"--model is {options.model}: must be 'tiny', a folder or a .json file that exists"
        )


def record(options: argparse.Namespace) -> int:
    """Load the model, generate, and stream the trace to the file; return its number of rows."""
    with plain_errors():
        import torch

        from traces.record import DroppedRows, Generation

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with plain_errors():
        subject = load_subject(options)
    options.requests = len(subject.prompts)
    generation = Generation(
        max_new_tokens=options.max_new_tokens or subject.max_new_tokens,
        temperature=subject.temperature if options.temperature is None else options.temperature,
        seed=options.seed,
        batch_size=options.batch_size,
        eos=subject.eos,
    )
    dropped = DroppedRows()
    with progress(len(subject.prompts)) as report, _running_errors(options.device):
        rows = _write(options, subject, generation, dropped, report)
    for note in dropped.notes():
        print(f"{PROGRAM}: {note}", file=sys.stderr)
    return rows


def _write(
    options: argparse.Namespace,
    subject: Subject,
    generation: Generation,
    dropped: DroppedRows,
    report: Callable[[int, int], None],
) -> int:
    """Generate, write the pieces of the trace as they come, and return the number of rows."""
    from traces.record import record_batches
    from traces.record_continuous import Scheduling, record_continuous
    from traces.store import TraceWriter

    common: dict[str, Any] = {
        "annotation": subject.annotation,
        "logits": options.logits,
        "gates_ahead": options.gates_ahead,
        "dropped": dropped,
        **subject.described,
    }
    rows = 0
    if options.continuous:
        chosen = {
            name: getattr(options, name)
            for name in ("max_batch_tokens", "scheduler")
            if getattr(options, name) is not None
        }
        common["on_request"] = counted(report)
        pieces = record_continuous(
            subject.model, subject.prompts, generation, Scheduling(**chosen), **common
        )
    else:
        pieces = record_batches(subject.model, subject.prompts, generation, **common)
    first = next(pieces)
    with closing(pieces), TraceWriter(options.out, first.meta) as writer:
        for piece in chain([first], pieces):
            writer.append(piece)
            rows += len(piece)
            if not options.continuous:
                report(piece.num_requests, rows)
    return rows


@contextmanager
def _running_errors(device: str) -> Iterator[None]:
    """Turn what torch raises while the model runs, out of memory say, into one line for the user."""
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:LONGEST_REASON]
        raise UsageError(f"the model cannot run on {device}: {reason}") from error


@contextmanager
def progress(total: int) -> Iterator[Callable[[int, int], None]]:
    """Show progress on stderr: a bar on a terminal, else a line now and then.

    Yields a function that is told how many more requests are done, and the rows so far.
    """
    if not sys.stderr.isatty():
        yield _lines(total)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("recording", total=total)
        yield lambda requests, _rows: bar.advance(task, requests)


def _lines(total: int) -> Callable[[int, int], None]:
    done, spoken = 0, time.monotonic()

    def report(requests: int, rows: int) -> None:
        nonlocal done, spoken
        done += requests
        if time.monotonic() - spoken >= SECONDS_BETWEEN_LINES or done == total:
            spoken = time.monotonic()
            print(f"{PROGRAM}: {done} of {total} requests, {rows} rows", file=sys.stderr)

    return report


def counted(report: Callable[[int, int], None]) -> Callable[[int], None]:
    """Return what is told the rows of each finished request, and reports their sum."""
    rows = 0

    def on_request(num_rows: int) -> None:
        nonlocal rows
        rows += num_rows
        report(1, rows)

    return on_request


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
