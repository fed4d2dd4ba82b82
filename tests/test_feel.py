"""How commands feel: near words in mistakes, help whose examples work, quiet in pipes, no traceback."""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sim.cli import _PURPOSES, COMMANDS, main
from sim.completion_shapes import parsers
from sim.near_files import near_file, with_near_file

REPO = Path(__file__).parents[1]
KEYS = [*COMMANDS, "model from-config", "model from-gguf", "model from-safetensors", "record --url"]
ESCAPE = "\x1b"


def greenroom(
    line: str, cwd: Path, *, columns: str = "200", **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a line of a shell, in which ``greenroom`` is the command under test."""
    environment = {**os.environ, "PYTHONPATH": str(REPO), "COLUMNS": columns, **more}
    for name in ("NO_COLOR", "FORCE_COLOR", "HYDRA_FULL_ERROR"):
        if name not in more:
            environment.pop(name, None)
    command = f'greenroom() {{ {shlex.quote(sys.executable)} -m sim.cli "$@"; }}; {line}'
    return subprocess.run(
        ["bash", "-c", command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with some files, whose names mistakes come near to."""
    for name in ("mine.parquet", "rows.csv", "prompts.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "my_conf" / "policy").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have mistakes told in a line, whoever runs the tests."""
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


# -- mistakes --------------------------------------------------------------------------------------

NEAR = [
    # commands, options, choices
    ("simm", "command = simm: no such command; did you mean 'sim'?"),
    ("swepe", "did you mean 'sweep'?"),
    ("stats --phse decode", "--phse: no such option; did you mean '--phase'?"),
    ("stats --phase decod", "--phase = decod: must be all, prefill or decode; did you mean 'decode'?"),
    ("generate --modle tiny", "--modle: no such option; did you mean '--model'?"),
    ("generate --tier storag", "did you mean 'storage'?"),
    ("replay --confg-dir x", "did you mean '--config-dir'?"),
    ("validate --minuts 3", "did you mean '--minutes'?"),
    ("measure --quik", "did you mean '--quick'?"),
    ("measure --dtypes float23", "did you mean 'float32'?"),
    ("remoe --frontir", "did you mean '--frontier'?"),
    ("record --modle tiny", "did you mean '--model'?"),
    ("record --url http://x --engin vllm --promts x --out a.parquet", "did you mean '--prompts'?"),
    ("import --licens x", "did you mean '--licence'?"),
    ("export --ot x", "did you mean '--out'?"),
    ("synth --request 3 --raank 2", "--raank: no such option; did you mean '--rank'?"),
    ("calibrate --machne x", "did you mean '--machine'?"),
    ("published --onyl 1", "did you mean '--only'?"),
    ("advise --quality-flor 3", "did you mean '--quality-floor'?"),
    ("model from-gguf x --quat Q4_0", "did you mean '--quant'?"),
    ("machines --config-dri x", "did you mean '--config-dir'?"),
    ("stages --tolerence 3", "did you mean '--tolerance'?"),
    ("plot --formt png", "did you mean '--format'?"),
    ("report x --basline lru", "did you mean '--baseline'?"),
    ("completion zhs", "did you mean 'zsh'?"),
    ("sweep --reusme x", "did you mean '--resume'?"),
    ("sim --multrun", "did you mean '--multirun'?"),
    ("sim --info plugin", "did you mean 'plugins'?"),
    # names of a catalogue
    ("policies seam", "did you mean 'saem'?"),
    ("policies lru_sizd", "did you mean 'lru_sized'?"),
    ("machines rtx409", "did you mean 'rtx4090'?"),
    ("model qwen3_30b_a3", "did you mean 'qwen3_30b_a3b'?"),
    ("import finemeo x", "did you mean 'finemoe'?"),
    ("export moe-policylan tiny", "did you mean 'moe-policylang'?"),
    ("calibrate publised", "did you mean 'published'?"),
    ("stats tinny", "did you mean 'tiny'?"),
    ("stages --only drfit", "did you mean 'drift'?"),
    ("plot docs/validation leage", "did you mean"),
    # groups, options, keys, parameters
    ("sim polciy=lru", "polciy: unknown key; did you mean 'policy'?"),
    ("sim policy=lrv", "did you mean 'lru'?"),
    ("sim cache.ratoi=0.5", "did you mean 'cache.ratio'?"),
    ("sim policy=lfu policy.cache.deacy=1", "did you mean 'policy.cache.decay'?"),
    ("sim lru", "lru: must be GROUP=OPTION or KEY=VALUE; did you mean 'policy=lru'?"),
    ("sim --cfg job -p polcy", "did you mean 'policy'?"),
    ("sweep machin=rtx4090", "did you mean 'machine'?"),
    ("sweep cache.ratoi=0.5,0.6", "did you mean 'cache.ratio'?"),
    ("replay real.teir=ram", "did you mean 'real.tier'?"),
    ("replay real.tier=rma", "did you mean 'ram'?"),
    ("predict placement.cpu_layer=3", "did you mean 'placement.cpu_layers'?"),
    ("predict machine=rtx409", "did you mean 'rtx4090'?"),
    ("advise model=mixtral_8x7", "did you mean 'mixtral_8x7b'?"),
    ("remoe loss.resue=1", "did you mean 'loss.reuse'?"),
    ("validate step=3", "did you mean 'steps'?"),
    ("check-policy lrru", "did you mean 'lru'?"),
    ("generate policy=seam", "did you mean 'saem'?"),
    # files
    ("stats mine.parqet", "mine.parqet: no such file; did you mean 'mine.parquet'?"),
    ("sim trace.path=mien.parquet", "did you mean 'mine.parquet'?"),
    ("import finemoe mine.parqet", "did you mean 'mine.parquet'?"),
    ("generate --prompts promts.txt", "did you mean 'prompts.txt'?"),
    ("record --model tiny --out x.parquet --prompts promts.txt", "did you mean 'prompts.txt'?"),
    ("published --rows row.csv", "did you mean 'rows.csv'?"),
    ("sim --config-dir my_cnf", "did you mean 'my_conf'?"),
    ("machines --config-dir my_cnf", "did you mean 'my_conf'?"),
    ("synth --out my_cnf/x.parquet", "did you mean 'my_conf'?"),
    ("model from-gguf mine.parqet", "did you mean 'mine.parquet'?"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), NEAR, ids=lambda x: x[:40])
def test_a_mistake_is_one_line_with_the_nearest_word(
    line: str, message: str, desk: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if line.startswith("plot docs"):
        monkeypatch.chdir(REPO)
        line = "plot docs/validation/xeon_2_cores leage"
    words = line.split(" ")
    if words[0] in ("generate", "replay", "measure", "remoe", "validate"):
        pytest.importorskip("torch")
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1, shown.err
    assert re.match(rf"greenroom( {words[0]}[\w -]*)?: error: ", shown.err), shown.err
    assert message in shown.err


def test_every_command_has_a_line_in_the_table_of_near_words() -> None:
    assert set(COMMANDS) == {line.partition(" ")[0] for line, _ in NEAR} - {"simm", "swepe"}


WRONG = [
    ("stats --curve-tokens", "--curve-tokens: must be followed by a value"),
    ("stats --curve-tokens x", "--curve-tokens = x: must be a whole number"),
    ("stats --curve-tokens 99999999999999999999", "must be a whole number of a sensible size"),
    ("advise --quality-floor nan", "--quality-floor = nan: must be a number of a sensible size"),
    ("advise --quality-floor 1e400", "must be a number of a sensible size"),
    ("stats --phase=", "--phase: must not be empty"),
    ("stats tiny tiny", "tiny: is one argument too many"),
    ("record --model tiny", "--out: missing, must be given"),
    ("sim policy=[lru", "policy=[lru: cannot be read"),
    ("sim -sc install=bash", "greenroom completion does it"),
    ("predict -p model", "--package: only with --cfg job"),
    ("validate cache.ratio=inf", "cache.ratio = inf: must be a number in [0, 1]"),
]


@pytest.mark.parametrize(("line", "message"), WRONG, ids=lambda x: x[:40])
def test_what_is_wrong_is_said_in_one_line(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if line.startswith("validate"):
        pytest.importorskip("torch")
    assert main(line.split(" ")) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1), shown.err
    assert message in shown.err


BROKEN = {
    "empty": b"",
    "cut": b"PAR1\x15\x04",
    "binary": bytes(range(256)) * 4,
    "nul": b"\x00" * 64,
    "yaml": b"- [1, 2\n",
}
READING = [
    "stats {}", "sim trace.path={}", "export moe-policylang {}", "synth --like {}",
    "synth --fit {} --out o.parquet",
    "published --rows {}", "calibrate {}", "calibrate microbench --rows {}", "predict --trace {}",
    "predict --errors {}", "advise --simulate --sim-trace {}", "model from-config {}", "model from-gguf {}",
    "model from-safetensors {}", "check-policy {}", "sim --config-dir {}", "report {}", "plot {}",
    "sim workload.arrivals={}", "stages trace.path={}", "import finemoe {} --out o.parquet",
    "sweep --resume {}",
    "sweep sweep.search=list sweep.list={}",
]  # fmt: skip
COMPOSING = ("sim", "sweep", "predict", "stages")
"""Compose a configuration before they read: with few files only, for the sake of time."""


@pytest.mark.parametrize("line", READING, ids=lambda line: line[:40])
def test_a_file_that_is_none_of_its_kind_is_a_line_and_no_traceback(
    line: str, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suffix = ".yaml" if "check-policy" in line or line == "calibrate {}" else ".csv"
    names = ("binary",) if line.startswith(COMPOSING) else BROKEN
    places = [desk / f"{name}{suffix}" for name in names]
    for place in places:
        place.write_bytes(BROKEN[place.stem])
    if "--config-dir" not in line:  # where an empty folder is one of options
        places.append(desk / f"folder{suffix}")
        places[-1].mkdir()
    for place in places:
        code = main(line.format(place.name).split(" "))
        shown = capsys.readouterr()
        assert code == 2, (place.name, shown)
        assert shown.err.startswith("greenroom "), (place.name, shown.err)
        assert "Traceback" not in shown.err
        assert "a defect" not in shown.err, (place.name, shown.err)


ODD_SETTINGS = [
    "cache=3", "cache=null", "~cache", "~policy", "trace.path=null", "trace.path=3", "~trace.path",
    "policy.cache=null", "policy.cache._target_=3", "machine=3", "machine.gpu=null", "cache.ratio=nan",
    "cache.ratio=${x}", "model.num_layers=0", "workload.requests=[5,1]", "cache.ratio=[1]", "=", "a", "'",
    "policy=lru policy=lfu", "hydra.searchpath=3",
]  # fmt: skip


ODD = [
    ("check-policy lru", ODD_SETTINGS[::3]),
    ("stages --only cues workload.requests=[24,25]", ODD_SETTINGS[2::6]),
    ("machines rtx4090", ODD_SETTINGS[1::3]),
    ("predict", ODD_SETTINGS[2::3]),
]


@pytest.mark.parametrize(("command", "settings"), ODD, ids=[command[:8] for command, _ in ODD])
def test_odd_settings_are_refused_in_a_line(
    command: str, settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    refused = 0
    for setting in settings:
        code = main([*command.split(" "), *setting.split(" ")])
        shown = capsys.readouterr()
        assert code in (0, 2), (setting, shown)
        assert (code == 2) == shown.err.startswith(f"greenroom {command.split(' ')[0]}: error: ")
        refused += code == 2
    assert refused >= 2


def test_arguments_that_are_no_utf8_are_refused(tmp_path: Path) -> None:
    done = greenroom(r"greenroom sim $'policy=\xff'", tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "must be UTF-8" in done.stderr


def test_a_working_folder_that_has_gone_is_said(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    done = greenroom("cd gone; rmdir ../gone; greenroom stats", tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("greenroom") == 1
    assert "Traceback" not in done.stderr


def test_near_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "trace.parquet").write_text("")
    assert near_file("data/trace.parqet") == "data/trace.parquet"
    assert near_file("dat/trace.parquet") == "data/trace.parquet"
    assert near_file("dat/other.parquet") == "data"
    assert near_file("nothing_alike") is None
    assert near_file(str(tmp_path / "dta")) == str(tmp_path / "data")
    assert with_near_file("--out dta: no such folder").endswith("; did you mean 'data'?")
    assert with_near_file("x: no such folder: dta/y").endswith("; did you mean 'data'?")
    assert (
        with_near_file("a.b = dta: no such file") == "a.b = dta: no such file; did you mean 'data'?"
    )
    for other in ("dta: is wrong", "dta: no such file; did you mean 'x'?", "zzz: no such file"):
        assert with_near_file(other) == other


# -- help ------------------------------------------------------------------------------------------


def help_of(key: str) -> str:
    if key == "sim":
        return (REPO / "conf" / "config.yaml").read_text()
    return parsers(key)[0].format_help()


def examples_of(key: str) -> list[list[str]]:
    """Return the lines of a help that run Greenroom, joined where they go on, without what they say."""
    text = re.sub(r"\s*\\\n\s*", " ", help_of(key))
    found = []
    for line in text.splitlines():
        if line.startswith((" ", "$")) and re.match(r"\s*(eval \"\$\()?greenroom \S", line):
            words = re.sub(r"\s{2,}\S.*", "", re.sub(r"\s#.*", "", line.strip().replace("\\", " ")))
            words = re.sub(r' [|>] .*|^eval "\$\(|\)"$', "", words.strip())
            found.append(shlex.split(re.sub(r"\s+", " ", words))[1:])
    return found


@pytest.mark.parametrize("key", KEYS)
def test_help_says_what_with_examples_and_where_results_go(key: str) -> None:
    text = help_of(key)
    assert re.search("examples?:", text, re.IGNORECASE)
    assert len(examples_of(key)) >= (1 if " " in key else 2)
    assert re.search(
        r"--out|standard output|Results: |sweep\.dir|trace to write|no network|exit code", text
    )


@pytest.mark.parametrize("key", KEYS)
def test_every_example_of_a_help_is_one_that_its_command_reads(key: str) -> None:
    seen = 0
    for name, *words in examples_of(key):
        assert name in COMMANDS
        if name == "sim":
            from sim.run_flags import flags_first

            assert flags_first(words)
        elif "--help" not in words:
            variant = words[0] if name == "model" and words and words[0].startswith("from-") else ""
            url = "--url" if name == "record" and "--url" in words else ""
            parser = parsers(f"{name} {variant}{url}".strip())[0]
            parser.parse_intermixed_args(words[1:] if variant else words)
        seen += 1
    assert seen


COMPOSED = {"sim": "config", "predict": "predict", "advise": "predict", "replay": "replay"}


@pytest.mark.parametrize("key", COMPOSED)
def test_the_settings_of_examples_compose(key: str) -> None:
    from sim.composing import compose_config

    tried: list[list[str]] = []
    for _, *words in examples_of(key):
        if "--config-dir" in words or "-m" in words:
            continue
        kept = [
            word
            for before, word in zip(["", *words], words, strict=False)
            if "=" in word and not word.startswith("-") and before not in ("--compare", "--quant")
        ]
        assert kept in tried or compose_config(COMPOSED[key], kept)
        tried.append(kept)
    assert tried


def code_of(words: list[str]) -> int:
    """Return the exit code of a command, which Hydra, and argparse after --help, give by an exception."""
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()  # of an earlier test of this process
    try:
        return main(words)
    except SystemExit as ended:
        return int(ended.code or 0)


CHEAP = [
    "policies saem", "machines rtx4090", "machines gpu/h100_sxm", "model qwen3_30b_a3b", "calibrate",
    "machines rtx4090 machine/gpu=rtx3090 machine.cpu.threads_used=4", "published --only 1,5,15",
    "plot --list", "sim policy=saem --cfg job -p policy", "completion fish",
    "predict model=gpt_oss_120b machine=rtx4090 placement.cpu_layers=24",
    "predict --quant Q4_K_M placement.cpu_layers=20",
]  # fmt: skip


@pytest.mark.parametrize("line", CHEAP)
def test_cheap_examples_of_help_run(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    key = line.partition(" ")[0]
    assert line.split(" ") in examples_of(key), "is in the help"
    code = code_of(line.split(" "))
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert shown.out
    assert shown.err == ""


def test_the_help_of_all_commands_groups_them_and_begins_with_three(
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = [name for names in _PURPOSES.values() for name in names]
    assert sorted(named) == sorted(COMMANDS)
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for purpose in _PURPOSES:
        assert f"\n{purpose}:\n" in text
    first = re.findall(r"^  greenroom (\w+) (.*?)   ", text, re.MULTILINE)
    assert [name for name, _ in first] == ["sim", "sweep", "predict"]


CFG = [("replay", "real"), ("sweep", "sweep"), ("predict", "placement"), ("sim", "policy.cache")]


@pytest.mark.parametrize(("command", "package"), CFG)
def test_cfg_job_shows_settings_and_runs_nothing(
    command: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    import yaml

    monkeypatch.chdir(tmp_path)
    shown = []
    for more in ([], ["-p", package]):
        assert code_of([command, "machine=gh200", "--cfg", "job", *more]) == 0
        shown.append(yaml.safe_load(capsys.readouterr().out))
    found = shown[0]
    assert found["machine"]["name"] == "gh200"
    assert "hydra" not in found
    for part in package.split("."):
        found = found[part]
    assert shown[1] == found
    assert list(tmp_path.iterdir()) == []


# -- terminals and pipes ---------------------------------------------------------------------------

TABLES = [
    "policies", "machines", "model", "predict", "machines gpu/rtx4090",
    "stages workload.requests=[24,25] --only cues",
    "sim workload.requests=[24,25] output.belady=false hydra.run.dir=run",
]  # fmt: skip


def on_terminal(line: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what a command shows where all it writes goes to a terminal."""
    ours, theirs = pty.openpty()
    seen: list[bytes] = []

    def listen() -> None:
        while select.select([ours], [], [], 60.0)[0]:
            try:
                seen.append(os.read(ours, 65536))
            except OSError:  # Linux: the other end is closed
                break

    reader = threading.Thread(target=listen)
    reader.start()
    try:
        with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", terminal)
            patch.setattr(sys, "stderr", terminal)
            code = code_of(line.split(" "))
    finally:
        reader.join()
        os.close(ours)
    shown = b"".join(seen).decode()
    assert code == 0, shown
    return shown


@pytest.fixture
def colourful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A folder to work in, and a terminal that colours are welcome on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("line", TABLES)
def test_tables_have_colours_on_a_terminal_and_none_in_a_pipe(
    line: str, colourful: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ESCAPE in on_terminal(line, colourful)
    assert capsys.readouterr() == ("", ""), "all went to the terminal"
    colourful.setenv("FORCE_COLOR", "1")
    assert code_of(line.split(" ")) == 0
    piped = capsys.readouterr()
    assert ESCAPE not in piped.out
    assert "\r" not in piped.out
    assert piped.err == "", "nothing but results, and those on stdout"


@pytest.mark.parametrize("name", ["NO_COLOR", "TERM"])
def test_who_wants_no_colours_gets_none(name: str, colourful: pytest.MonkeyPatch) -> None:
    colourful.setenv(name, "dumb")
    for line in ("machines gpu/rtx4090", "predict"):
        assert ESCAPE not in on_terminal(line, colourful), line


def test_a_narrow_terminal_cuts_no_cell(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table

    from sim.screen import screen

    table = Table()
    table.add_column("name", no_wrap=True)
    table.add_column("prose")
    table.add_row("n" * 50, "words that may be broken " * 3)
    console = screen(40)
    console.print(table)
    lines = capsys.readouterr().out.splitlines()
    assert any("n" * 50 in line for line in lines)
    assert {len(line) for line in lines} == {50 + len("broken") + 7}, "no wider than it must be"
    console.print("plain " * 20)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40, "as before"


def test_a_reader_that_stops_early_ends_a_command_without_a_word(tmp_path: Path) -> None:
    run = "sim workload.requests=[24,25] output.belady=false hydra.run.dir=run"
    lines = ["stats --help", "policies", "sim --help", run]
    tried = "; ".join(  # the pipe breaks at the end, or on the way
        f"PYTHONUNBUFFERED={unbuffered} greenroom {line} | head -1 >/dev/null; echo ${{PIPESTATUS[0]}}"
        for line, unbuffered in zip(lines, ("1", "1", "", "1"), strict=True)
    )
    done = greenroom(tried, tmp_path)
    assert done.stderr == ""
    assert done.stdout.split() == ["0"] * len(lines)
    assert (tmp_path / "run" / "summary.json").is_file()


def test_closed_streams_are_no_mistake(tmp_path: Path) -> None:
    done = greenroom("greenroom policies lru >&-; echo $?; greenroom nope 2>&-; echo $?", tmp_path)
    assert done.stdout.split() == ["0", "2"]
    assert done.stderr == ""


@pytest.mark.parametrize("line", ["policies lru", "stats --help", "predict"])
def test_a_full_disk_is_said_once_and_in_the_exit_code(line: str, tmp_path: Path) -> None:
    unbuffered = "" if line == "policies lru" else "1"  # found out at the end, or on the way
    done = greenroom(
        f"(ulimit -f 0; greenroom {line} > file; exit $?)", tmp_path,
        PYTHONUNBUFFERED=unbuffered, PYTHONDONTWRITEBYTECODE="1",
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "cannot be written: File too large" in done.stderr


def test_the_last_line_says_where_the_output_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = {
        "sim workload.requests=[24,25] output.belady=false hydra.run.dir=a": "^Results: .*/a$",
        "published --only 1 --out b": r"^Table: b/published\.csv$",
        "export moe-policylang tiny --out d.parquet": r"^d\.parquet: ",
        "model from-config . --out e.yaml": r"^e\.yaml: ",
    }
    config = {"model_type": "olmoe", "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2,
              "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4,
              "num_key_value_heads": 4, "vocab_size": 100}  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for line, wanted in lines.items():
        code = code_of(line.split(" "))
        shown = capsys.readouterr()
        assert code == 0, shown.err
        assert re.search(wanted, shown.out.rstrip().splitlines()[-1]), (line, shown.out[-300:])


def test_a_command_leaves_nothing_behind_for_the_next_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    assert main(["sim", "policy=lrv"]) == 2
    assert code_of(["sim", "--cfg", "job", "-p", "policy"]) == 0, "of the mistake before"
    assert dict(os.environ) == before


def test_parsers_are_all_of_the_kind_that_speaks_in_one_line() -> None:
    from sim.command_line import Parser

    for key in KEYS:
        if key != "sim":
            made = parsers(key)[0]
            assert isinstance(made, Parser), key
            assert isinstance(made, argparse.ArgumentParser)
