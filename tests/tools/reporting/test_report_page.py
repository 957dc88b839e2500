"""The page as a reader gets it: whole, without network, from the command line; in a browser."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gapo_megatron.formats.folder import claim
from gapo_tools import report as report_tool
from gapo_tools.reporting import write_report
from gapo_tools.reporting.report import MAKERS, _lead
from gapo_tools.reporting.runs import find_trained
from tests.messages import mentions
from tests.report_setup import compare, write_run

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Three methods; a run under way, one not started, one resumed; names are to be escaped."""
    root = tmp_path_factory.mktemp("study")
    for method in ("dr_grpo", "gapo", "gspo"):
        for seed in (0, 1):
            num_steps = 30 if (method, seed) == ("gspo", 1) else 40
            write_run(root / f"{method}<&{seed}", method=method, seed=seed, num_steps=num_steps)
    resumed = write_run(root / "resumed", seed=2)
    changes = {"optimizer.learning_rate": [1e-6, 1e-5]}
    (resumed / "changes.json").write_text(json.dumps([{"step": 3, "changes": changes}]))
    (root / "waiting" / "code").mkdir(parents=True)
    return root


@pytest.fixture(scope="module")
def report(study):
    return write_report([study], study / "report", first="gapo")


class Page(HTMLParser):
    """Titles, attributes that make a browser load something, and text."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.tags, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        given = dict(attributes)
        self.loads += [given[key] for key in ("src", "srcset", "data", "action") if key in given]
        if tag == "link":
            self.loads.append(given["href"])

    def handle_data(self, data):
        self.text += data + "\n"


def test_the_page_holds_everything(report):
    text = report.page.read_text()
    page = Page(text)
    tables = ("before_and_after", "summary", "correlation", "rounding")
    heads = re.findall("<h2>(.*?)</h2>", text)
    assert heads[:3] == ["Before and after", "Summary", "Correlation and dose"]
    assert heads[-2:] == ["Signal against rounding", "Runs"]
    assert page.tags.count("img") == len(MAKERS) - len(tables)
    assert all(one.startswith(("data:image/png;", "data:,")) for one in page.loads)
    assert "script" not in page.tags
    assert "url(" not in text and "@import" not in text
    for title in MAKERS:
        assert title in page.text
    assert "gspo<&1 (30 of 40)" in page.text
    assert "Not started: waiting." in page.text
    assert report.left_out == {}
    assert report.summary.rows[0][0] == "gapo"
    assert "resumed from step 3: optimizer.learning_rate 1e-06, now 1e-05." in page.text
    links = re.findall(r'href="(figures/[^"]+)"', text)
    assert len(links) == (len(MAKERS) - len(tables)) * 3 + len(tables)
    for link in links:
        assert (report.page.parent / link).stat().st_size > 0


def test_the_tool_prints_the_summary_and_what_is_missing(study, tmp_path, capsys):
    (tmp_path / "figures").mkdir()
    claim(tmp_path, ["figures/step_time.png"], field="--output", made_by="report")
    older = tmp_path / "figures" / "step_time.png"  # of a report of more runs
    older.touch()
    folder = write_run(tmp_path / "run", "metrics.rounding_every_steps=0")
    lines = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(lines.replace("numerics/", "others/"))
    (folder / "timings.jsonl").unlink()
    arguments = [folder, study / "waiting", "--output", tmp_path]
    assert report_tool.main(list(map(str, arguments))) == 0
    printed = capsys.readouterr().out
    flowing = " ".join(printed.split())
    assert re.search(r"^gapo +8 +0.01 +0.0167 +1 +40 +50.00 ", printed, re.MULTILINE)
    reason = r"Time of a step, by stage\b.*\btimings\b"
    assert re.search(rf"{reason}.*Signal against rounding\b.*\brounding_every_steps\b", flowing)
    page = Page((tmp_path / "report.html").read_text())
    assert re.search(rf"Figures without data.*{reason}", page.text, re.DOTALL)
    assert f"{study}/waiting" in printed
    assert f"{tmp_path}/report.html" in printed
    assert (tmp_path / "figures" / "over_training.png").exists()
    assert not older.exists()


def test_a_page_says_which_verdicts_are_unknown(tmp_path):
    """A run that never had a verdict is one that has trained, too."""
    folder = write_run(tmp_path / "broken")
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [row | {"reward/unknown_share": 1.0} for row in rows if "reward/mean" in row]
    for row in steps:
        del row["reward/mean"]
    steps[0]["reward/unknown_share"] = 0.0
    path.write_text("".join(f"{json.dumps(row)}\n" for row in steps))
    assert find_trained([folder]) == ([folder], [])
    comparison = compare(folder)
    assert comparison.first.runs[0].num_steps == len(steps)
    [lead] = [one for one in _lead(comparison, []) if "unknown" in one]
    mean = f"{1 - 1 / len(steps):.1%}"
    assert re.search(mentions("broken", mean, "100%", "step 1"), lead)


def test_a_page_tells_of_no_method_but_its_own(tmp_path):
    """A caption says what is drawn; what the paper found of GAPO is no finding of this run."""
    report = write_report([write_run(tmp_path / "run", method="gspo_asym")], tmp_path / "report")
    text = Page(report.page.read_text()).text
    assert "gspo_asym" in text and not re.search(r"gapo|fixed clip", text, re.IGNORECASE)


def test_a_setting_may_have_any_letters(tmp_path):
    prompt = "Put it in $\\boxed{}$."  # no formula of matplotlib's
    runs = [
        write_run(tmp_path / "a", "data.chat_template=true"),
        write_run(tmp_path / "b", "data.chat_template=true", f"data.system_prompt={prompt}"),
    ]
    report = write_report(runs, tmp_path / "report")
    assert f"system_prompt={prompt}" in Page(report.page.read_text()).text


def test_the_tool_names_what_is_wrong(study, tmp_path, capsys):
    assert report_tool.main([str(tmp_path / "gone")]) == 1
    line = capsys.readouterr().err
    assert re.fullmatch(r"error: \S+/gone: no such .*\n", line)
    taken = tmp_path / "taken"
    taken.touch()
    run = str(study / "gapo<&0")
    assert report_tool.main([run, "--output", str(taken)]) == 1
    line = capsys.readouterr().err
    assert re.fullmatch(r"error: \S+/taken\S*: .*\n", line)
    assert report_tool.main([run, "--output", str(tmp_path), "--first", "grpo"]) == 1
    assert re.fullmatch(r"error: .*'grpo'.*\bgapo\n", capsys.readouterr().err)


def test_runs_without_a_folder_in_common_need_an_output(capsys):
    with pytest.raises(SystemExit, match="2"):
        report_tool.main(["/runs/a", "/other/b"])
    assert "--output" in capsys.readouterr().err.rpartition("error:")[2]


def test_reports_on_other_runs_have_other_folders():
    def folder(*runs):
        return report_tool._parse(runs).output

    assert folder("/r/demo") == Path("/r/demo/report")
    assert folder("/r/demo", "/r/demo_gspo") == Path("/r/demo_vs_demo_gspo")
    several = [("/r/a", "/r/b"), ("/r/a", "/r/c"), ("/r/a", "/r/b", "/r/c"), ("/r/a/s", "/r/b/s")]
    several += [("/r", "/r/a"), *(("/r/a", f"/r/{'long' * 50}{i}") for i in (0, 1))]
    assert len({folder(*runs) for runs in several}) == len(several)
    assert all(len(folder(*runs).name.encode()) <= 100 for runs in several)


def test_nothing_is_imported_that_is_not_needed():
    program = (
        "import sys, gapo_tools.reporting;"
        "print(sorted({'transformers', 'megatron', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr
