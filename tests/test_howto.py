"""The pages of docs/howto: their files are used as they stand, and their commands are run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from transformers import Qwen2Tokenizer

from gapo_megatron import rewards
from gapo_megatron.config import Config, RewardConfig, load_config
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.io.sample_files import read_samples
from gapo_megatron.rollout.calls import Acting
from gapo_megatron.rollout.engine import Request
from gapo_megatron.rollout.generate import generate
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.rollout.turns import Turns
from gapo_megatron.run.early_checks import check_before_imports
from gapo_megatron.run.inputs import Inputs, check_inputs
from gapo_megatron.types import Outcome, Prompt
from gapo_tools.demonstration import demo_task
from gapo_tools.dry_run.command import why_not_run
from tests.clone import ROOT, make_clone
from tests.messages import mentions
from tests.scripted_engine import ScriptedEngine
from tests.train_setup import steps_of
from tests.waiting import HANG_S

DATA = ROOT.parent / "shared" / "data"
PAGES = sorted(path.stem for path in (ROOT / "docs/howto").glob("*.md"))
FILE = re.compile(r"^```(?:python|toml)\n# (\w+\.\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
METRIC = re.compile(r"`(environment/\w+)`")
BROUGHT = ("make env", "tools/prepare_data.py")
"""Commands that are not run: they make the environment, or need data that a user brings."""


def text_of(page: str) -> str:
    return (ROOT / f"docs/howto/{page}.md").read_text(encoding="utf-8")


def lines_of(page: str) -> list[str]:
    """Lines of the page's commands; joined where they end with a backslash."""
    blocks = "".join(SHELL.findall(text_of(page))).replace("\\\n", " ")
    return [line for line in blocks.splitlines() if line.strip()]


def run_line(line: str, folder: Path) -> str:
    """Run a line of a page in a shell, as in the root of a clone; returns the output."""
    line = line.replace(".venv/bin/python", sys.executable)
    done = subprocess.run(
        line,
        shell=True,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"{line}\n{done.stdout[-4000:]}"
    return done.stdout


def write_files(page: str, folder: Path) -> list[Config]:
    """Write the page's files into the working directory; returns its configs."""
    files = dict(FILE.findall(text_of(page)))
    for name, text in files.items():
        (folder / name).write_text(text)
    return [load_config(folder / name) for name in files if name.endswith(".toml")]


@pytest.fixture
def clone(clone: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone whose demo model is not trained yet, in the working directory."""
    task = clone / "runs/demo/task"
    demo_task.write_task(task, seed=0, num_eval=8, num_train=400, num_supervised=200)
    rows = map(json.loads, (task / "supervised.jsonl").read_text().splitlines())
    model = clone / "runs/demo/warm_start"
    tokenizer = demo_task.write_tokenizer(demo_task.training_texts([*rows]), model)
    demo_task.write_initial_model(tokenizer, model, seed=0)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return clone


def inputs_of(page: str, clone: Path) -> tuple[Config, Inputs]:
    """Everything that a run checks and reads before it builds a model."""
    for line in lines_of(page):
        if line.startswith("grep"):
            run_line(line, clone)
    (config,) = write_files(page, clone)
    assert why_not_run(config) == []
    check_before_imports(config)
    return config, check_inputs(config)


def test_the_reward_judges_by_every_sum(clone: Path) -> None:
    config, inputs = inputs_of("own_reward", clone)
    row = next(one for one in inputs.problems if one.row["prompt"].count("+") == 3)
    terms = [int(term) for term in row.row["prompt"].rstrip("=").split("+")]
    sums = [sum(terms[:n]) for n in (2, 3, 4)]
    responses = [sums, [sums[0] + 1, *sums[1:]], [*sums[:2], sums[2] + 1]]
    items = [(">".join(map(str, one)), row.answer, "", row.row) for one in responses]
    with rewards.start_pool(config.reward, num_workers=1) as pool:
        verdicts = pool.collect(pool.submit(items))
    assert [one.grade for one in verdicts] == [1, pytest.approx(2 / 3), 0]
    assert [one.outcome for one in verdicts] == [Outcome.CORRECT, Outcome.WRONG, Outcome.WRONG]


class _JudgeServer(BaseHTTPRequestHandler):
    """Says what the response in the question says; of "late" nothing, until the test is over."""

    over = threading.Event()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = asked["messages"][0]["content"]
        [said] = re.findall(r"^Response: (.*)$", question, re.MULTILINE)
        assert self.path == "/v1/chat/completions" and "2+3=" in question and "5" in question
        if said == "late":
            self.over.wait(HANG_S)
        self.send_response(500 if said == "error" else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"message": {"content": said}}]}).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_a_judge_behind_an_address_holds_nothing_up(clone: Path) -> None:
    write_files("own_reward", clone)
    with ThreadingHTTPServer(("127.0.0.1", 0), _JudgeServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = {"url": f"http://127.0.0.1:{server.server_address[1]}/v1"}
        own = {"kind": "judge.py:Judge", "settings": settings}
        config = RewardConfig(**own, timeout_s=600, verifiers={"brief": {**own, "timeout_s": 1}})
        said = ["Yes.", "no", "maybe", "error", *["late"] * 20]
        items = [(one, "5", "brief" if one == "late" else "", {"prompt": "2+3="}) for one in said]
        with rewards.start_pool(config, num_workers=1) as pool:
            verdicts = pool.judge(items)
        _JudgeServer.over.set()
        server.shutdown()
    assert [one.outcome for one in verdicts[:2]] == [Outcome.CORRECT, Outcome.WRONG]
    assert {one.outcome for one in verdicts[2:]} == {Outcome.UNKNOWN}
    assert "500" in verdicts[3].reason and all("timeout" in one.reason for one in verdicts[4:])


@pytest.mark.parametrize(
    ("old", "new", "kind", "named"),
    [
        ("def verify", "def verfy", "misspelt.py", ("reward.kind", "misspelt.py", "'verify'")),
        ("prompt", "question", "other_column.py", ("train.jsonl:1", "'question'")),
        ("", "", "elsewhere/my_reward.py", ("no file", "working directory")),
    ],
)
def test_what_goes_wrong_with_a_reward_is_said(
    clone: Path, old: str, new: str, kind: str, named: tuple[str, ...]
) -> None:
    write_files("own_reward", clone)
    if old:
        (clone / kind).write_text((clone / "my_reward.py").read_text().replace(old, new))
    with pytest.raises((ConfigError, DataError), match=mentions(*named)):
        config = load_config(clone / "my_reward.toml", [f"reward.kind={kind}:verify"])
        check_before_imports(config)
        check_inputs(config)


@pytest.fixture
def acting(clone: Path) -> Iterator[tuple[Acting, Qwen2Tokenizer]]:
    config, inputs = inputs_of("own_environment", clone)
    tokenizer = inputs.tokenizer
    turns = Turns(tokenizer, config.environment.stop, eos_token_ids=[tokenizer.eos_token_id])
    acting = Acting(
        inputs.environment,
        config.environment,
        turns,
        max_response_tokens=config.rollout.max_response_tokens,
        vocab_size=len(tokenizer),
    )
    yield acting, tokenizer


def test_the_environment_asks_again(acting: tuple[Acting, Qwen2Tokenizer], clone: Path) -> None:
    """After a wrong answer once, after a right one never; the log has a line for each first."""
    act, tokenizer = acting

    def script(request: Request) -> list[int]:
        first = {3: "8>16", 4: "8>17"}[request.prompt_ids[0]]
        said = "9>17" if len(request.response_ids) else first
        return [*tokenizer.encode(said), tokenizer.eos_token_id]

    engine = ScriptedEngine(script)
    prompts = [Prompt(str(first), (first,), answer="17") for first in (3, 4)]
    settings = SamplingSettings(num_samples=1, max_response_tokens=48, seed=7)
    groups = generate(engine, prompts, settings, calls=act.calls("step_0", engine.replicas))
    assert groups is not None
    episodes = [one for group in groups for one in group]
    assert [one.failure for one in episodes] == ["", ""]
    texts = [tokenizer.decode(one.token_ids.tolist()) for one in episodes]
    assert texts == ["8>16</s>=9>17</s>", "8>17</s>"]
    assert [act.environment.judge(one) for one in episodes] == [("9>17", "17"), ("8>17", "17")]
    assert {*(clone / "calls.log").read_text().splitlines()} == {"3 0 8>16", "4 0 8>17"}


def test_the_mix_draws_what_it_says(clone: Path) -> None:
    _, inputs = inputs_of("mix_data", clone)
    drawn = {
        step: [one.source for one in inputs.source.next_batch(32, step=step)] for step in (0, 5)
    }
    assert {step: names.count("easy") for step, names in drawn.items()} == {0: 8, 5: 0}
    levels = {(one.source, one.level == "additions_2") for one in inputs.problems}
    assert levels == {("easy", True), ("hard", False)}


def test_a_mix_on_a_base_with_one_file_is_refused_with_the_remedy(clone: Path) -> None:
    write_files("mix_data", clone)
    config = clone / "mix.toml"
    config.write_text(re.sub("train_path.*", "", config.read_text()))
    with pytest.raises(ConfigError, match=mentions("train_path", 'train_path = ""')):
        load_config(config)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with a demo model less trained than a reader's, and fewer held-out problems."""
    folder = make_clone(tmp_path_factory.mktemp("clone"))
    run_line(".venv/bin/python tools/demo.py --prepare supervised.num_steps=20", folder)
    held_out = folder / "runs/demo/task/eval.jsonl"
    held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[::8]))
    return folder


@pytest.mark.system
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_followed_from_its_first_line_to_its_last(
    page: str, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prepared)
    (config,) = write_files(page, prepared)
    for line in lines_of(page):
        if not any(one in line for one in (*BROUGHT, "--prepare")):
            run_line(line, prepared)
    run_dir = prepared / config.run.output_dir
    steps = steps_of(run_dir)
    assert [one["step"] for one in steps] == [*range(config.run.num_steps)]
    assert all(one["groups/unknown_verdicts"] == 0 for one in steps)
    assert {*METRIC.findall(text_of(page))} <= steps[-1].keys()
    assert {one.step for one in read_samples(run_dir)} == {*range(config.run.num_steps)}
    assert (run_dir / "report/samples.html").exists()
