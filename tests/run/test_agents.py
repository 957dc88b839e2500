"""Runs of an agent that uses the `openai` client: real Megatron-core, real vLLM, real kills."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from gapo_megatron.io.sample_files import read_samples
from tests.programs import Program
from tests.run.test_environments import learned, weights_differ
from tests.train_setup import CONFIG, arguments, finish, metrics_of, prepare, run, steps_of

pytestmark = pytest.mark.system

AGENT = r"""
import openai, os, pathlib, signal


def solve(session, log):
    '''Asks, has the sum of the first two numbers looked up, asks again; right for even answers.

    Also asks for two continuations of another conversation, and goes on from the second.
    '''
    with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        messages = [{"role": "user", "content": session.problem["prompt"]}]
        turn = ask(client, session, messages)
        ended, turn = turn[-1], turn[:-1]
        with open(log, "a") as file:
            file.write(f"{session.problem['id']} {session.sample} {turn} {ended}\n")
        deadly = pathlib.Path(log + ".kill")
        if deadly.exists() and len(open(log).readlines()) >= int(deadly.read_text()):
            deadly.unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
        first, second, *_ = session.problem["prompt"].split("+")
        messages += [
            {"role": "assistant", "content": turn},
            {"role": "tool", "content": str(int(first) + int(second))},
        ]
        again = ask(client, session, messages)
        other = [{"role": "user", "content": first + "+"}]
        said = ask(client, session, other, n=2, choice=1)[:-1]
        other += [{"role": "assistant", "content": said}, {"role": "tool", "content": "="}]
        ask(client, session, other)
    is_even = sum(map(ord, turn + again)) % 2 == 0
    return str(eval(session.problem["prompt"].rstrip("="))) if is_even else "0"


def ask(client, session, messages, n=1, choice=0):
    options = {"stop": ["9"], "max_tokens": 5, "n": n}  # either ends some turns before EOS
    answer = client.chat.completions.create(model=session.model, messages=messages, **options)
    choice = answer.choices[choice]
    assert "9" not in choice.message.content and answer.usage.completion_tokens <= 5 * n
    return choice.message.content + {"length": "L", "stop": "S"}[choice.finish_reason]
"""

TEMPLATE = (
    "{% for one in messages %}"
    "{% if one.role == 'assistant' %}{{ one.content }}</s>"
    "{% else %}<pad>{{ one.content }}{% endif %}"
    "{% endfor %}"
)

SECTION = """
[environment]
kind = "{root}/agent.py:solve"
settings = {{ log = "{root}/log" }}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("agents")
    (root / "agent.py").write_text(AGENT)
    prepare(root, CONFIG + SECTION)
    (root / "base/chat_template.jinja").write_text(TEMPLATE)
    return root


def settings_of(root: Path, name: str) -> tuple[str, ...]:
    return (
        f'environment.settings={{log = "{root}/{name}.log"}}',
        "run.num_steps=3",
        "rollout.max_response_tokens=60",
        "batch.minibatch_prompts=8",  # one update of each step: every ratio is exactly 1
        "metrics.samples_per_step=8",
        "evaluation.every_steps=2",
    )


def calls_of(root: Path, name: str) -> list[str]:
    return (root / f"{name}.log").read_text().splitlines()


@pytest.fixture(scope="module")
def whole(root: Path) -> str:
    run(root, "whole", *settings_of(root, "whole"))
    return "whole"


def test_an_agent_trains(root: Path, whole: str) -> None:
    lines: list[dict[str, Any]] = steps_of(root / whole)
    assert len(lines) == 3
    for line in lines:
        assert line["environment/error_share"] == 0
        assert 4.5 < line["environment/turns"] <= 5 and line["environment/calls"] > 5
        assert 2.5 < line["environment/conversations"] <= 3
        assert line["ratio/abs_deviation_max"] == 0 and line["clip/fraction_sequences"] == 0
        assert line["groups/unknown_verdicts"] == 0
        assert line["optim/grad_norm"] > 0
    # Turns ended at their limit, and at a text or EOS.
    assert {one[-1] for one in calls_of(root, whole)} == {"L", "S"}
    (evaluated, *_) = [one for one in metrics_of(root / whole) if "eval/pass@1" in one]
    assert evaluated["eval/unknown_verdicts"] == 0 < evaluated["eval/pass@1"] < 1
    samples = read_samples(root / whole)
    assert {one.verdict for one in samples} == {"correct", "wrong"}
    for one in samples:
        # The other conversation, and the copy of it that its second choice has read.
        opening = f"<pad>{one.response.partition('+')[0]}+"
        assert one.prompt == "<pad>" and one.response.count(opening) == 2


def test_a_kill_while_agents_run_gives_the_same_run(root: Path, whole: str) -> None:
    """The agents begin anew, and are answered from the turns that there are."""
    num_calls = len(calls_of(root, whole))
    (root / "killed.log.kill").write_text(str(num_calls - 8))
    command = arguments(root, "killed", *settings_of(root, "killed"))
    finish(Program("gapo_megatron.train", *command), exit_code=-signal.SIGKILL)
    run(root, "killed", *settings_of(root, "killed"))
    calls = calls_of(root, "killed")
    assert {*calls} == {*calls_of(root, whole)} and num_calls <= len(calls) <= num_calls + 64
    assert learned(root, "killed") == learned(root, whole)
    assert not weights_differ(root, "killed", whole)


def test_an_agent_that_always_fails_is_unknown_and_ends_no_run(root: Path) -> None:
    """No response has a sampled token; the log says why."""
    (root / "broken.py").write_text("def solve(session):\n    return sesion\n")
    settings = (
        f"environment.kind={root}/broken.py:solve",
        "environment.settings={}",
        "run.num_steps=1",
        "metrics.samples_per_step=8",
        "evaluation.every_steps=1",
    )
    run(root, "broken", *settings)
    (line,) = steps_of(root / "broken")
    assert line["groups/unknown_verdicts"] == 32 and line["environment/error_share"] == 1
    samples = read_samples(root / "broken")
    assert samples and all("sesion" in one.reason for one in samples)
