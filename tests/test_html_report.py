from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from report_rows import Page, row

from sim.cli import main
from sim.html.definitions import _CHOICES, _FIELDS, definition, entries
from sim.html.elements import Html, element, escape, folded, paragraph, section
from sim.html.figures import data_uri
from sim.html.grid import grid
from sim.html.page import SCRIPT
from sim.html.page import page as whole_page
from sim.html.provenance import warnings
from sim.html.question import question_of
from sim.html.results import BATCH_COLUMNS, LEDGER_COLUMNS, MOST_ROWS
from sim.html.source import open_source
from sim.report_table import COLUMNS
from sim.results import write_sweep

ROOT = Path(__file__).parents[1]
EVIL = "<script>alert(1)</script>"
EVIL_ATTRIBUTE = "\"><img src=https://example.org/x onerror='alert(1)'>"
TWO_SIZES = [(name, ratio) for name in ("lru", "saem", "lfu", EVIL) for ratio in (0.25, 0.5)]


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command and return the file that it says it wrote."""
    assert main(["report", *arguments]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Report: ")
    return Path(last.removeprefix("Report: ")).read_text(encoding="utf-8")


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command, which must refuse in one line; return that."""
    assert main(["report", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("greenroom report: error: ")
    assert told.err.count("\n") == 1
    return told.err


def write_points(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write a sweep's folder as the simulator does."""
    for number, one in enumerate(rows):
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / "summary.json").write_text(json.dumps(one))
    write_sweep(folder, rows)
    return folder


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep whose names, settings and errors all try to break out of the page."""
    folder = tmp_path_factory.mktemp("sweep") / EVIL.replace("/", "_")
    rows = [
        row(
            name,
            100.0 + 10 * place,
            ratio,
            overrides={"policy": name, "workload.<b>": EVIL_ATTRIBUTE},
        )
        for place, (name, ratio) in enumerate(TWO_SIZES)
    ]
    rows[0]["overrides"]["workload.<b>"] = "2"
    rows[0]["notes"] = [EVIL]
    write_points(folder, rows)
    (folder / "99").mkdir()
    failed = {"overrides": [f"policy={EVIL}"], "error": f"{EVIL_ATTRIBUTE}\x00\x1b[31m"}
    (folder / "99" / "error.json").write_text(json.dumps(failed))
    (folder / "multirun.yaml").write_text(
        f"hydra: {{overrides: {{task: ['policy={EVIL}', 'a=b c']}}}}"
    )
    (folder / "0" / "config.yaml").write_text(f"policy: {{name: '{EVIL}'}}\n")
    return folder


@pytest.fixture(scope="module")
def sweep_page(sweep: Path) -> str:
    from sim.html.page import Asked
    from sim.html.report import report_of

    return report_of(sweep, Asked(title=EVIL, question=EVIL_ATTRIBUTE))


# -- the page --------------------------------------------------------------------------------------


def test_the_page_is_well_formed_and_nothing_of_the_results_becomes_markup(sweep_page: str) -> None:
    page = Page(sweep_page)
    assert page.mismatched == []
    assert len(page.all("script")) == 1
    assert len(page.all("style")) == 1
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert {name for name, _ in page.elements} <= {
        *(
            "html",
            "head",
            "meta",
            "title",
            "style",
            "body",
            "main",
            "header",
            "nav",
            "a",
            "section",
        ),
        *(
            "h1",
            "h2",
            "p",
            "strong",
            "ul",
            "li",
            "div",
            "span",
            "code",
            "pre",
            "details",
            "summary",
        ),
        *("table", "caption", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "img"),
        *("svg", "rect", "script"),
    }
    assert page.text("h1") == EVIL
    assert page.text("p.question") == EVIL_ATTRIBUTE
    assert f"Note on lru: {EVIL}." in page.text()
    assert "\ufffd[31m" in page.text(), "control characters are shown as such"
    assert "\x1b" not in sweep_page


def test_the_page_needs_no_network(sweep_page: str) -> None:
    page = Page(sweep_page)
    loads = [
        a.get(key) or "" for _, a in page.elements for key in ("src", "srcset", "data", "href")
    ]
    assert {load.partition(":")[0] if load[:1] != "#" else "#" for load in loads if load} == {
        "data",
        "#",
    }
    style = sweep_page[sweep_page.index("<style>") : sweep_page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    policy = next(a for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in (policy["content"] or "")
    assert "unsafe" not in (policy["content"] or "")


def test_the_page_can_be_read_without_looking(sweep_page: str) -> None:
    page = Page(sweep_page)
    assert page.all("html")[0]["lang"] == "en"
    assert all((image.get("alt") or "").strip() for image in page.all("img"))
    assert len(page.all("img")) >= 4
    assert len(page.all("caption")) == len(page.all("table")) > 5
    assert all(head.get("scope") in ("col", "row") for head in page.all("th"))
    anchors = {a["id"] for _, a in page.elements if a.get("id")}
    links = [link["href"] for link in page.all("a")]
    assert links
    assert all((link or "")[1:] in anchors for link in links)


def test_a_sweep_tells_of_its_failed_points_and_its_command(sweep_page: str) -> None:
    page = Page(sweep_page)
    assert "1 of 9 points of the sweep failed." in page.text("header")
    assert f"greenroom sim -m 'policy={EVIL}' 'a=b c'" in page.text("pre")
    assert f"policy: {{name: '{EVIL}'}}" in page.text("pre")


def test_two_reports_of_the_same_results_are_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    run = write_run(tmp_path / "run", row())
    first = report(capsys, str(run))
    assert report(capsys, str(run), "--out", str(tmp_path / "new" / "b.html")) == first
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    dated = report(capsys, str(run))
    assert "1970-01-02 00:00 UTC" in dated
    assert "date" not in Page(first).text("section").split()
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "soon")
    assert "SOURCE_DATE_EPOCH = soon: must be seconds since 1970" in complaint(capsys, str(run))


def write_run(folder: Path, one: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(one))
    return folder


def test_a_run_shows_its_details_command_and_digest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [
        {"name": "link x2", "tokens_per_s": 150.0, "tokens_per_s_change": 0.5, "tpot_change": -0.3,
         "bottleneck": "gpu", "note": None},
        {"name": "storage x2", "tokens_per_s": None, "tokens_per_s_change": None, "tpot_change": None,
         "bottleneck": None, "note": "nothing is read"},
    ]  # fmt: skip
    run = write_run(
        tmp_path / "r", row(what_if=changes, overrides={"policy": "lru", "a": "[1, 2]"})
    )
    page = Page(report(capsys, str(run)))
    assert page.text("p.verdict") == (
        "Verdict: lru makes 100.0 tokens/s (TPOT p50 10.00 ms) for m on box with 25.0% of the experts in "
        "the device's memory; it is bound by the link, for which the GPU waits 75.0% of the time."
    )
    assert "these bring most speed: link x2 (+50.0%)." in page.text("header")
    assert "It finds 34.6% of the experts where they compute" in page.text("header")
    assert "greenroom sim policy=lru 'a=[1, 2]'" in page.text("pre")
    assert "7 requests, 70 prompt and 100 output tokens" in page.text()
    assert "nothing is read" in page.text("td")
    import hashlib

    assert hashlib.sha256((run / "summary.json").read_bytes()).hexdigest() in page.text()


def test_many_runs_become_a_summary_with_the_fastest_and_the_slowest(tmp_path: Path) -> None:
    from sim.html.results import by_policy, results

    rows = [
        row("lru", 1.0 + number, 0.25, overrides={"workload.seed": str(number)})
        for number in range(300)
    ]
    text = Page(results(rows, "results.parquet")).text("p")
    assert "300 runs are too many for one page" in text
    assert "all are in results.parquet" in text
    page = Page(results(rows, "results.parquet"))
    assert 50 < len(page.all("tr")) < 60
    speeds = Page(by_policy(rows)).text("td.n")
    assert "300" in speeds
    assert "150.5" in speeds, "the median"
    assert len(Page(results(rows[:MOST_ROWS], "x")).all("tr")) == MOST_ROWS + 1


# -- words -----------------------------------------------------------------------------------------


def test_warnings_come_when_provenance_demands_them() -> None:
    assert warnings([row()]) == []
    synthetic = row(provenance={"trace_kind": "synthetic"})
    assert warnings([synthetic])[0].startswith("The trace is SYNTHETIC:")
    assert warnings([row(), synthetic])[0].startswith("1 of 2 runs are of a SYNTHETIC trace:")
    overlap = row(provenance={"calibration_overlaps_workload": True})
    assert "look too good" in warnings([overlap])[0]
    part = row(provenance={"priced_as": "m: 8 of 48 layers, 16 experts, top-2"})
    assert "not of the whole model" in warnings([part])[0]
    made = row(provenance={"requests_made": "tiled to 64 tokens"})
    assert warnings([made]) == ["Not as recorded: tiled to 64 tokens."]
    where = {"measurement": {"machine": "A CPU, 2 cores", "is_emulated": True}}
    measured, emulated = warnings([row(provenance=where)])
    assert "A CPU, 2 cores" in measured
    assert "emulated" in emulated


def test_the_question_is_what_was_varied() -> None:
    assert question_of([row()]) == (
        "How fast is lru for m on box with 25.0% of the experts in the device's memory, batch 1, and what "
        "holds it back?"
    )
    sizes = [row(name, 1.0, ratio) for name in ("a", "b") for ratio in (0.1, 0.5)]
    assert question_of(sizes) == (
        "Which of 2 policies is fastest for m on box, over 2 cache sizes (10.0% to 50.0% of the experts), "
        "with batch 1?"
    )
    batches = [row(batch_size=size) for size in (1, 4)]
    assert question_of(batches) == (
        "How does the speed of lru for m on box change over 2 batch sizes (1, 4), with 25.0% of the experts "
        "in the device's memory?"
    )
    settings = [row(overrides={"policy.cache.decay": d}) for d in ("0.5", "0.9")]
    assert question_of(settings).startswith("Which of 2 settings of lru is fastest for m on box")


def test_every_column_is_defined_where_metrics_are() -> None:
    shown = {*COLUMNS, *LEDGER_COLUMNS, *BATCH_COLUMNS}
    assert shown <= {*_FIELDS, *_CHOICES}
    for metrics in _FIELDS.values():
        assert all(definition(metric) for metric in metrics), metrics
    names, text = definition("hit_rate") or ("", "")
    assert names == "hit_rate"
    assert text.startswith("hits / accesses")
    assert text.endswith("decode_hit_rate is that of steps that only decode")
    assert len(entries()) > 40
    assert definition("no_such_metric") is None


# -- HTML ------------------------------------------------------------------------------------------


def test_text_is_escaped_unless_it_is_html() -> None:
    assert element("p", EVIL, Html("<b>x</b>"), title='"<') == (
        '<p title="&quot;&lt;">&lt;script&gt;alert(1)&lt;/script&gt;<b>x</b></p>'
    )
    assert escape("a\udcffb") == "a\ufffdb", "names of files that are no text"
    assert element("th", class_=None, scope="row", hidden=True) == '<th scope="row" hidden></th>'


def test_a_figure_is_kept_in_the_smaller_form() -> None:
    import numpy as np
    from matplotlib.figure import Figure

    few, many = Figure(figsize=(2, 2)), Figure(figsize=(2, 2))
    few.subplots().plot([1, 2], [3, 4])
    many.subplots().scatter(*np.random.default_rng(0).random((2, 5000)))
    assert data_uri(few).startswith("data:image/svg+xml;base64,")
    assert data_uri(many).startswith("data:image/png;base64,")


# -- mistakes --------------------------------------------------------------------------------------


def test_mistakes_are_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no results" in complaint(capsys, str(empty))
    assert "no such file" in complaint(capsys, str(tmp_path / "nowhere"))
    broken = write_run(tmp_path / "broken", row())
    whole = (broken / "summary.json").read_text()
    (broken / "summary.json").write_text(whole[: len(whole) // 2])
    assert "cannot be read, is it damaged?" in complaint(capsys, str(broken))
    (broken / "summary.json").write_text('{"policy": "lru"}')
    assert "row 0 of the results has no trace" in complaint(capsys, str(broken))
    table = tmp_path / "results.parquet"
    write_sweep(tmp_path, [row()])
    table.write_bytes(table.read_bytes()[:-20])
    assert "cannot be read as a table of results" in complaint(capsys, str(table))
    run = write_run(tmp_path / "run", row())
    assert "--baseline lur: must be a policy that ran (lru); did you mean 'lru'?" in complaint(
        capsys, str(run), "--baseline", "lur"
    )
    assert "must be a file, and is a folder" in complaint(capsys, str(run), "--out", str(tmp_path))
    assert not (run / "report.html").exists()


def test_a_sweep_of_failed_points_alone_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "error.json").write_text('{"overrides": ["a=1"], "error": "does not fit"}')
    told = complaint(capsys, str(tmp_path))
    assert "all 1 points failed, point 3 (a=1): does not fit" in told


def test_a_folder_that_cannot_be_written_to_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", row())
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "report.html"
    assert str(tmp_path / "file") in complaint(capsys, str(run), "--out", str(out))


# -- other sources ---------------------------------------------------------------------------------


def test_a_table_alone_is_a_source(tmp_path: Path) -> None:
    rows = [row("lru", 1.0), row("fifo", 2.0)]
    write_sweep(tmp_path, rows)
    source = open_source(tmp_path / "results.parquet")
    assert [one["tokens_per_s"] for one in source.rows] == [1.0, 2.0]
    assert source.rows[0]["notes"] == []
    assert source.command is None


def test_a_sweep_of_ours_is_made_again_by_its_arguments(tmp_path: Path) -> None:
    asked = {
        "arguments": ["policy=a,b", "x=[1, 2]"],
        "config_dirs": ["my conf"],
        "first": ["policy=a"],
    }
    (tmp_path / "sweep.json").write_text(json.dumps(asked))
    (tmp_path / "config.yaml").write_text("# Varied:\n")
    source = open_source(write_points(tmp_path, [row("a"), row("b")]))
    assert source.command == "greenroom sweep --config-dir 'my conf' policy=a,b 'x=[1, 2]'"
    texts = dict(source.texts)
    assert "# Varied:\n" in texts.values()


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("sweep.json", {"config_dirs": 3, "arguments": 5, "first": "x"}),
        ("sweep.json", {"arguments": None}),
        *(("multirun.yaml", odd) for odd in ({"hydra": 1}, {"hydra": {"overrides": [1]}}, [])),
        ("multirun.yaml", {"hydra": {"overrides": {"task": 7}}}),
    ],
)
def test_a_damaged_note_of_the_command_is_no_command(
    file: str, told: object, tmp_path: Path
) -> None:
    (tmp_path / file).write_text(json.dumps(told))
    assert open_source(write_points(tmp_path, [row("a"), row("b")])).command is None


@pytest.mark.parametrize(
    "words", ["[policy=lru, 3]", "&a [*a]", "[[policy=lru]]", "{a: b}", "- [", "LAUGHS"]
)
def test_damaged_words_of_a_run_are_taken_from_its_row(words: str, tmp_path: Path) -> None:
    lists = "\n".join(f"- &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))
    run = write_run(tmp_path / "run", row())
    (run / ".hydra").mkdir(exist_ok=True)
    text = words.replace("LAUGHS", f"- &a0 [x]\n{lists}\n")
    (run / ".hydra" / "overrides.yaml").write_text(text)
    assert open_source(run).command == "greenroom sim policy=lru cache.ratio=0.25"


def test_a_measured_run_is_made_again_by_replay(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", row(provenance={"measurement": {"machine": "x"}}))
    assert (open_source(run).command or "").startswith("greenroom replay policy=lru")


def test_a_validation_says_what_its_runs_say(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = ROOT / "docs" / "validation" / "xeon_2_cores"
    page = Page(report(capsys, str(folder), "--out", str(tmp_path / "v.html")))
    runs = json.loads((folder / "validation.json").read_text())["runs"]
    errors = sorted(abs(run["error"]) for run in runs if not run["is_reference"])
    median = (errors[(len(errors) - 1) // 2] + errors[len(errors) // 2]) / 2
    verdict = page.text("p.verdict")
    assert f"{100 * median:.1f}% off in the median of {len(errors)} runs" in verdict
    assert f"and {100 * errors[-1]:.1f}% at worst" in verdict
    assert page.mismatched == []


# -- the browser -----------------------------------------------------------------------------------

_FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
    ),
    *("--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--dump-dom"),
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


@pytest.fixture
def chromium(tmp_path: Path) -> Any:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium on PATH")

    def opened(page: Path) -> tuple[str, list[str]]:
        """Return the document after its scripts ran, and what the browser complained of."""
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        command = [program, *_FLAGS, profile, page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return opened


def test_a_browser_opens_it_without_a_complaint_and_sorts_its_tables(
    chromium: Any, sweep_page: str, tmp_path: Path
) -> None:
    file = tmp_path / "report.html"
    file.write_text(sweep_page, encoding="utf-8")
    document, complaints = chromium(file)
    assert complaints == []
    assert "<button>" not in sweep_page.replace(SCRIPT, "")
    assert document.count("<button>") > 10, "the script ran under the page's own policy"
    click = """<script>
      const table = [...document.querySelectorAll("table.sortable")].find(
        (one) => one.caption.textContent.startsWith("8 runs"));
      const heads = [...table.querySelectorAll("thead button")];
      heads.find((one) => one.textContent === "tokens/s").click();
      document.title = [...table.tBodies[0].rows].map((one) =>
        one.cells[heads.findIndex((head) => head.textContent === "tokens/s")].textContent).join(" ");
    </script></body>"""
    without_policy = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", sweep_page)
    file.write_text(without_policy.replace("</body>", click), encoding="utf-8")
    title = re.search(r"<title>(.*?)</title>", chromium(file)[0])
    assert title is not None
    assert title[1].split() == [f"{speed}.0" for speed in range(170, 90, -10)]


@pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("pdftotext")),
    reason="needs chromium and pdftotext on PATH",
)
def test_on_paper_every_page_of_a_table_has_its_heads_and_the_columns_are_explained(
    tmp_path: Path,
) -> None:
    table = grid(("policy", "tokens/s"), [(f"p{n}", n) for n in range(200)], "runs", sortable=True)
    told = section("Definitions", "definitions", folded("What columns mean", paragraph("as told")))
    file, paper = tmp_path / "report.html", tmp_path / "report.pdf"
    file.write_text(whole_page("A report", [section("Results", "results", table), told]), "utf-8")
    flags = [flag for flag in _FLAGS if flag != "--dump-dom"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = ["chromium", *flags, profile, "--no-pdf-header-footer", f"--print-to-pdf={paper}"]
    subprocess.run([*command, file.as_uri()], capture_output=True, timeout=60, check=True)
    text = subprocess.run(["pdftotext", paper, "-"], capture_output=True, text=True, check=True)
    pages = text.stdout.rstrip("\f").split("\f")
    with_rows = [one for one in pages if re.search(r"^p\d+$", one, re.MULTILINE)]
    assert len(with_rows) > 2
    assert all("tokens/s" in one for one in with_rows)
    assert "as told" in text.stdout


def test_a_sweep_that_is_not_finished_says_so_in_reports_and_before_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_points(tmp_path / "s", [row("lru"), row("saem")])
    (folder / "2").mkdir()
    (folder / "2" / "error.json").write_text('{"overrides": [], "error": "no"}')
    (folder / "sweep.json").write_text(json.dumps({"arguments": [], "num_points": 7}))
    page = report(capsys, str(folder))
    assert "not finished: 4 of 7 points have not been run yet" in page
    assert "1 of 7 points of the sweep failed" in page
    assert main(["plot", str(folder), "stall_breakdown"]) == 0
    assert "not finished: 4 points" in capsys.readouterr().err
    (folder / "sweep.json").write_text(json.dumps({"arguments": [], "num_points": 3}))
    assert "not finished" not in report(capsys, str(folder))
