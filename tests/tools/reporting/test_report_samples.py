"""The report's page of samples is that of tools/view.py, with all of its runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.io.sample_files import SampleLog
from gapo_megatron.io.token_files import TokenLog
from gapo_megatron.types import Sample
from gapo_tools.reporting import report, write_report
from gapo_tools.viewer import data as viewer_data
from tests.browser import needs_browser, use
from tests.io.test_sample_files import sample_of
from tests.io.test_token_files import tokens_of
from tests.messages import mentions
from tests.report_setup import write_run
from tests.tools.viewer.test_view import blocks

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
    """Of two runs with text, the second with the tokens of a step, too."""
    root = tmp_path_factory.mktemp("samples")
    for seed in (0, 1):
        log = SampleLog(write_run(root / f"run<{seed}", seed=seed))
        for step in range(3):
            log.append(samples_of(step))
    TokenLog(root / "run<1", resume_step=0).write(3, [tokens_of(3), tokens_of(3, 1)])
    return write_report([root], root / "report").page.with_name("samples.html")


def test_every_sample_is_on_the_page_with_verdict_and_reason(page: Path) -> None:
    found = blocks(page.read_text())
    runs = found["head"]["runs"]
    assert [name for one in runs for name in ("run<0", "run<1") if name in one["name"]] == [
        "run<0",
        "run<1",
    ]
    assert [one["steps"] for one in runs] == [[0, 1, 2], [0, 1, 2, 3]]
    groups = [found[f"group-{i}"] for i in range(len(found["head"]["groups"]))]
    responses = [(one["step"], each) for one in groups for each in one["responses"]]
    assert len(responses) == 2 * (4 + 3 + 4) + 2
    for step in range(3):
        for one in samples_of(step):
            same = [
                each
                for at, each in responses
                if at == step and (each["verdict"], each["reason"]) == (one.verdict, one.reason)
            ]
            assert [each["pieces"] for each in same] == [[one.response]] * 2
    main = page.with_name("report.html").read_text()
    assert 'href="samples.html"' in main and found["head"]["report"] == "report.html"
    # One of each verdict, of the first run's last step with text.
    body = main.partition("<h2>Answers</h2>")[2].partition("</section>")[0]
    assert re.findall(r"Step (\d+), <b>(\w+)</b>", body) == [
        ("2", "unknown"),
        ("2", "wrong"),
        ("2", "correct"),
    ]
    assert body.count("&lt;b&gt;step 2: ") == 3 and "<b>step" not in body


def test_the_answers_of_the_first_page_keep_their_lines_and_their_end(tmp_path: Path) -> None:
    response = "<i>first\n\ttab\u202e" + "x" * 10**5 + "last\n</s>"
    SampleLog(write_run(tmp_path / "run")).append([sample_of(0, response=response)])
    page = write_report([tmp_path / "run"], tmp_path / "report").page.read_text()
    body = page.partition("<h2>Answers</h2>")[2].partition("</section>")[0]
    assert "<b>&lt;i&gt;first\n\ttab\\u202ex" in body and "xlast\n&lt;/s&gt;</b>" in body
    assert " characters ...] x" in body and len(body) < 1500 and "samples of run." in body


@needs_browser
def test_a_reader_chooses_a_run_and_by_c_and_verdict(page: Path, tmp_path: Path) -> None:
    script = """
    const shown = () => all(".row").length;
    const found = [shown()];
    choose("c", "0"); found.push(shown());
    choose("c", ""); choose("verdict", "wrong"); found.push(shown());
    choose("c", "1"); found.push(shown());
    choose("c", "0"); choose("verdict", "correct"); found.push(shown());
    choose("c", ""); choose("verdict", ""); choose("run", "1"); found.push(shown());
    found.push(all("article").length, all("article .gauge").length);
    found.push(all("a").map((one) => one.href.split("/").pop()));
    return found;"""
    # Each response is of a problem of its own.
    assert use(page, tmp_path, script) == [11, 2, 5, 3, 0, 13, 1, 1, ["report.html"]]


def test_a_long_run_is_shown_from_its_first_step_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [sample_of(step, response="x" * 10**5) for step in range(0, 1000, 2)]
    monkeypatch.setattr(viewer_data, "MOST_STEPS", 5)
    SampleLog(write_run(tmp_path / "run")).append(samples)
    page = write_report([tmp_path / "run"], tmp_path / "report").page.with_name("samples.html")
    found = blocks(page.read_text())
    assert found["head"]["runs"][0]["steps"] == [0, 250, 500, 748, 998]
    assert found["head"]["runs"][0]["leftOut"] == 495
    (text,) = found["group-0"]["responses"][0]["pieces"]
    assert len(text) < 10**4 and text.startswith("xxx") and text.endswith("xxx")
    SampleLog(write_run(tmp_path / "other", seed=1)).append(samples[:5])
    folders = [tmp_path / name for name in ("run", "other")]
    page = write_report(folders, tmp_path / "both").page.with_name("samples.html")
    runs = blocks(page.read_text())["head"]["runs"]
    assert [one["steps"] for one in runs] == [[0, 998], [0, 8]]


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
