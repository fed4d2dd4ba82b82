"""Completion: what is offered is what commands take, in the three shells as they are."""

from __future__ import annotations

import argparse
import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sim.cli import COMMANDS
from sim.completion import main, split
from sim.completion_conf import Conf
from sim.completion_shapes import parsers, shape_of
from sim.completion_words import Candidate, candidates
from sim.composing import compose_config
from sim.config_groups import GROUPS
from sim.results import flatten

REPO = Path(__file__).parents[1]
BREAKS = " \t\n\"'@><=;|&(:"
"""COMP_WORDBREAKS of a bash that nobody changed."""
KEYS = [*COMMANDS, "model from-config", "model from-gguf", "model from-safetensors", "record --url"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path_factory.getbasetemp() / "completion-cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))


def texts(line: str) -> list[str]:
    """Return what is offered at the end of a line without quotes."""
    *words, current = line.split(" ")
    return [each.text for each in candidates(words, current)]


# -- nothing is forgotten --------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS)
def test_every_option_of_a_commands_help_is_offered(key: str) -> None:
    wanted = {
        flag
        for parser in parsers(key)
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        for flag in action.option_strings
        if flag.startswith("--")
    }
    assert len(wanted) > 1 or key in ("policies", "model", "check-policy", "export", "completion")
    line = "record --url x --" if key == "record --url" else f"{key} --"
    assert wanted <= {*texts(line), "--url"}


def test_an_option_that_a_command_gains_is_offered_although_shapes_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = tmp_path / "greenroom" / "completion.json"
    shape_of("stats", [])
    first = json.loads(kept.read_text())
    first["shapes"]["stats"]["options"] = []
    kept.write_text(json.dumps(first))
    assert shape_of("stats", []).options == [], "read from the file"
    first["stamp"] = "of other sources"
    kept.write_text(json.dumps(first))
    assert "--phase" in texts("stats --")


def test_without_a_place_to_keep_anything_completion_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "--phase" in texts("stats --")


def test_every_command_is_offered_with_what_it_is_for() -> None:
    assert {each.text: each.about for each in candidates([], "")} == {
        name: about for name, (_, about) in COMMANDS.items()
    }
    assert texts("--v") == ["--version"]
    assert texts("nonsense --") == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, []) for name in GROUPS),
        ("config", ["policy=saem", "stages@policy.stages=drift", "machine/gpu=rtx3090"]),
        ("config", ["+experiment=phone"]),
        ("predict", ["machine=gh200", "placement=offload"]),
        ("replay", ["policy=lfu", "engine=fused"]),
    ],
)
def test_keys_are_those_that_hydra_composes(name: str, words: list[str]) -> None:
    ours = Conf().compose(name, words).values
    ours.pop("hydra", None)
    theirs = compose_config(name, words, resolve=False)
    assert flatten(ours) == flatten(theirs)


def test_every_policy_composes_with_the_keys_that_hydra_gives_it() -> None:
    for name in Conf().options("policy")[::24]:
        words = [f"policy={name}"]
        ours = Conf().compose("config", words).values["policy"]
        assert flatten(ours) == flatten(compose_config("config", words, resolve=False)["policy"])


# -- what is offered -------------------------------------------------------------------------------

OFFERED = [
    ("sim pol", ["policy=", "policy."]),
    ("sim machine/g", ["machine/gpu="]),
    ("sim machine/gpu=rtx309", ["machine/gpu=rtx3090"]),
    ("sim policy=lru,saem_dr", ["policy=lru,saem_drift"]),
    ("sim policy=lfu_decay,lfu_decay", ["policy=lfu_decay,lfu_decay_bypass"]),
    ("sim policy=saem sta", ["stages@policy.stages="]),
    ("sim policy=lru sta", []),
    ("sim policy=saem stages@policy.stages=dr", ["stages@policy.stages=drift"]),
    ("sim cache.ra", ["cache.ratio="]),
    ("sim policy=lfu policy.cache.de", ["policy.cache.decay="]),
    ("sim policy=lfu,saem policy.cache.me", ["policy.cache.memory="]),
    ("sim ~cache.ra", ["~cache.ratio"]),
    ("sim +exp", ["+experiment="]),
    ("sim +experiment=saem_a", ["+experiment=saem_ablation"]),
    ("sim output.events=", ["output.events=true", "output.events=false"]),
    ("sim workload.expert_order=i", ["workload.expert_order=index"]),
    ("sim cache.prefetch_limit=", ["cache.prefetch_limit=2"]),
    ("sim output.baseline=saem_dr", ["output.baseline=saem_drift"]),
    ("sim --cfg j", ["job"]),
    ("sim -p policy.ca", ["policy.cache"]),
    ("sim --shell", []),
    ("sim hydra.run.d", ["hydra.run.dir="]),
    ("sim policy.cache.decay=0.9 machine.gpu.source", []),
    ("sweep sweep=sl", ["sweep=slurm"]),
    ("sweep sweep.search=l", ["sweep.search=list", "sweep.search=lhs"]),
    ("replay real.tier=l", ["real.tier=link"]),
    ("predict placement.cpu_l", ["placement.cpu_layers="]),
    ("remoe loss.reu", ["loss.reuse="]),
    ("generate --tier ", ["ram", "storage"]),
    ("generate --tier=s", ["--tier=storage"]),
    ("validate --policies lru,saem_dr", ["lru,saem_drift"]),
    ("advise --quant Q8_0,Q4_K_M", ["Q8_0,Q4_K_M"]),
    ("stats --phase de", ["decode"]),
    ("import finem", ["finemoe"]),
    ("export moe-p", ["moe-policylang"]),
    ("policies saem_dr", ["saem_drift"]),
    ("machines gpu/rtx309", ["gpu/rtx3090"]),
    ("model from-g", ["from-gguf"]),
    ("model qwen3_30", ["qwen3_30b_a3b"]),
    ("calibrate pub", ["published"]),
    ("stages --only cues,dr", ["cues,drift"]),
    ("record --url x --eng", ["--engine"]),
    ("record --ur", ["--url"]),
    ("plot some/folder leag", ["league"]),
    ("completion f", ["fish"]),
    ("stats --phase decode --pha", []),
]  # fmt: skip


@pytest.mark.parametrize(("line", "wanted"), OFFERED)
def test_what_is_offered(line: str, wanted: list[str]) -> None:
    assert texts(line) == wanted


def test_options_of_folders_of_ones_own_are_offered_with_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine" / "policy").mkdir(parents=True)
    (tmp_path / "mine" / "policy" / "zebra.yaml").write_text(
        "# Stripes, after all.\nname: zebra\nscope: layer\ncache:\n  stripes: 3\n"
    )
    monkeypatch.chdir(tmp_path)
    zebra = [Candidate("policy=zebra", "Stripes, after all.")]
    for given in (["--config-dir", "mine"], ["--config-dir=mine"], ["hydra.searchpath=[mine]"]):
        assert candidates(["sim", *given], "policy=ze") == zebra
    assert texts("sim --config-dir mine policy=zebra policy.cache.") == ["policy.cache.stripes="]
    assert texts("sim policy=ze") == []


def test_files_are_offered_where_files_are_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "more").mkdir()
    for name in ("mine.parquet", "more/deep.parquet", ".hidden"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    assert candidates(["stats"], "m") == [
        Candidate("mine.parquet"),
        Candidate("more/", is_whole=False),
    ]
    assert texts("sim trace.path=mi") == ["trace.path=mine.parquet"]
    assert texts("import finemoe more/") == ["more/deep.parquet"]
    assert texts("stats --out ") == ["more/"], "a folder is due"
    assert texts("stats .h") == [".hidden"]
    assert texts("stats nowhere/x") == []
    monkeypatch.setenv("HOME", str(tmp_path))
    assert texts("stats ~/mi") == ["~/mine.parquet"]


def test_nothing_is_offered_where_any_text_may_stand() -> None:
    assert texts("generate --licence ") == []
    assert texts("stats --curve-tokens ") == []


# -- what bash gets --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words", "current", "quote"),
    [
        ("greenroom sim po", ["greenroom", "sim"], "po", ""),
        ("greenroom sim ", ["greenroom", "sim"], "", ""),
        ('greenroom stats "my tr', ["greenroom", "stats"], "my tr", '"'),
        ("greenroom stats my\\ tr", ["greenroom", "stats"], "my tr", ""),
        ("greenroom sim 'a b'=c d", ["greenroom", "sim", "a b=c"], "d", ""),
    ],
)
def test_a_line_is_split_as_a_shell_does(
    line: str, words: list[str], current: str, quote: str
) -> None:
    cut = split(line)
    assert (cut.words, cut.current, cut.quote) == (words, current, quote)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("greenroom sim policy=saem_dr", ["saem_drift "]),
        ("greenroom sim policy=lru,saem_dr", ["lru,saem_drift "]),
        ("greenroom sim policy=saem stages@pol", ["@policy.stages="]),
        ("greenroom sim policy=saem stages@policy.stages=dri", ["drift "]),
        ("greenroom sim cache.ra", ["cache.ratio="]),
        ("greenroom stats my", ["my\\ trace.parquet "]),
        ("greenroom stats my\\ t", ["my\\ trace.parquet "]),
        ('greenroom stats "my t', ['my trace.parquet" ']),
        ("greenroom sim trace.path=my", ["my\\ trace.parquet "]),
    ],
)
def test_bash_gets_what_follows_its_last_break(
    line: str, wanted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "my trace.parquet").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["--at-cursor", "bash", line, BREAKS]) == 0
    assert capsys.readouterr().out.splitlines() == wanted


def test_whatever_is_typed_completion_never_complains(capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("sim policy=[", "sim =", "sim ++", "sim policy..", "stats --=", "sim 'x", "sim ~"):
        main(["--at-cursor", "bash", f"greenroom {line}", BREAKS])
        main(["--at-cursor", "fish", *line.split(" ")])
    main(["--at-cursor"])
    assert capsys.readouterr().err == ""


# -- the command -----------------------------------------------------------------------------------


def test_without_a_shell_it_says_how_to_install_for_the_one_in_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/zsh")
    assert main([]) == 0
    told = capsys.readouterr().out
    assert 'eval "$(greenroom completion zsh)"' in told
    assert "bash" not in told
    monkeypatch.setenv("SHELL", "/bin/odd")
    assert main([]) == 0
    told = capsys.readouterr().out
    assert all(f"greenroom completion {shell}" in told for shell in ("bash", "zsh", "fish"))


def test_a_shell_there_is_not_is_named_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bahs"]) == 2
    assert "did you mean 'bash'?" in capsys.readouterr().err


def test_completing_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from sim.cli import main\n"
        "main(['completion', '--at-cursor', 'bash', 'greenroom sim policy=sa', ''])\n"
        "main(['completion', '--at-cursor', 'bash', 'greenroom sim policy=sa', ''])\n"
        "found = [m for m in ('numpy', 'hydra', 'omegaconf', 'rich', 'torch') if m in sys.modules]\n"
        "print(found, file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO), "XDG_CACHE_HOME": str(tmp_path)}
    ran = [
        subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path,
                       capture_output=True, text=True, check=True)
        for _ in range(2)
    ]  # fmt: skip
    assert "saem" in ran[1].stdout
    assert ran[1].stderr.strip() == "[]", "the second time"


# -- shells ----------------------------------------------------------------------------------------

SHELLS = {
    "bash": (["bash", "--norc", "-i"], 'eval "$(greenroom completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'eval "$(greenroom completion zsh)"'),
    "fish": (["fish", "--no-config", "-i"], "greenroom completion fish | source"),
}
TYPED = (
    "greenroom sim policy=saem_dr\tcache.ra\t0.5 stages@policy.st\tdri\ttrace.path=my\t"
    "--config-d\town/ policy=lru,zeb\tmachine/g\trtx3090\t --cf\tjo\t\n"
)
READ = ["sim", "policy=saem_drift", "cache.ratio=0.5", "stages@policy.stages=drift",
        "trace.path=my trace.parquet", "--config-dir", "own/", "policy=lru,zebra",
        "machine/gpu=rtx3090", "--cfg", "job"]  # fmt: skip


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder with a command ``greenroom`` that writes down its arguments, unless it is to complete."""
    command = tmp_path / "bin" / "greenroom"
    command.parent.mkdir()
    command.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = completion ]; then exec {sys.executable} -m sim.cli "$@"; fi\n'
        "printf '%s\\n' \"$@\" > read.tmp; mv read.tmp read\n"
    )
    command.chmod(0o755)
    (tmp_path / "own" / "policy").mkdir(parents=True)
    (tmp_path / "own" / "policy" / "zebra.yaml").write_text("name: zebra\n")
    (tmp_path / "my trace.parquet").write_text("")
    return tmp_path


@pytest.mark.parametrize("shell", SHELLS)
def test_a_line_typed_with_tabs_reaches_the_command_whole(shell: str, desk: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    arguments, install = SHELLS[shell]
    environment = {
        "PATH": f"{desk / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPO),
        "HOME": str(desk),
        "TERM": "xterm",
        "LANG": "C.UTF-8",
        "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"],
    }
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(desk)
        os.execvpe(arguments[0], arguments, environment)
    try:
        seen = _listen(terminal, desk / "ready", 0.5)
        os.write(terminal, f"{install}; echo > ready\n".encode())
        seen += _listen(terminal, desk / "ready", 60.0)
        os.write(terminal, TYPED.encode())
        seen += _listen(terminal, desk / "read", 60.0)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)
    assert (desk / "read").exists(), seen.decode(errors="replace")[-2000:]
    assert (desk / "read").read_text().splitlines() == READ


def _listen(terminal: int, awaited: Path, seconds: float) -> bytes:
    """Read what the shell shows until a file is there, at most for so long."""
    seen, ends = b"", time.monotonic() + seconds
    while time.monotonic() < ends and not awaited.exists():
        if select.select([terminal], [], [], 0.05)[0]:
            seen += os.read(terminal, 65536)
    return seen


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_finds_no_fault_in_its_script(shell: str, desk: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = subprocess.run(
        [sys.executable, "-m", "sim.cli", "completion", shell],
        env={**os.environ, "PYTHONPATH": str(REPO)}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    done = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
