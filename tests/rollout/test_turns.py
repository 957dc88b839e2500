"""Where a turn ends: at EOS, or at a text, on whatever tokens the text is spread."""

from __future__ import annotations

import re

import numpy as np
import pytest

from gapo_megatron.errors import ConfigError
from gapo_megatron.rollout.engine import Request
from gapo_megatron.rollout.generate import generate
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.rollout.turns import Turns, last_turn
from gapo_megatron.types import Episode, Prompt
from tests.acting import calls_of
from tests.messages import mentions
from tests.scripted_engine import ScriptedEngine
from tests.tokenizers import byte_level

TOKENIZER = byte_level("<|im_start|>", "«end»")
EOS = TOKENIZER.eos_token_id
PROMPT = Prompt("0", (5,), answer="")


def turns_of(*stop: str) -> Turns:
    return Turns(TOKENIZER, stop, eos_token_ids=[EOS])


def episode_of(text: str, *, given: str = "") -> Episode:
    """`given` was appended by the environment, before the text."""
    before, after = TOKENIZER.encode(given), TOKENIZER.encode(text)
    mask = np.array([False] * len(before) + [True] * len(after))
    tokens = np.array([*before, *after], np.int32)
    return Episode(PROMPT, 0, tokens, np.zeros(len(tokens), np.float32), response_mask=mask)


def test_a_text_ends_the_turn_where_its_last_token_ends() -> None:
    turns = turns_of("</tool>", "```output")
    text = "a->b <tool>12</tool> and ```output\n84"
    tokens = TOKENIZER.encode(text)
    ends = []
    for count in range(1, len(tokens) + 1):
        one = Episode(PROMPT, 0, np.array(tokens[:count], np.int32), np.zeros(count, np.float32))
        if turns.is_over(one):
            ends.append(TOKENIZER.decode(tokens[:count]))
            assert tokens[count - 1] in turns.stop_ids
    assert len(ends) == 2
    assert re.fullmatch(r"a->b <tool>12</tool>\s*", ends[0]), ends
    assert re.fullmatch(r".*```output\s*", ends[1]), ends


@pytest.mark.parametrize("rest", ["\n", "\n\n", ".", ">", ""])
def test_a_text_may_end_within_a_token(rest: str) -> None:
    """Whatever the tokenizer joins to the end of the text, the token is a stop token."""
    turns = turns_of("</tool>")
    for token in (t for t in TOKENIZER.get_vocab().values() if t not in turns.stop_ids):
        text = TOKENIZER.decode([token])
        assert ">" not in text[:1] and "</tool>" not in text, text
    tokens = TOKENIZER.encode(f"x</tool>{rest}")
    counts = range(1, len(tokens) + 1)
    over = [
        count
        for count in counts
        if turns.is_over(Episode(PROMPT, 0, np.array(tokens[:count]), np.zeros(count)))
    ]
    assert len(over) == 1
    assert "</tool>" in TOKENIZER.decode(tokens[: over[0]])
    assert "</tool>" not in TOKENIZER.decode(tokens[: over[0] - 1])


def test_only_the_models_own_words_end_its_turn() -> None:
    turns = turns_of("</tool>")
    assert turns.is_over(episode_of("x</tool>", given="y"))
    assert not turns.is_over(episode_of(">", given="</tool"))
    assert not turns.is_over(episode_of("", given="x</tool>"))
    assert turns.is_over(episode_of("x<|im_end|>", given="</tool>"))
    assert not turns.is_over(episode_of(""))
    assert TOKENIZER.decode(last_turn(episode_of("x</tool>", given="y"))) == "x</tool>"


def test_only_a_single_token_may_have_other_characters() -> None:
    turns = turns_of("«end»")
    assert turns.stop_ids == tuple(sorted([EOS, *TOKENIZER.encode("«end»")]))
    assert turns.is_over(episode_of("x«end»"))
    with pytest.raises(ConfigError, match=mentions("environment.stop", "</töol>")):
        turns_of("</töol>")
    assert turns_of().stop_ids == (EOS,)


def test_the_model_continues_where_a_stop_token_ended_no_text() -> None:
    """The same tokens as without stop tokens, with seeds of their own; no token is lost."""
    said = [*TOKENIZER.encode("a > b; x>1; y>2 </tool> never"), EOS]
    turns = turns_of("</tool>")

    def script(request: Request) -> list[int]:
        rest = said[len(request.response_ids) :]
        if request.response_ids[-1:].tolist() == [7]:
            return [EOS]
        ends = [i for i, token in enumerate(rest) if token in (*request.stop_ids, EOS)]
        return rest[: ends[0] + 1]

    engine = ScriptedEngine(script)
    settings = SamplingSettings(num_samples=1, max_response_tokens=100, seed=7)
    calls = calls_of(
        lambda one: [7] if one.response_mask is None else None,
        stop=("</tool>",), tokenizer=TOKENIZER, eos_token_ids=[EOS],
    )  # fmt: skip
    groups = generate(engine, [PROMPT], settings, calls=calls)
    assert groups is not None
    one = groups[0][0]
    assert one.response_mask is not None
    first = one.token_ids[: int(np.flatnonzero(~one.response_mask)[0])].tolist()
    assert first == said[: len(first)] and "</tool>" in TOKENIZER.decode(first)
    assert one.token_ids[len(first) :].tolist() == [7, EOS]
    assert len(engine.asked) > 3 and len({one.seed for one in engine.asked}) == len(engine.asked)
    assert all(request.stop_ids == turns.stop_ids for request in engine.asked)
    # Requests without a call between them are one turn.
    assert calls.timing is not None
    spans = [(one.is_call, one.num_tokens) for one in calls.timing.spans("0", 0)]
    assert spans == [(False, len(first)), (True, 1), (False, 1), (True, 0)]
    # Without an environment the response ends at the text.
    groups = generate(engine, [PROMPT], settings, calls=_uncalled())
    assert groups is not None and groups[0][0].token_ids.tolist() == first
    assert groups[0][0].finished and not groups[0][0].truncated


def _uncalled() -> object:
    calls = calls_of(lambda _: None, stop=("</tool>",), tokenizer=TOKENIZER, eos_token_ids=[EOS])
    calls.timing = None
    return calls


def test_a_stop_token_that_fills_the_response_truncates_it() -> None:
    said = TOKENIZER.encode("x>1; y>2")
    turns = turns_of("</tool>")
    ends = [i + 1 for i, token in enumerate(said) if token in turns.stop_ids]
    assert len(ends) > 1
    engine = ScriptedEngine(lambda request: said[len(request.response_ids) :][: ends[0]])
    settings = SamplingSettings(num_samples=1, max_response_tokens=ends[0], seed=7)
    groups = generate(engine, [PROMPT], settings, calls=_uncalled())  # type: ignore[arg-type]
    assert groups is not None
    assert groups[0][0].truncated and groups[0][0].token_ids.tolist() == said[: ends[0]]
