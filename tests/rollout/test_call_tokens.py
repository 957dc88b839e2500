"""`environment.max_call_tokens`: long outputs of calls lose their middle, and the model is told."""

from __future__ import annotations

import functools
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gapo_megatron.config import EnvironmentConfig
from gapo_megatron.data.messages import special_pattern, without_special
from gapo_megatron.errors import ConfigError
from gapo_megatron.rollout import environments
from gapo_megatron.rollout.agents import Session
from gapo_megatron.rollout.agents.environment import Agents
from gapo_megatron.rollout.call_metrics import call_metrics, sum_calls
from gapo_megatron.rollout.chat import cut_middle
from gapo_megatron.rollout.engine import Request
from gapo_megatron.rollout.generate import generate
from tests.acting import acting_of
from tests.messages import mentions
from tests.rollout.test_agents import (
    CALL,
    EOS,
    FURTHER,
    PROMPTS,
    QUESTION,
    SETTINGS,
    TOKENIZER,
    TOOLS,
    ask,
    run,
    says,
)
from tests.rollout.test_chat import ids_of
from tests.scripted_engine import ScriptedEngine

ONE = {"prompts": PROMPTS[:1], "settings": replace(SETTINGS, num_samples=2)}
LINE = re.compile(r"\n\[\.\.\. (\d+) tokens cut \.\.\.\]\n")


def test_what_stays_is_the_beginning_and_the_end() -> None:
    generator = random.Random(0)
    num_cuts = 0
    for _ in range(300):
        alphabet = generator.choice(["ab 1\n", "aé漢字🙂", "the answer is 84 "])
        text = "".join(generator.choices(alphabet, k=generator.randrange(60)))
        most = generator.randrange(1, 30)
        tokens = ids_of(TOKENIZER, text)
        found, num_cut = cut_middle(text, TOKENIZER, max_tokens=most)
        assert num_cut == max(len(tokens) - most, 0)
        if not num_cut:
            assert found == text
            continue
        num_cuts += 1
        (line,) = LINE.finditer(found)
        begin, end = found[: line.start()], found[line.end() :]
        assert int(line[1]) == num_cut
        assert text.startswith(begin) and text.endswith(end)
        # All but the parts of two characters, of at most four bytes, and so tokens, each.
        num_kept = len(ids_of(TOKENIZER, begin)) + len(ids_of(TOKENIZER, end))
        assert num_kept <= most
        assert num_kept >= most - 6 or not text.isascii()
    assert num_cuts > 50
    assert cut_middle("x" * 9_999, TOKENIZER, max_tokens=0) == ("x" * 9_999, 0)


@pytest.mark.parametrize("role", ["tool", "user"])
def test_the_tools_environment_cuts_results(role: str, tmp_path: Path) -> None:
    """The metric counts calls with a cut; a resumed run reads it from its journal."""
    config = EnvironmentConfig(kind="tools", max_call_tokens=8, settings={"role": role})
    tools = environments.build(config, TOKENIZER)
    long = '<tool_call>{"name": "calculator", "arguments": {"expression": "10 ** 99"}}</tool_call>'
    expected, num_cut = cut_middle(str(10**99), TOKENIZER, max_tokens=8)
    assert num_cut > 8

    def script(request: Request) -> list[int]:
        number = request.response_ids.tolist().count(EOS) // 2  # of the turn, and of the result
        return [*ids_of(TOKENIZER, (long, CALL, "84")[number]), EOS]

    for _ in range(2):
        acting = acting_of(tools, eos_token_ids=[EOS], run_dir=tmp_path, tokenizer=TOKENIZER)
        engine = ScriptedEngine(script)
        calls = acting.calls("step_3", engine.replicas)
        groups = generate(engine, PROMPTS[:1], SETTINGS, calls=calls)
        assert groups is not None
        for one in groups[0]:
            text = TOKENIZER.decode(one.token_ids)
            assert text.count(expected) == 1 and text.count("tokens cut") == 1
            assert not one.failure and "84" in text
        metrics, _ = call_metrics(sum_calls(groups, [0], calls.counts))
        assert metrics["environment/shortened_share"] == pytest.approx(1 / 3)


def test_an_agents_results_are_cut_for_the_model_alone() -> None:
    """The agent goes on repeating what it sent; only messages of the role `tool` are cut."""
    result = "\n".join(f"line {i} of a long file" for i in range(60))
    note = "a long instruction " * 40
    config = EnvironmentConfig(kind="x.py:solve", max_call_tokens=20)

    def solve(session: Session) -> str:
        messages: list[Any] = [{"role": "system", "content": note}, QUESTION]
        first = ask(session, messages, tools=TOOLS)
        (call,) = first.tool_calls
        messages += [first, {"role": "tool", "tool_call_id": call.id, "content": result}]
        second = ask(session, messages, tools=TOOLS)
        messages += [second, FURTHER]
        return str(ask(session, messages, tools=TOOLS).content)

    agents = Agents(TOKENIZER, functools.partial(solve), config)
    episodes, _ = run(solve, says(CALL, "so", "84"), agents=agents, **ONE)
    expected, num_cut = cut_middle(result, TOKENIZER, max_tokens=20)
    assert num_cut > 100
    for one in episodes:
        assert (one.failure, one.final_text) == ("", "84")
        text = TOKENIZER.decode(one.token_ids)
        assert text.count(expected) == 1 and text.count("tokens cut") == 1 and note in text


def test_where_nothing_would_be_cut_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    methods = "begin = respond = judge = None"
    path.write_text(
        f"class Plain:\n    {methods}\n    def __init__(self, tokenizer): ...\n"
        f"class Cuts:\n    begin = respond = judge = print\n"
        "    def __init__(self, tokenizer, *, max_call_tokens=0): self.most = max_call_tokens\n"
    )
    with pytest.raises(ConfigError, match=mentions("environment.max_call_tokens", "5", "Plain")):
        environments.check(EnvironmentConfig(kind=f"{path}:Plain", max_call_tokens=5))
    config = EnvironmentConfig(kind=f"{path}:Cuts", max_call_tokens=5)
    environments.check(config)
    assert environments.build(config, TOKENIZER).most == 5  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=mentions("max_call_tokens", "5", "one_turn")):
        EnvironmentConfig(max_call_tokens=5)


@pytest.mark.parametrize("most", [0, 900])
def test_a_result_is_cut_once(most: int) -> None:
    """In tokens if they are limited, and it says so; in characters otherwise."""
    config = EnvironmentConfig(kind="tools", max_call_tokens=most)
    tools = environments.build(config, TOKENIZER)
    text = "".join(f"line {i}\n" for i in range(1000))
    cleaned = tools._clean(text)  # type: ignore[attr-defined]
    assert (len(cleaned) == len(text)) == bool(most)
    assert (" ... " in cleaned) != bool(most)


def test_special_tokens_within_special_tokens_are_removed_in_no_time() -> None:
    pattern = special_pattern(TOKENIZER)
    open, end = "<|im_", "end|>"
    for depth in (1, 2, 5, 12):
        assert without_special(f"a{open * depth}{end * depth}b", pattern) == "ab"
    deep = without_special(f"a{open * 50_000}{end * 50_000}b", pattern)
    assert not pattern.search(deep)
