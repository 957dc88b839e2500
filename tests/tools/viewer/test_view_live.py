"""The page of tools/view.py --live: it follows a run that trains."""

from __future__ import annotations

import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gapo_megatron.io.sample_files import SampleLog
from gapo_megatron.io.token_files import TokenLog, token_files
from gapo_tools import view
from gapo_tools.viewer import server
from gapo_tools.viewer.server import make_server
from tests.browser import dump, needs_browser
from tests.io.test_sample_files import sample_of
from tests.report_setup import write_run
from tests.tools.reporting.test_report_page import Page
from tests.tools.viewer.test_view import blocks, step_of, write


@contextmanager
def served(run: Path) -> Iterator[str]:
    with make_server(run, port=None) as bound:
        thread = threading.Thread(target=bound.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.server_port}"
        finally:
            bound.shutdown()
            thread.join()


def get(address: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as answer:
        text: str = answer.read().decode()
    return text


def test_a_live_page_follows_the_run(tmp_path: Path) -> None:
    run = write(tmp_path / "run", range(2))
    with served(run) as address:
        text = get(f"{address}/")
        assert blocks(text)["head"]["live"] == get(f"{address}/newest")
        assert "connect-src &#x27;self&#x27;" in text
        TokenLog(run, resume_step=2).write(2, step_of(2))
        assert get(f"{address}/newest") not in text
        text = get(f"{address}/")
        assert blocks(text)["head"]["runs"][0]["steps"] == [0, 1, 2]
        # The step's metrics come after its tokens.
        clips = blocks(text)["head"]["runs"][0]["clips"]
        with open(run / "metrics.jsonl", "a") as file:
            file.write('{"step": 2, "per_c/wrong/sequences/c5": 900}\n')
        assert get(f"{address}/newest") not in text
        text = get(f"{address}/")
        assert get(f"{address}/newest") == blocks(text)["head"]["live"]
        assert blocks(text)["head"]["runs"][0]["clips"] != clips
        # Another site's name for this machine, and other files.
        for path, headers, code in (("/", {"Host": "evil.example"}, 403), ("/../config", {}, 404)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                get(f"{address}{path}", **headers)
            assert refused.value.code == code
            refused.value.close()
        token_files(run)[2].write_bytes(b"half")
        TokenLog(run, resume_step=3).write(3, step_of(3))
        with pytest.raises(urllib.error.HTTPError) as broken:
            get(f"{address}/")
        with broken.value as answer:
            assert "step_00000002" in answer.read().decode() and answer.code == 500


def test_a_live_page_of_text_alone_follows_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    log = SampleLog(run)
    log.append([sample_of(0)])
    with served(run) as address:
        newest = get(f"{address}/newest")
        assert blocks(get(f"{address}/"))["head"]["live"] == newest
        log.append([sample_of(1)])
        assert get(f"{address}/newest") != newest
        assert blocks(get(f"{address}/"))["head"]["runs"][0]["steps"] == [0, 1]


def test_a_live_page_waits_for_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")

    def step(_: float) -> None:
        SampleLog(run).append([sample_of(0)])

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(server.time, "sleep", step)
    monkeypatch.setattr(server, "serve", interrupted)
    for said in (f"waiting for the first step of {run}", ""):
        assert view.main([str(run), "--live"]) == 0
        assert capsys.readouterr().out.startswith(said) and (run / "samples.jsonl").exists()
    none = write_run(tmp_path / "none")
    (none / "config.toml").write_text(
        (none / "config.toml").read_text().replace("samples_per_step = 8", "samples_per_step = 0")
    )
    for folder in (none, tmp_path / "no_such"):
        assert view.main([str(folder), "--live"]) == 1  # which would never come
        assert str(folder) in capsys.readouterr().err


@needs_browser
@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_live_page_leaves_its_reader_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    """New steps are in the list, and what is open stays; a file that cannot be read is named."""
    run = write(tmp_path / "run", range(2))
    write_page = server.render

    def render(*arguments: Any, **options: Any) -> str:
        text = write_page(*arguments, **options)
        TokenLog(run, resume_step=2).write(2, step_of(2))
        if is_damaged:
            token_files(run)[2].write_bytes(b"half")
        return text

    monkeypatch.setattr(server, "render", render)
    with served(run) as address:
        shown = dump(f"{address}/#at=0%2F0%2F%3Cp1%3E", tmp_path)
    assert "Step 0, <bdi>&lt;p1&gt;</bdi>: 1 of 2" in shown and shown.count("<article") == 2
    assert shown.count('class="row"') == (4 if is_damaged else 6)
    (news,) = re.findall('<b id="news">(.*?)</b>', shown, re.DOTALL)
    assert ("Not renewed: " in news and "step_00000002" in news) is is_damaged


@needs_browser
def test_a_live_page_renews_itself_in_a_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write(tmp_path / "run", range(2))
    calls, write_page = [], server.render

    def render(*arguments: Any, **options: Any) -> str:
        """The page, after the first of which the run does another step."""
        text = write_page(*arguments, **options)
        calls.append(text)
        if len(calls) == 1:
            TokenLog(run, resume_step=2).write(2, step_of(2))
        return text

    monkeypatch.setattr(server, "render", render)
    with served(run) as address:
        shown = dump(f"{address}/", tmp_path)
    assert shown.count("<article") == 2 and "Live:" in shown
    assert len(calls) == 2 and "steps 0 to 2" in Page(shown).text
