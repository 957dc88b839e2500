"""Which part of a response is judged, for every way in which models mark their thinking."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from gapo_megatron import rewards
from gapo_megatron.config import RewardConfig
from gapo_megatron.rewards import verifiers
from gapo_megatron.rewards.final_answer import CALL, final_answer, marked_text
from gapo_megatron.rollout.agents.choices import ChoiceWriter
from gapo_megatron.rollout.agents.requests import MODEL, read_request
from gapo_megatron.rollout.chat import ChatTemplate
from gapo_megatron.rollout.environments.one_turn import OneTurn
from gapo_megatron.rollout.environments.tools import Tools
from gapo_megatron.types import Episode, Outcome, Prompt
from tests.sandbox_setup import SUM, fenced, needs_sandbox
from tests.tokenizers import byte_level

HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>")
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"


class Way(NamedTuple):
    """A model that thinks: its special tokens, the end of its prompts, and its marks."""

    special: tuple[str, ...]
    prompt: str
    open: str
    close: str
    eos: str = "<|im_end|>"

    def tokenizer(self) -> Any:
        return byte_level(*self.special, eos=self.eos)


WAYS = {
    "text": Way((), "Question: ", "<think>\n", "</think>\n\n"),
    "special tokens": Way(("<think>", "</think>"), "Question: ", "<think>\n", "</think>\n\n"),
    "opened by the template, text": Way((), "assistant: <think>\n", "", "</think>"),
    "opened by the template, tokens": Way(
        ("<think>", "</think>"), "assistant: <think>\n", "", "\n</think>\n\n"
    ),
    "begun by the template, text": Way(
        ("<|assistant|>",), "<|assistant|>\n<think>\nOkay, so", "", "</think>"
    ),
    "written in the question": Way(
        (), "Write\n<think>\nOkay\nfirst. Answer: ", "<think>", "</think>"
    ),
    "begun by the template, tokens": Way(
        ("<think>", "</think>", "<|user|>", "<|assistant|>"),
        *("<|user|>?<|assistant|><think>\nOkay, so", "", "</think>"),
    ),
    "opened by both": Way(("<think>", "</think>"), "assistant: <think>", "<think>", "</think>"),
    "thought of the prompt": Way((), "<think></think> Answer: ", "<think>", "</think>"),
    "magistral": Way(("[THINK]", "[/THINK]"), "[/INST]", "[THINK]", "[/THINK]"),
    "seed_oss": Way(("<seed:think>", "</seed:think>"), "\n", "<seed:think>\n", "</seed:think>\n"),
    "gpt_oss": Way(HARMONY, "<|start|>assistant", ANALYSIS, NEXT + FINAL, "<|return|>"),
    "gpt_oss, tools": Way(
        HARMONY,
        "<|start|>assistant",
        f"{ANALYSIS}A tool.{NEXT}<|channel|>commentary to=f <|constrain|>json<|message|>",
        f"<|call|><|start|>assistant{ANALYSIS}Well.{NEXT}<|channel|>final json<|message|>",
        "<|return|>",
    ),
    "gpt_oss, opened by the prompt": Way(
        HARMONY, "<|start|>assistant" + ANALYSIS, "", NEXT + FINAL, "<|return|>"
    ),
}

PROGRAM = "print(sum(map(int, input().split())))"
BANANA = json.dumps({"instructions": [{"id": "keywords:existence", "keywords": ["banana"]}]})
KINDS: dict[str, tuple[str, str, str]] = {
    "math": ("\\boxed{41}", "\\boxed{7}", "41"),
    "code": (fenced(PROGRAM), fenced("print(5)"), json.dumps(SUM)),
    "instructions": ("A banana.", "An apple.", BANANA),
    "own": ("banana", "apple", "banana"),
    "own, whole": ("banana", "apple", "banana"),
}
"""A right answer, a wrong one, and the reference."""

SOURCE = """
def final(response, answer):
    return response == answer

def whole(response, answer, whole_response, level="2"):
    return response == answer and "<think>" in whole_response and level == "2"
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rewards.Pool]:
    path = tmp_path_factory.mktemp("verifiers") / "mine.py"
    path.write_text(SOURCE)
    others = {
        "code": {"kind": "code", "timeout_s": 300},
        "instructions": {"kind": "instructions"},
        "own": {"kind": f"{path}:final"},
        "own, whole": {"kind": f"{path}:whole"},
    }
    config = RewardConfig(kind="math", verifiers=others)
    with rewards.start_pool(config, num_workers=1) as pool:
        yield pool


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def episode_of(way: Way, response: str, prompt: Prompt, *, ends: bool = True) -> Episode:
    tokenizer = way.tokenizer()
    tokens = encode(tokenizer, response) + [tokenizer.eos_token_id] * ends
    array = np.array(tokens, np.int32)
    return Episode(prompt, 0, array, np.zeros(len(array), np.float32), truncated=not ends)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_follows_the_thinking_is_the_answer(way: Way) -> None:
    tokenizer = way.tokenizer()
    asked = Prompt("p", tuple(encode(tokenizer, way.prompt)), "7")
    for response, ends, final in (
        (f"{way.open}no{way.close}yes", True, "yes"),
        (f"{way.open}no{way.close}yes", False, "yes"),  # cut off after it
        (f"{way.open}yes{way.close}no", True, "no"),
        (f"{way.open}no yes", False, None),
        (f"{way.open}no yes", True, None),  # ended in its thought
    ):
        text, _ = OneTurn(tokenizer).judge(episode_of(way, response, asked, ends=ends))
        assert final_answer(text) == final, response


@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=[needs_sandbox] * (one == "code")) for one in KINDS]
)
def test_every_verifier_judges_the_final_answer_alone(pool: rewards.Pool, kind: str) -> None:
    right, wrong, answer = KINDS[kind]
    texts = [f"<think>{wrong}</think>{right}", f"<think>{right}</think>{wrong}"]
    texts.append(f"<think>{wrong}{right}")
    verdicts = pool.judge([(text, answer, "" if kind == "math" else kind) for text in texts])
    assert [one.outcome for one in verdicts] == ["correct", "wrong", "wrong"], verdicts


@pytest.mark.parametrize(
    ("special", "prompt", "response", "text", "final"),
    [
        # Nothing is marked.
        ((), "p", "It is 5.", "It is 5.", "It is 5."),
        (HARMONY, "<|start|>assistant", "It is 5.<|end|>", "It is 5.", "It is 5."),
        # The prompt has closed the thinking, or only speaks of it.
        ((), "<think>\n\n</think>\n\n", "5", "5", "5"),
        ((), "Write <think> first.\n", "5", "5", "5"),
        (("<|im_start|>",), "Begin with\n<think>\n.<|im_start|>assistant\n", "5", "5", "5"),
        ((), "<think>\nNo.</think>\n", "5", "5", "5"),
        # Several thoughts, thoughts in thoughts, ends without a beginning.
        ((), "p", "<think>a</think>1<think>b</think>2", None, "2"),
        ((), "p", "<think>a<think>b</think>c</think>2", None, "2"),
        ((), "p", "a</think>b</think>2", None, "2"),
        ((), "p", "<think>a</think>2<think>b", None, "2"),
        ((), "p", "2<think>b", None, None),
        ((), "<think>\n", "a", "<think>\na", None),
        # Other models' marks are text.
        ((), "[THINK]", "a[/THINK]b", "a[/THINK]b", "a[/THINK]b"),
        ((), "<|start|>assistant", f"{FINAL}5", f"{FINAL}5", f"{FINAL}5"),
        # Channels: the last final one, whatever is beside it.
        (HARMONY, "<|start|>assistant", f"{FINAL}5", "<think></think>5", "5"),
        (HARMONY, "<|start|>assistant", f"{ANALYSIS}a{NEXT}", "<think>a", None),
        (HARMONY, "<|start|>assistant", f"{ANALYSIS}a{NEXT}<|message|>b", "<think>a\nb", None),
        (HARMONY, "<|start|>assistant", "<|channel|>final", "<think>", None),
        (HARMONY, "<|start|>assistant", f"{ANALYSIS}a</think>5", "<think>a5", None),
        (
            *(HARMONY, "<|start|>assistant", f"{FINAL}1{NEXT}{ANALYSIS}a{NEXT}{FINAL}2"),
            *("<think>1\na</think>2", "2"),
        ),
    ],
)  # fmt: skip
def test_where_the_final_answer_is(
    special: Sequence[str], prompt: str, response: str, text: str | None, final: str | None
) -> None:
    tokenizer = byte_level(*special)
    tokens = [*encode(tokenizer, response), tokenizer.eos_token_id]
    found = marked_text(tokenizer, tokens, before=encode(tokenizer, prompt))
    assert found == (response if text is None else text)
    assert final_answer(found) == final
    assert final is None or final_answer(final) == final


@pytest.mark.parametrize("special", [(), ("<|im_start|>", "<tool>"), HARMONY])
def test_without_marks_the_text_is_that_of_the_tokenizer(special: tuple[str, ...]) -> None:
    tokenizer = byte_level(*special)
    marks = {tokenizer.convert_tokens_to_ids(one) for one in HARMONY} if special == HARMONY else ()
    known = [one for one in range(len(tokenizer)) if one not in marks]
    draw = random.Random(0)
    for _ in range(100):
        tokens = draw.choices(known, k=40)
        plain = tokenizer.decode(tokens, skip_special_tokens=True)
        assert marked_text(tokenizer, tokens, before=draw.choices(known, k=40)) == plain


THINK_TOKENS = byte_level("<think>", "</think>")


def test_each_turn_has_its_own_thinking() -> None:
    """The last turn is judged, and its thinking may be opened by what precedes it."""
    parts = ["a</think>first", "<|im_end|>", "result <think>\n", "b</think>second"]
    turns = [encode(THINK_TOKENS, one) for one in parts]
    tokens = np.concatenate(turns).astype(np.int32)
    mask = np.concatenate([np.full(len(one), i != 2) for i, one in enumerate(turns)])
    prompt = Prompt("p", tuple(encode(THINK_TOKENS, "<think>")), "5")
    whole = Episode(prompt, 0, tokens, np.zeros(len(tokens), np.float32), response_mask=mask)
    cut = len(encode(THINK_TOKENS, "</think>second"))
    for judge in (OneTurn(THINK_TOKENS).judge, Tools(THINK_TOKENS).judge):
        assert judge(whole) == ("<think>\nb</think>second", "5")
        text, _ = judge(
            Episode(prompt, 0, tokens[:-cut], whole.log_probs[:-cut], response_mask=mask[:-cut])
        )
        assert final_answer(text) is None


@pytest.mark.parametrize("are_tokens", [(), CALL])
def test_an_agent_sees_the_thinking_marked(are_tokens: tuple[str, ...]) -> None:
    """What it returns of a message is then judged as the model's own turn would be.

    A call that is only thought of is none.
    """
    marks = ("<think>", "</think>", "<|im_start|>", *are_tokens)
    tokenizer = copy.deepcopy(byte_level(*marks))
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "<|im_start|>assistant\n<think>\n"
    )
    before = ChatTemplate(tokenizer).opening([{"role": "user", "content": "?"}])
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "?"}], "tools": [tool]}
    request = read_request(body, overrule=lambda *_: None, has_grammars=False)
    for thought, call in itertools.product(
        ("a", "a<tool_call>{}</tool_call>", "a <tool_call>"),
        ("", CALL[0] + '{"name": "f"}' + CALL[1]),
    ):
        turn = encode(tokenizer, f"{thought}</think>b{call}<|im_end|>")
        nothing = [0.0] * len(turn), [()] * len(turn)
        choice = ChoiceWriter(tokenizer, ()).choice(turn, *nothing, before=before, request=request)
        message = choice["message"]
        assert message["content"] == f"<think>{thought}</think>b"
        assert len(message.get("tool_calls", ())) == bool(call)


def test_a_verifier_may_take_the_whole_response(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "all_of.py").write_text(
        "def given(response, answer, whole_response, level):\n"
        "    return (response, whole_response, level) == eval(answer)\n"
        "def row(response, answer, **row):\n"
        "    return (response, sorted(row)) == eval(answer)\n"
    )
    row = {"level": "2", "whole_response": "of the data"}

    def outcome(name: str, response: str, expected: object) -> Outcome:
        verifier = verifiers.load(f"all_of.py:{name}", {}, setting="reward.kind")
        return verifier.judge(response, repr(expected), row, correct_above=0.5).outcome

    assert verifiers.load("all_of.py:given", {}, setting="reward.kind").columns == {"level"}
    text = "<think>a</think>\n\nb"
    assert outcome("given", text, ("b", text, "2")) is Outcome.CORRECT
    # It has no final answer: the verifier judges it all the same.
    assert outcome("given", "<think>a", ("", "<think>a", "2")) is Outcome.CORRECT
    assert outcome("row", "<think>a", ("", [*row])) is Outcome.WRONG
    assert outcome("row", text, ("b", [*row])) is Outcome.CORRECT
