"""The page of samples: what it holds, and what a reader's choice leaves of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.io.sample_files import SampleLog
from gapo_megatron.types import Sample, Span, Timeline
from gapo_tools.reporting import report, write_report
from gapo_tools.reporting import samples as module
from gapo_tools.reporting.samples import choose_steps
from tests.io.test_sample_files import sample_of
from tests.messages import mentions
from tests.needs import needs
from tests.report_setup import write_run
from tests.tools.reporting.test_report_page import Page
from tests.waiting import HANG_S

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, _BROWSERS)), None)
needs_browser = needs("" if BROWSER else "not installed: chromium (apt-get install chromium)")
KINDS = [(0, "wrong"), (1, "correct"), (1, "wrong"), (2, "unknown")]
"""c and verdict of each step's samples."""


def samples_of(step: int) -> list[Sample]:
    return [
        replace(
            sample_of(step, number, response=f"\n<b>step {step}: {number}</b>"),
            c=c,
            verdict=verdict,
            reason=f"because {step}/{number} & more",
        )
        for number, (c, verdict) in enumerate(KINDS)
        if (step, c) != (1, 0)
    ]


@pytest.fixture(scope="module", autouse=True)
def no_figures() -> Iterator[None]:
    """A table is enough beside the page of samples: drawing takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "MAKERS", {"Summary": report.MAKERS["Summary"]})
        yield


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("samples")
    for seed in (0, 1):
        log = SampleLog(write_run(root / f"run<{seed}", seed=seed))
        for step in range(3):
            log.append(samples_of(step))
    return write_report([root], root / "report").page.with_name("samples.html")


def test_every_sample_is_on_the_page_with_verdict_and_reason(page: Path) -> None:
    text = page.read_text()
    found = Page(text)
    assert found.tags.count("article") == 2 * (4 + 3 + 4)
    for seed in (0, 1):
        assert f"run<{seed}" in found.text
    for step in range(3):
        for one in samples_of(step):
            assert one.reason in found.text and one.response in found.text
    assert "b" not in found.tags and "script" not in found.tags
    links = re.findall(r'href="#([^"]+)"', text)
    assert len(links) == 2 * 3 and {*links} == {*re.findall(r' id="(run[^"]+)"', text)}
    main = page.with_name("report.html").read_text()
    assert 'href="samples.html"' in main and 'href="report.html"' in text
    assert "svg" not in text and "timeline" not in text  # of no environment


def visible(page: Path, folder: Path, *choices: list[str]) -> list[list[int]]:
    """Samples and steps that a browser shows for each of these choices."""
    assert BROWSER is not None
    script = f"""<script>
    const count = (kind) => [...document.querySelectorAll(kind)]
        .filter((one) => getComputedStyle(one).display != "none").length;
    document.title = "shown " + JSON.stringify({[*choices]}.map((chosen) => {{
        for (const one of document.querySelectorAll("input")) one.checked = one.defaultChecked;
        for (const id of chosen) document.getElementById(id).click();
        return [count("article"), count(".step")];
    }}));
    </script>"""
    copy = folder / "copy.html"
    copy.write_text(page.read_text().replace("</body>", script + "</body>"))
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={folder}/profile", copy.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    match = re.search(r"<title>shown (.*?)</title>", done.stdout)
    assert match, done.stderr
    found: list[list[int]] = json.loads(match[1])
    return found


def test_the_bar_of_an_episode_has_its_turns_and_calls(tmp_path: Path) -> None:
    """In seconds and words too, and each kind is drawn in a way of its own."""
    run = write_run(tmp_path / "run")
    log, times = SampleLog(run), SampleLog(run, name="timelines.jsonl")
    spans = (
        Span(False, 0.0, 1.0, 12),
        Span(True, 1.0, 3.0, 4),
        Span(False, 3.0, 4.0, 8),
        Span(True, 4.0, 4.0, 0, failed=True),
    )
    for step in (0, 1):
        log.append(samples_of(step))
    found = samples_of(1)[0]
    times.append([Timeline(1, found.problem, found.sample, spans)])
    text = write_report([run], tmp_path / "report").page.with_name("samples.html").read_text()
    (bar,) = re.findall(r'<p class="timeline[^>]*>(.*?)</p>', text, re.DOTALL)
    parts = re.findall(
        r'<rect class="(\w+)" x="([\d.]+)%"[^>]* width="([\d.]+)%"[^>]*><title>(.*?)</title>', bar
    )
    assert [(kind, float(x)) for kind, x, *_ in parts] == [
        *(("turn", 0.0), ("call", 25.0), ("turn", 75.0)),
        ("failed", pytest.approx(100, abs=1)),
    ]
    assert [float(width) for *_, width, _ in parts[:3]] == [25.0, 50.0, 25.0]
    last = parts[-1]
    assert float(last[2]) > 0 and float(last[1]) + float(last[2]) == pytest.approx(100)
    assert all(number in parts[1][3] for number in ("call 1", "2.00 s", "1.00", "3.00", "4 tokens"))
    assert all(number in parts[2][3] for number in ("turn 2", "3.00", "4.00", "8 tokens"))
    assert "call 2, failed" in last[3] and "\u00d7" in bar and "4.00 s" in bar


@needs_browser
def test_a_reader_chooses_by_c_and_verdict(page: Path, tmp_path: Path) -> None:
    """Steps without such samples are hidden with them."""
    shown = {
        (): [2 * 11, 2 * 3],
        ("c-0",): [2 * 2, 2 * 2],
        ("verdict-wrong",): [2 * 5, 2 * 3],
        ("verdict-wrong", "c-1"): [2 * 3, 2 * 3],
        ("verdict-correct", "c-0"): [0, 0],
    }
    assert visible(page, tmp_path, *map(list, shown)) == [*shown.values()]


def test_a_long_run_is_shown_from_its_first_step_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [sample_of(step, response="x" * 10**5) for step in range(0, 1000, 2)]
    steps = choose_steps(samples, 5)
    assert [step.number for step in steps] == [0, 250, 500, 748, 998]
    assert max(len(one.response) for step in steps for one in step.samples) < 10**4
    assert [step.number for step in choose_steps(samples[:3], 5)] == [0, 2, 4]
    monkeypatch.setattr(module, "MOST_STEPS", 2)
    SampleLog(write_run(tmp_path / "run")).append(samples[:5])
    page = write_report([tmp_path / "run"], tmp_path / "report").page.with_name("samples.html")
    text = Page(page.read_text()).text
    assert re.search(r"\b3 steps\b", text) and "Step 8" in text and "Step 2\n" not in text


def test_a_report_without_samples_has_no_such_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    SampleLog(run).append(samples_of(0))
    page = write_report([run], tmp_path / "out").page
    assert page.with_name("samples.html").exists()
    (run / "samples.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=mentions(run / "samples.jsonl", "samples.jsonl:1")):
        write_report([run], tmp_path / "out")
    (run / "samples.jsonl").unlink()
    write_report([run], tmp_path / "out")
    assert "samples.html" not in page.read_text()
    assert not page.with_name("samples.html").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "samples.html").write_text("mine")
    with pytest.raises(ConfigError, match=mentions("--output", "samples.html")):
        write_report([run], other)
