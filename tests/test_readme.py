"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sim.cli import COMMANDS
from sim.conformance import findings, short_run
from sim.simulate import simulate
from tests.configs import composed, options

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")


def block(language: str, start: str, text: str = README) -> str:
    """Return the code block of a language that begins with ``start``."""
    blocks = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    (found,) = [text for text in blocks if text.startswith(start)]
    return found  # type: ignore[no-any-return]


def test_the_policy_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_trace_file: Path
) -> None:
    import yaml

    (tmp_path / "my_policies.py").write_text(block("python", "# my_policies.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    config = composed(f"trace.path={small_trace_file}", "cache.ratio=0.5")
    config["policy"] = yaml.safe_load(block("yaml", "# my_conf"))
    summary, _ = simulate(config)
    assert summary["policy"] == "recently_popular"
    assert summary["hit_rate"] > 0.3
    assert len(block("python", "# my_policies.py").splitlines()) <= 30


def test_the_parts_of_the_guide_keep_every_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import yaml

    (tmp_path / "my_parts.py").write_text(block("python", "# my_parts.py", GUIDE))
    monkeypatch.syspath_prepend(str(tmp_path))
    config = composed()
    config["policy"] = yaml.safe_load(block("yaml", "# my_conf", GUIDE))
    verdicts = {finding.check: finding.verdict for finding in findings(config)}
    assert "fails" not in verdicts.values()
    summary, _ = simulate(short_run(config))
    assert summary["on_cpu"] > 0
    assert summary["prefetches"] > 0


def test_every_link_of_the_documents_leads_somewhere() -> None:
    for file in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", file.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (file.parent / target).exists(), f"{file.name}: {target}"


def test_every_command_the_readme_names_exists_and_every_other_is_in_a_document() -> None:
    named = set(re.findall(r"\bgreenroom ([a-z][a-z-]*)", "\n".join(code(README))))
    assert named <= set(COMMANDS)
    pages = [README, *(file.read_text(encoding="utf-8") for file in (ROOT / "docs").glob("*.md"))]
    told = {name for page in pages for name in re.findall(r"greenroom ([a-z-]+)", page)}
    assert set(COMMANDS) <= told


def code(text: str) -> list[str]:
    """Return what stands in code blocks and in backticks."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [*blocks, *re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))]


def test_the_readme_counts_what_is_there() -> None:
    for file in ("README.md", "CHANGELOG.md"):
        text = (ROOT / file).read_text(encoding="utf-8")
        (found,) = {*re.findall(r"(\d+) (?:policies|files in a catalogue)", text)}
        assert int(found) == len(options("policy")), file


def test_the_python_of_the_readme_runs(small_trace_file: Path) -> None:
    import greenroom

    text = block("python", "import greenroom").replace('"tiny"', f'r"{small_trace_file}"')
    names: dict[str, Any] = {}
    exec(text, names)
    assert names["run"].summary["policy"] == "saem"
    assert set(greenroom.__all__) >= {"load_trace", "simulate", "sweep", "compare"}


def test_every_option_the_readme_names_exists() -> None:
    made = set(re.findall(r"^# my_conf/policy/(\w+)\.yaml", README, re.MULTILINE))
    made |= set(re.findall(r"greenroom measure .*--name (\w+)", README))
    assert len(made) == 2, "the reader's own policy and the reader's own machine"
    for group in ("policy", "machine", "model", "trace"):
        for named in re.findall(rf"\b{group}=([\w,]+)", README):
            for option in named.split(","):
                assert option in {*options(group), *made}, f"{group}={option}"
