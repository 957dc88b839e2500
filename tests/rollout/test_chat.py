"""Turns of a chat by the families' own templates, as TRL ships them; the tokenizer is small."""

from __future__ import annotations

import copy
from importlib import resources
from typing import Any

import numpy as np
import pytest

from gapo_megatron.errors import ConfigError
from gapo_megatron.rollout.chat import ChatTurns
from gapo_megatron.types import Episode, Prompt
from tests.messages import mentions
from tests.tokenizers import byte_level

pytest.importorskip("trl")

CHATML = ("<|im_end|>", "<|im_start|>")
LLAMA = ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
GEMMA = ("<end_of_turn>", "<bos>", "<start_of_turn>")
SPECIAL = {
    "qwen2_5": CHATML,
    "qwen2_5_training": CHATML,
    "qwen3": CHATML,
    "qwen3_training": CHATML,
    "qwen3_instruct_2507": CHATML,
    "llama3": LLAMA,
    "llama3_1": LLAMA,
    "llama3_2": LLAMA,
    "gemma3": GEMMA,
    "phi3": ("<|end|>", "<|user|>", "<|assistant|>"),
}
"""EOS and special tokens of each template; those of the families of configs/ are among them."""
THINKING = "<think>\nlet me think\n</think>\n\n<tool>12 * 7</tool>"


def tokenizer_of(name: str) -> Any:
    eos, *special = SPECIAL.get(name, CHATML)
    tokenizer = copy.deepcopy(byte_level(*special, eos=eos))
    folder = resources.files("trl") / "chat_templates"
    tokenizer.chat_template = (folder / f"{name}.jinja").read_text()
    tokenizer.name_or_path = name
    if bos := next((one for one in special if one in ("<bos>", "<|begin_of_text|>")), ""):
        tokenizer.bos_token = bos
    return tokenizer


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def render(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return ids_of(tokenizer, text)


def episode_of(tokens: list[int]) -> Episode:
    log_probs = np.zeros(len(tokens), np.float32)
    return Episode(Prompt("0", (5,), answer=""), 0, np.array(tokens, np.int32), log_probs)


@pytest.mark.parametrize("ends_with", ["eos", "text"])
@pytest.mark.parametrize("said", [THINKING, "it is 84, surely"])
@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("qwen2_5", "tool"),
        ("qwen2_5", "user"),
        ("qwen2_5_training", "tool"),
        ("qwen3", "tool"),
        ("qwen3_instruct_2507", "tool"),
        ("qwen3_instruct_2507", "user"),
        ("llama3", "user"),
        ("llama3_1", "tool"),
        ("llama3_1", "user"),
        ("llama3_2", "tool"),
        ("llama3_2", "user"),
        ("gemma3", "user"),
    ],
)
def test_sampled_and_appended_tokens_are_the_conversation(
    name: str, role: str, said: str, ends_with: str
) -> None:
    """In three turns, each with what the template makes of it alone."""
    tokenizer = tokenizer_of(name)
    turns = ChatTurns(tokenizer, role=role)
    messages = [{"role": "user", "content": "What is 12 * 7?"}]
    tokens = render(tokenizer, messages)
    num_prompt = len(tokens)
    for result in ("84", "a -> <b>\n\nc"):
        tokens += ids_of(tokenizer, said)
        if ends_with == "eos":
            tokens.append(tokenizer.eos_token_id)
        tokens += turns.tokens(episode_of(tokens[num_prompt:]), [result])
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": role, "content": result})
        assert tokens == render(tokenizer, messages)


def test_several_messages_follow_a_turn() -> None:
    tokenizer = tokenizer_of("qwen2_5")
    said = [*ids_of(tokenizer, "x"), tokenizer.eos_token_id]
    messages = [{"role": "user", "content": "q"}]
    before = render(tokenizer, messages)
    messages.append({"role": "assistant", "content": "x"})
    messages += [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    appended = ChatTurns(tokenizer).tokens(episode_of(said), ["1", "2"])
    assert before + said + appended == render(tokenizer, messages)


@pytest.mark.parametrize(
    ("name", "role", "words"),
    [
        ("qwen3", "user", ["rewrites"]),  # removes the reasoning of turns before the last question
        ("deepseek_r1_distill", "user", ["rewrites"]),
        ("deepseekv3", "user", ["rewrites"]),
        ("glm4moe", "user", ["rewrites"]),
        ("gptoss", "user", ["rewrites"]),
        ("gptoss", "tool", ["fails", "tool call"]),
        ("gemma3", "tool", ["fails"]),
        ("phi3", "tool", ["leaves out"]),
    ],
)
def test_a_template_that_cannot_continue_is_refused(name: str, role: str, words: list[str]) -> None:
    with pytest.raises(ConfigError, match=mentions("model.hf_dir", name, role, *words)):
        ChatTurns(tokenizer_of(name), role=role)


def test_without_a_template_there_are_no_turns() -> None:
    with pytest.raises(ConfigError, match=mentions("model.hf_dir")):
        ChatTurns(byte_level())


def test_another_eos_than_the_templates_is_an_error() -> None:
    tokenizer = tokenizer_of("qwen2_5")
    turns = ChatTurns(tokenizer)
    other = tokenizer.convert_tokens_to_ids("<|im_start|>")
    with pytest.raises(ValueError, match=mentions(other, turns.end_of_turn)):
        turns.tokens(episode_of([5, other]), ["84"])
