"""The page of tools/view.py: what it holds, what a browser makes of it, and what it refuses."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gapo_megatron.io.sample_files import SampleLog
from gapo_megatron.io.token_files import TokenLog, token_files
from gapo_megatron.types import SampleTokens, Span, Timeline
from gapo_tools import view
from gapo_tools.viewer import data as module
from gapo_tools.viewer import make_page, read_data
from gapo_tools.viewer.server import make_server
from tests.browser import dump, needs_browser, use
from tests.io.test_sample_files import sample_of
from tests.io.test_token_files import tokens_of
from tests.report_setup import write_run
from tests.tools.reporting.test_report_page import Page

HOSTILE = [
    "</script><script>document.title='broken'</script>",
    "<img src=x onerror=\"document.title='broken'\">",
    "\u2028\u2029\u202eabc\u2066 🚀\U000e0041",
    "<!--<script>",
    '"\\\n\t&amp;\x00\x1b[31m',
]


def answer(step: int, number: int, verdict: str, c: int, **changes: Any) -> SampleTokens:
    """Answer to the problem of this c; `changes` are to its tokens."""
    one = tokens_of(step, number)
    problem = f"<p{c}>"
    about = {"problem": problem, "verdict": verdict, "c": c, "k": 2, "reason": f"why {step}/{c}"}
    sample = replace(one.sample, sample=number, **about)
    return replace(one, sample=sample, **changes)


def step_of(step: int) -> list[SampleTokens]:
    """Two problems: one half solved, one unknown and wrong, which was not computed."""
    skipped = {"update": None, "ratio": None, "log_ratio": None, "old_log_probs": None}
    skipped |= {"log_probs": None, "clipped": None, "clip_side": None, "advantage": 0.0}
    skipped |= {"clip_low": None, "clip_high": None}
    return [
        answer(step, 0, "correct", 1, advantage=0.5),
        answer(step, 1, "wrong", 1, ratio=1.001, clipped=0.0, clip_side="", pieces=["a", "b", "Z"]),
        answer(step, 0, "unknown", 0, **skipped),
        answer(step, 1, "wrong", 0, **skipped),
    ]


def write(run: Path, steps: range = range(3)) -> Path:
    write_run(run)
    log, times = TokenLog(run, resume_step=0), SampleLog(run, name="timelines.jsonl")
    for step in steps:
        log.write(step, step_of(step))
        spans = (Span(False, 0, 1, 1), Span(True, 1, 3, 1, failed=True), Span(False, 3, 4, 1))
        times.append([Timeline(step, "<p1>", 0, spans)])
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("view") / "my<run")


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    assert view.main([str(run)]) == 0
    return run / "view.html"


def blocks(text: str) -> dict[str, Any]:
    """The data of a page, by name."""
    found = re.findall(r'<script type="application/json" id="([\w-]+)">(.*?)</script>', text)
    return {name: json.loads(content) for name, content in found}


def test_the_page_holds_every_answer_and_needs_nothing_else(page: Path) -> None:
    text = page.read_text()
    found = blocks(text)
    groups = [found[f"group-{i}"] for i in range(6)]
    assert len(found) == 7 and [(one["step"], one["c"]) for one in groups] == [
        (step, c) for step in range(3) for c in (0, 1)
    ]
    right, wrong = groups[1]["responses"]
    assert (right["ratio"], right["clip_low"], right["clip_high"]) == (1.01, 0.99, 1.005)
    assert right["log_ratio"] == [0.25, None, 0.5] and right["mismatch"] == [-0.5, None, -0.5]
    assert right["policy_versions"] == [1, 1, 2] and right["response_mask"] == [True, False, True]
    assert [one["is_call"] for one in right["spans"]] == [False, True, False]
    assert wrong["pieces"] == ["a", "b", "Z"] and wrong["clipped"] == 0
    assert groups[0]["responses"][0]["update"] is None
    assert "log_ratio" not in groups[0]["responses"][0]
    assert found["head"]["groups"][1]["clipped"] == 1
    assert found["head"]["groups"][0]["unknown"] == ["why 0/0"]
    # The clip of all responses is that of the metrics, its width the method's.
    clips = {one["c"]: one for one in found["head"]["runs"][0]["clips"]}
    assert clips[1]["high"] == pytest.approx(0.0167) and clips[7]["low"] == 0.01
    assert clips[2]["high"] == pytest.approx(0.01 + 0.0067 * 6 / 7)
    assert clips[2]["correct"]["sequences"] == 2 * (3 + 1 + 3)
    assert clips[3]["correct"]["clipped"] == pytest.approx(0.06)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert html.unescape(policy).startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy and "connect-src" not in policy
    assert not re.findall(r"https?:|@import|url\(", text.replace("http://www.w3.org/2000/svg", ""))


@needs_browser
def test_what_a_model_writes_is_text(tmp_path: Path) -> None:
    """Nothing of it runs, ends a block of data, or turns the page around."""
    run = write_run(tmp_path / "run")
    pieces = [*HOSTILE, "x" * 10**5]
    every = np.zeros(len(pieces), np.float32)
    one = answer(0, 0, "wrong", 1)
    texts = {name: "".join(HOSTILE) for name in ("problem", "prompt", "reason", "answer")}
    texts |= {"response": "".join(pieces)}
    hostile = replace(
        one,
        sample=replace(
            one.sample, num_tokens=len(pieces), metrics={HOSTILE[0] or "x": 0.125}, **texts
        ),
        pieces=pieces,
        token_ids=every.astype(np.int32),
        policy_versions=every.astype(np.int32),
        response_mask=every == 0,
        conversations=every.astype(np.int32),
        **dict.fromkeys(("rollout_log_probs", "old_log_probs", "log_probs", "log_ratio"), every),
    )
    TokenLog(run, resume_step=0).write(0, [hostile])
    assert view.main([str(run)]) == 0
    shown = dump(run / "view.html", tmp_path)
    assert re.search("<title>Answers: run</title>", shown) and "<img" not in shown
    body = re.sub(r"<script.*?</script>", "", shown, flags=re.DOTALL)
    (tokens,) = re.findall(r'<div class="tokens">(.*?)</div>', body, re.DOTALL)
    spans = [html.unescape(re.sub("<.*?>", "", one)) for one in tokens.split("</span>")]
    assert " 0.125" in Page(body).text
    for hidden in "\u202e\u2028\x1b\u2066\U000e0041":
        assert f"\u27e8U+{ord(hidden):04X}\u27e9" in tokens
        assert hidden not in Page(body).text
    assert spans[0] == HOSTILE[0] and spans[1] == HOSTILE[1] and spans[5] == "x" * 10**5


@needs_browser
def test_words_of_several_tokens_are_read_from_right_to_left(tmp_path: Path) -> None:
    """Where the line is Arabic or Hebrew; the next line has a direction of its own."""
    run = write_run(tmp_path / "run")
    pieces = ["\u05e9\u05dc", "\u05d5\u05dd\n", "left ", "right"]
    one = answer(0, 0, "wrong", 1)
    every = np.zeros(len(pieces), np.float32)
    hebrew = replace(
        one,
        sample=replace(one.sample, num_tokens=len(pieces), response="".join(pieces)),
        pieces=pieces,
        response_mask=every == 0,
        **dict.fromkeys(("token_ids", "policy_versions", "conversations"), every.astype(np.int32)),
        **dict.fromkeys(("rollout_log_probs", "old_log_probs", "log_probs", "log_ratio"), every),
    )
    TokenLog(run, resume_step=0).write(0, [hebrew])
    assert view.main([str(run)]) == 0
    script = 'return all(".tokens span").map((one) => one.getClientRects()[0].left);'
    first, second, left, right = use(run / "view.html", tmp_path, script)
    assert first > second and left < right


@needs_browser
def test_a_reader_finds_and_compares_answers(page: Path, tmp_path: Path) -> None:
    script = """
    const rows = () => all(".row").map((one) => [one.querySelector(".rate").textContent,
        one.querySelector(".soft").textContent]);
    const texts = (kind) => all(kind).map((one) => one.textContent);
    const found = {rows: rows(), title: texts("h2")};
    found.cards = texts("article h3");
    found.same = texts(".over [aria-current=true]");
    found.facts = texts("article .facts");
    found.who = texts("article .who");
    found.times = all(".timeline span").map((one) => [one.className, one.title, one.style.left]);
    const token = all(".tokens span")[0], other = all(".tokens span")[2];
    found.colors = [token, other].map((one) => one.style.backgroundColor);
    token.dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));
    found.tip = document.getElementById("tip").textContent;
    choose("color", "policy_versions");
    found.versions = all(".tokens span").slice(0, 3).map((one) => one.style.backgroundColor);
    choose("c", "0");
    found.c = rows();
    choose("verdict", "correct");
    found.none = rows();
    choose("c", ""); choose("verdict", ""); choose("sort", "rate");
    found.rate = rows().map((one) => one[0]);
    choose("step", "1");
    found.step = rows();
    choose("step", "");
    const search = document.getElementById("search");
    search.value = "z"; search.dispatchEvent(new Event("input"));
    await wait(600);
    found.search = rows(); found.hits = texts(".hit");
    all(".over button")[2].click();
    found.over = texts("h2");
    document.getElementById("view-clip").click();
    found.clips = all("#clips tbody tr").map((one) => [...one.children].map((cell) =>
        [cell.textContent, cell.firstChild?.style?.width ?? ""]));
    document.getElementById("view-unknown").click();
    found.unknown = texts("main h3");
    all("main .over button")[1].click();
    found.opened = [texts("h2")[0], texts("article h3").length, texts("article .facts")[0]];
    found.hash = location.hash;
    return found;"""
    found = use(page, tmp_path, script)
    assert found["rows"] == [[f"{c}/2", f"step {step}"] for step in (2, 1, 0) for c in (0, 1)]
    assert found["title"] == ["Step 2, <p1>: 1 of 2 correct"]  # the newest with a clipped answer
    assert found["same"] == ["step 2: 1/2"]
    assert found["cards"] == ["0: correctwhy 2/1", "1: wrongwhy 2/1"]
    first, second = found["facts"]
    for said in ("A 0.5", "s 1 + 0.01", "1 \u2212 0.01 .. 1 + 0.005", "clipped (high)", "update 1"):
        assert said in first
    assert "A -0.5" in second and "clipped" not in second
    assert found["who"] == ["turn 1", "environment", "turn 2"] * 2
    assert [one[0] for one in found["times"]] == ["turn", "call failed", "turn"]
    assert "call 1, failed: 2.00 s, from 1.00 to 3.00 s" in found["times"][1][1]
    assert [one[2] for one in found["times"]] == ["0%", "25%", "75%"]
    # Log-ratios 0.25 and 0.5: both more likely, the second more so.
    light, strong = (float(re.split(r"[ ,)]+", one)[3]) for one in found["colors"])
    assert 0 < light < strong
    for said in ("id 5", "log-ratio 0.25", "engine -0.5", "policy version 1", "sampled by"):
        assert said in found["tip"]
    assert found["versions"][0] == found["versions"][1] != found["versions"][2]
    assert found["c"] == [["0/2", f"step {step}"] for step in (2, 1, 0)] and found["none"] == []
    assert found["rate"] == ["0/2"] * 3 + ["1/2"] * 3
    assert found["step"] == [["0/2", "step 1"], ["1/2", "step 1"]]
    assert {rate for rate, _ in found["search"]} == {"1/2"} and found["hits"] == ["Z"]
    assert found["over"] == ["Step 2, <p1>: 1 of 2 correct"]
    # Of the longest bar, 5rem, a width has its share of 0.0167, and a share itself.
    assert [row[0][0] for row in found["clips"]] == ["1", "2", "3", "4", "5", "6", "7"]
    c, width, responses, clipped, *_, others = found["clips"][1]
    assert (c[0], width[0], responses[0], clipped[0]) == ("2", "0.0157", "14", "4.0 %")
    lengths = [float(one[1].removesuffix("rem")) for one in (width, clipped)]
    assert lengths == pytest.approx([5 * (0.01 + 0.0067 * 6 / 7) / 0.0167, 5 * 0.04], rel=1e-4)
    assert others == ["none", ""]
    assert found["unknown"] == [f"why {step}/0 (1 problems)" for step in range(3)]
    assert found["opened"][:2] == ["Step 1, <p0>: 0 of 2 correct", 2]
    assert "not computed: A = 0" in found["opened"][2]
    assert "at=0%2F1%2F%3Cp0%3E" in found["hash"]


def of_three_conversations() -> SampleTokens:
    """Turns in time of conversations 0, 1, 0, 2 and 1; the last two directly after another."""
    blocks = [(0, 1, "main "), (1, 0, "<b>ask"), (1, 1, " sub"), (0, 0, "reply"), (0, 1, " on")]
    blocks += [(2, 0, "other"), (2, 1, " third"), (1, 1, " rest")]
    numbers, sampled, pieces = zip(*blocks, strict=True)
    every, mask = np.zeros(len(blocks), np.float32), np.array(sampled, bool)
    floats = ("rollout_log_probs", "old_log_probs", "log_probs", "log_ratio")
    one = answer(0, 0, "correct", 1, pieces=[*pieces], response_mask=mask)
    return replace(
        one,
        sample=replace(one.sample, num_tokens=len(blocks), response="".join(pieces)),
        token_ids=np.arange(len(blocks), dtype=np.int32),
        conversations=np.array(numbers, np.int32),
        policy_versions=every.astype(np.int32),
        **dict.fromkeys(floats, np.where(mask, every, np.nan)),
    )


SHOWN = """
    const shown = () => all(".tokens").map((one) => [...one.children].map((part) =>
        part.className === "conversation" || part.className === "who" ? `[${part.textContent}]`
        : part.textContent).join(""));"""


@needs_browser
def test_conversations_are_read_one_by_one_or_in_time(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    others = answer(0, 1, "wrong", 1)
    TokenLog(run, resume_step=0).write(0, [of_three_conversations(), others])
    assert view.main([str(run)]) == 0
    script = f"""{SHOWN}
    const found = [shown()];
    choose("order", "time"); found.push(shown(), location.hash);
    const token = all(".tokens span")[2];
    token.dispatchEvent(new MouseEvent("mouseover", {{bubbles: true}}));
    found.push(document.getElementById("tip").textContent);
    choose("order", "");
    const search = document.getElementById("search");
    search.value = "sub rest"; search.dispatchEvent(new Event("input"));
    await wait(600);
    found.push(all(".row").length, all(".hit").map((one) => one.textContent));
    return found;"""
    grouped, in_time, where, tip, rows, hits = use(run / "view.html", tmp_path, script)
    assert grouped == [
        "[conversation 0][turn 1]main [environment]reply[turn 3] on"
        "[conversation 1][environment]<b>ask[turn 2] sub[turn 5] rest"
        "[conversation 2][environment]other[turn 4] third",
        "[turn 1]a[environment]\u27e8U+2028\u27e9[turn 2]</b>",
    ]
    assert in_time == [
        "[conversation 0][turn 1]main [conversation 1][environment]<b>ask[turn 2] sub"
        "[conversation 0][environment]reply[turn 3] on"
        "[conversation 2][environment]other[turn 4] third[conversation 1][turn 5] rest",
        grouped[1],
    ]
    assert "order=time" in where and "token 2, id 2" in tip and "conversation 1" in tip
    assert rows == 1 and hits == [" sub", " rest"]


@needs_browser
def test_the_middle_of_a_long_answer_is_left_out_by_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns keep their numbers, and each conversation says how much of it is missing."""
    monkeypatch.setattr(module, "MOST_OF_RESPONSE", 4)
    run = write_run(tmp_path / "run")
    TokenLog(run, resume_step=0).write(0, [of_three_conversations()])
    assert view.main([str(run)]) == 0
    script = f"""{SHOWN} const found = shown(); choose("order", "time"); return [found, shown()];"""
    [grouped], [in_time] = use(run / "view.html", tmp_path, script)
    assert grouped == (
        "[conversation 0][turn 1]main  [\u2026 2 tokens \u2026] "
        "[conversation 1][environment]<b>ask [\u2026 1 tokens \u2026] [turn 5] rest"
        "[conversation 2] [\u2026 1 tokens \u2026] [turn 4] third"
    )
    assert in_time == (
        "[conversation 0][turn 1]main [conversation 1][environment]<b>ask [\u2026 1 tokens \u2026] "
        "[conversation 0] [\u2026 2 tokens \u2026] [conversation 2] [\u2026 1 tokens \u2026] "
        "[turn 4] third[conversation 1][turn 5] rest"
    )


@needs_browser
def test_a_page_without_several_conversations_does_not_speak_of_them(
    page: Path, tmp_path: Path
) -> None:
    shown = re.sub("<script.*?</script>", "", dump(page, tmp_path), flags=re.DOTALL)
    assert "choose-order" not in shown and 'class="conversation"' not in shown


@needs_browser
def test_a_reloaded_page_is_as_it_was_and_an_old_link_leads_somewhere(
    page: Path, tmp_path: Path
) -> None:
    script = """choose("color", "none"); return [location.hash, all(".tokens [style]").length];"""
    where, colored = use(page, tmp_path, script)
    assert "color=none" in where and colored == 0
    for place, is_colored in ((where, False), ("#run=3", True), ("#run=-1&color=none", False)):
        shown = dump(f"{page.as_uri()}{place}", tmp_path)
        assert shown.count("<article") == 2, place
        (choice,) = re.findall(r'<option value="(\w+)" selected="">(?:none|log-ratio)<', shown)
        assert (choice, "background-color" in shown.partition('class="tokens"')[2]) == (
            ("log_ratio", True) if is_colored else ("none", False)
        ), place


@needs_browser
def test_a_run_without_tokens_is_shown_as_text(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    SampleLog(run).append([sample_of(0, response="<b>old</b>")])
    assert view.main([str(run), "--output", str(tmp_path / "old.html")]) == 0
    shown = dump(tmp_path / "old.html", tmp_path)
    assert "&lt;b&gt;old&lt;/b&gt;" in shown and "Text only" in shown
    assert "choose-color" not in re.sub("<script.*?</script>", "", shown, flags=re.DOTALL)


def test_a_page_has_room_for_so_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First and last step, and evenly between; of a long answer its beginning and its end."""
    run = write(tmp_path / "run", range(9))

    def head(*arguments: str) -> dict[str, Any]:
        assert view.main([str(run), *arguments]) == 0
        found: dict[str, Any] = blocks((run / "view.html").read_text())["head"]["runs"][0]
        return found

    assert head()["steps"] == [*range(9)]
    assert head("--steps", "2:4")["steps"] == [2, 3, 4] and head("--steps", "7:")["steps"] == [7, 8]
    monkeypatch.setattr(module, "MOST_TOKENS", 3 * 12)
    assert (head()["steps"], head()["leftOut"]) == ([0, 4, 8], 6)
    monkeypatch.setattr(module, "MOST_TOKENS", 1)
    assert head()["steps"] == [0, 8] and head("--steps", ":0")["steps"] == [0]
    monkeypatch.setattr(module, "MOST_OF_RESPONSE", 2)
    head()
    (one, *_) = blocks((run / "view.html").read_text())["group-1"]["responses"]
    assert one["pieces"] == ["a", "</b>"] and one["log_ratio"] == [0.25, 0.5]


def test_what_cannot_be_shown_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run")

    def fails(*arguments: object) -> str:
        assert view.main([*map(str, arguments)]) == 1
        return capsys.readouterr().err

    assert "no such folder" in fails(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "config.toml" in fails(tmp_path / "empty")
    without = write_run(tmp_path / "without")
    assert "tokens/" in (said := fails(without)) and "samples_per_step" in said
    assert "steps 0 to 2" in fails(run, "--steps", "5:6")
    assert "--output" in fails(run, "--output", tmp_path / "page.txt")
    assert "--output" in fails(run, "--output", tmp_path / "none/page.html")
    with make_server(run, port=None) as bound:
        assert str(bound.server_port) in fails(run, "--live", "--port", bound.server_port)
    path = token_files(run)[1]
    path.write_bytes(path.read_bytes()[:-50])
    assert str(path) in (said := fails(run)) and "damaged" in said
    assert view.main([str(run), "--steps", "2:2"]) == 0  # the others are whole
    for wrong in ("--steps 3", "--steps 4:2", "--port 80", "--live --port 0"):
        with pytest.raises(SystemExit) as ended:
            view.main([str(run), *wrong.split()])
        assert ended.value.code == 2


def test_a_page_replaces_only_pages_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, output = write(tmp_path / "run"), tmp_path / "samples.html"
    of_report = make_page([read_data(run, "run")], title="Samples", report="report.html")
    for page, given in ((output, ["--output", str(output)]), (run / "view.html", [])):
        for theirs in ("<!DOCTYPE html>\n", of_report):
            page.write_text(theirs)
            assert view.main([str(run), *given]) == 1
            said = capsys.readouterr().err
            assert "--output" in said and str(page.parent) in said and page.name in said
            assert page.read_text() == theirs
        page.unlink()
        for _ in range(2):
            assert view.main([str(run), *given]) == 0
