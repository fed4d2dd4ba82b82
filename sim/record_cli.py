"""``greenroom record``: of a model in this process, or, with ``--url``, of a running engine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from sim.command_line import Parser
from sim.types import ConfigError
from traces.record_prompts import UsageError

_PROGRAM = "greenroom record"
_KEY_VARIABLE = "GREENROOM_API_KEY"
_EXAMPLE = """\
The engine must run with --enable-return-routed-experts (vLLM also wants its V2 model runner). Example:

  greenroom record --url http://localhost:8000 --engine vllm --model qwen3_30b_a3b \\
      --prompts problems.txt --out qwen3.parquet

A line of a .jsonl file is a string, a list of token ids, or an object with 'prompt' (text), 'tokens'
(ids) or 'messages' (a chat); a line of another file is text. Finished requests are kept in FILE.partial
until all are there: the same command goes on where it was killed. A key that the server wants is read
from the environment variable GREENROOM_API_KEY."""


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    from sim.mistakes import complain

    try:
        if not of_an_engine(arguments):
            from traces import record_cli

            record_cli.run(record_cli.make_parser(Parser).parse_args(arguments))
            return 0
        options = make_parser().parse_args(arguments)
        rows = _record(options)
    except UsageError as error:
        return complain(_PROGRAM, ConfigError(" ".join(str(error).split())))
    except Exception as error:
        return complain(_PROGRAM, error)
    print(f"{options.out}: {rows} rows of {options.requests} requests")
    return 0


def of_an_engine(arguments: list[str]) -> bool:
    """Tell whether the arguments are to record a running engine, not a model in this process."""
    return any(word == "--url" or word.startswith("--url=") for word in arguments)


def make_parser() -> Parser:
    """Return what reads the arguments that go with ``--url``."""
    from sim.told_options import add_told_options

    parser = Parser(
        prog=_PROGRAM,
        description="Record the routed experts that a vLLM or SGLang server returns.",
        epilog=_EXAMPLE,
    )
    add = parser.add_argument
    add("--url", required=True, metavar="http://HOST:PORT", help="where the server listens")
    add("--engine", required=True, help="vllm or sglang")
    add(
        "--interface",
        metavar="NAME",
        help="vllm: completions (default), chat, tokens; sglang: native (default), completions, chat",
    )
    add("--prompts", required=True, type=Path, metavar="FILE", help="a prompt a line, or .jsonl")
    add("--out", required=True, type=Path, metavar="FILE.parquet", help="the trace to write")
    add("--requests", type=int, metavar="N", help="the first N prompts (default: all)")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="default: 256")
    add("--temperature", type=float, default=0.0, help="default: 0, greedy")
    add("--seed", type=int, help="of sampling (default: the engine's own)")
    add(
        "--extra",
        metavar="JSON",
        help="more sampling parameters, as the engine names them: '{\"top_p\": 0.95}'",
    )
    add("--concurrency", type=int, default=8, metavar="N", help="requests at a time (default: 8)")
    add("--timeout", type=float, default=600.0, metavar="S", help="of an answer (default: 600 s)")
    add("--retries", type=int, default=4, metavar="N", help="of what may pass (default: 4)")
    add("--no-text", action="store_true", help="do not ask the engine for the tokens' text")
    add_told_options(parser)
    return parser


def _record(options: argparse.Namespace) -> int:
    """Ask the engine, write the trace, and return its number of rows."""
    from sim.told_options import refuse_unused, told_from
    from traces.out_file import check_out
    from traces.record_cli import counted, progress
    from traces.record_http import HttpClient
    from traces.record_http_apis import Asked
    from traces.record_http_kept import forget
    from traces.record_http_run import record_http
    from traces.record_prompts import prompt_lines
    from traces.store import write_trace

    check_out(options.out)
    if options.requests is not None and options.requests < 1:
        raise ConfigError(f"--requests is {options.requests}: must be >= 1")
    asked = Asked(
        engine=options.engine,
        interface=options.interface,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        seed=options.seed,
        extra=_extra(options.extra),
    )
    key = os.environ.get(_KEY_VARIABLE) or None
    client = HttpClient(options.url, options.timeout, options.retries, key=key)
    refuse_unused(options, (), f"answers of {options.engine}")
    told = told_from(options)
    lines = prompt_lines(options.prompts, options.requests)
    prompts = [_prompt(value, where) for where, value in lines]
    options.requests = len(prompts)
    kept = options.out.with_name(f"{options.out.name}.partial")
    with progress(len(prompts)) as report:
        trace = record_http(
            client,
            prompts,
            asked,
            told,
            kept,
            concurrency=options.concurrency,
            text=not options.no_text,
            on_request=counted(report),
        )
    write_trace(options.out, trace)
    forget(kept)
    for note in trace.meta.notes:
        print(f"  {note}", file=sys.stderr)
    return len(trace)


def _extra(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra is {text}: is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--extra is {text}: must be a JSON object")
    return found


def _prompt(value: Any, where: str) -> str | list[int] | list[dict[str, Any]]:
    """Return a prompt of a file, if it is text, token ids or the messages of a chat."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        for kind in (int, dict):
            if all(type(item) is kind for item in value):
                return value
    raise ConfigError(f"{where} must be text, a list of token ids, or messages")
