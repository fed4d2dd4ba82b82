"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sim.simulate import simulate
from tests.configs import composed, options

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def block(language: str, start: str) -> str:
    """Return the code block of a language that begins with ``start``."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
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


def test_every_option_the_readme_names_exists() -> None:
    for group in ("policy", "machine", "model", "trace"):
        for named in re.findall(rf"\b{group}=([\w,]+)", README):
            for option in named.split(","):
                assert option in [*options(group), "recently_popular"], f"{group}={option}"
