"""What verifiers may ask for by name, and reward functions of other frameworks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gapo_megatron import rewards
from gapo_megatron.config import RewardConfig
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.rollout.turns import messages
from gapo_megatron.types import Episode, Outcome, Prompt, Verdict
from tests.messages import mentions
from tests.tokenizers import byte_level

SOURCE = """
def optional(response, answer, whole_response, messages, token_ids, prompt_token_ids, state, row):
    return [response, whole_response, messages, token_ids, prompt_token_ids, state, row] == eval(
        answer)

def one_column(response, answer, level, state):
    return [level, state] == eval(answer)

def all_columns(response, answer, state, **row):
    return [state, row] == eval(answer)

def plain(response, answer):
    return True

class Setting:
    def __init__(self, state):
        self.state = state

    def verify(self, response, answer, state):
        return [self.state, state] == eval(answer)

def setting(response, answer, *, state):
    return state == eval(answer)
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def judged(config: RewardConfig, items: Sequence[tuple[Any, ...]]) -> list[Verdict]:
    with rewards.start_pool(config, num_workers=1) as pool:
        return pool.judge(items)


ROW = {
    **{"level": "easy", "prompt": "2+3=", "state": "of the data", "row": 7, "token_ids": [0]},
    **{"messages": None, "big": "x" * 1000},
}
EPISODE_TEXT = "<think>hm</think>5"


def of_episode(pool: rewards.Pool, prompt: Prompt, *, state: Any, turns: Any = None) -> Any:
    """The item of an episode with these tokens, whose environment says `state`."""
    tokens, zeros = np.array([1, 2, 3, 9], np.int32), np.zeros(4, np.float32)
    mask = None if turns is None else np.array([True, False, True, True])
    episode = Episode(prompt, 0, tokens, zeros, response_mask=mask)
    texts = (EPISODE_TEXT, prompt.answer)
    return rewards.ask_judge(
        lambda _: texts if state is None else (*texts, state),
        episode,
        pool=pool,
        turns=None if turns is None else lambda _: turns,
    )


def verdicts_on(config: RewardConfig, prompts: Sequence[Prompt], **options: Any) -> list[Outcome]:
    with rewards.start_pool(config, num_workers=1) as pool:
        items = [of_episode(pool, one, **options) for one in prompts]
        assert not [one for one in items if isinstance(one, Verdict)]
        return [one.outcome for one in pool.judge(items)]


def test_a_verifier_names_what_it_wants(source: Path) -> None:
    """An argument of the contract is never the column of its name; `row` has that."""
    user, said = {"role": "user", "content": "2+3="}, {"role": "assistant", "content": EPISODE_TEXT}
    ids, prompt_ids = [1, 2, 3, 9], [4, 4]
    row = {**ROW}
    turns = [said, {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]
    system = [{"role": "system", "content": "s"}, user]
    config = RewardConfig(
        kind="mine.py:plain",
        verifiers={
            **{name: f"mine.py:{name}" for name in ("optional", "one_column", "all_columns")},
            **{
                name: {"kind": f"mine.py:{one}", "settings": {"state": 1}}
                for name, one in (("class", "Setting"), ("function", "setting"))
            },
        },
    )

    def prompt(name: str, wanted: Any, **columns: Any) -> Prompt:
        return Prompt("p", (4, 4), repr(wanted), verifier=name, row={**row, **columns})

    def full(conversation: Any, state: Any, **columns: Any) -> list[Any]:
        given = ["5", EPISODE_TEXT, conversation, ids, prompt_ids, state, {**row, **columns}]
        return given

    state = {"won": True, "moves": [1, {"a": None}]}
    for options, wanted in (
        ({"state": None}, full([user, said], None)),
        ({"state": state}, full([user, said], state)),
        ({"state": state, "turns": turns}, full([user, *turns], state)),
    ):
        assert verdicts_on(config, [prompt("optional", wanted)], **options) == ["correct"]
    with_messages = prompt("optional", full([*system, said], None, messages=system))
    with_messages = Prompt(
        "p", (4, 4), with_messages.answer, verifier="optional", row={**row, "messages": system}
    )
    outcomes = verdicts_on(
        config,
        [
            with_messages,
            prompt("one_column", ["easy", None]),
            prompt("all_columns", [None, {k: v for k, v in row.items() if k != "state"}]),
            prompt("class", [1, None]),
            prompt("function", 1),
        ],
        state=None,
    )
    assert outcomes == ["correct"] * 5


def test_workers_get_only_what_is_named(source: Path) -> None:
    config = RewardConfig(
        kind="mine.py:plain",
        verifiers={"one": "mine.py:one_column", "all": "mine.py:optional"},
    )
    assert rewards.row_columns(RewardConfig(kind="mine.py:one_column")) == {"level"}
    prompts = [Prompt("p", (4,), "[]", verifier=name, row=ROW) for name in ("", "one", "all")]
    with rewards.start_pool(config, num_workers=1) as pool:
        pool.submit([of_episode(pool, one, state={"a": 1}) for one in prompts])
        sent = [(set(item.row), set(item.extras)) for _, item in pool._waiting]
    names = {"messages", "token_ids", "prompt_token_ids", "state"}
    assert sent == [(set(), set()), ({"level"}, {"state"}), (set(ROW), names)]
    components = {"plain": "mine.py:plain", "one": "mine.py:one_column", "exact": "exact"}
    with rewards.start_pool(RewardConfig(components=components), num_workers=1) as pool:
        pool.submit([of_episode(pool, prompts[0], state={"a": 1})])
        sent = [(set(item.row), set(item.extras)) for _, item in pool._waiting]
    assert sent == [(set(), set()), ({"level"}, {"state"}), (set(), set())]


@pytest.mark.parametrize("state", ["text", [["a", 1]], {"a": {1}}, {"a": float("nan")}, 3])
def test_a_state_that_json_cannot_hold_is_unknown(source: Path, state: Any) -> None:
    with rewards.start_pool(RewardConfig(kind="mine.py:plain"), num_workers=1) as pool:
        verdict = of_episode(pool, Prompt("p", (4,), ""), state=state)
    assert verdict.outcome is Outcome.UNKNOWN and verdict.reason.startswith("judge: ")


def test_turns_are_messages() -> None:
    tokenizer = byte_level("<think>", "</think>", "<|im_end|>")
    texts = ["<think>a</think>first<|im_end|>", "\nresult\n", "second<|im_end|>", "more"]
    parts = [tokenizer.encode(one, add_special_tokens=False) for one in texts]
    tokens = np.array([one for part in parts for one in part], np.int32)
    is_sampled = [True, False, True, False]
    mask = np.array([is_sampled[i] for i, part in enumerate(parts) for _ in part])
    zeros = np.zeros(len(tokens), np.float32)
    episode = Episode(Prompt("p", (1,), ""), 0, tokens, zeros, response_mask=mask)
    assert messages(tokenizer, episode) == [
        {"role": "assistant", "content": "<think>a</think>first"},
        {"role": "user", "content": "\nresult\n"},
        {"role": "assistant", "content": "second"},
        {"role": "user", "content": "more"},
    ]


FOREIGN = {
    # verl: a float, with settings; the order of its own modules; async.
    "def f(data_source, solution_str, ground_truth, extra_info=None, *, bonus=0):\n"
    "    return float(solution_str == '<think>a</think>b' and data_source == 'd'\n"
    "                 and extra_info == {'i': 1}) + bonus": Outcome.CORRECT,
    "def f(solution_str, ground_truth, method='strict', bonus=0):\n"
    "    return solution_str.endswith('b') and ground_truth == 'x'": Outcome.CORRECT,
    "async def f(data_source, solution_str, ground_truth, extra_info=None, bonus=0, **kwargs):\n"
    "    return {'score': 1.0}": Outcome.CORRECT,
    "def f(data_sources, solution_strs, ground_truths, extra_infos, bonus=0, **kwargs):\n"
    "    assert (data_sources, ground_truths, extra_infos) == (['d'], ['x'], [{'i': 1}])\n"
    "    return [{'score': len(one) / 18} for one in solution_strs]": Outcome.CORRECT,
    # TRL: with and without columns, strings and messages, None, logs, and lists of another length.
    "def f(completions, bonus=0, **kwargs):\n"
    "    assert set(kwargs) >= {'prompts', 'completion_ids', 'data_source', 'log_extra'}\n"
    "    assert bonus == 0 and kwargs['answer'] == ['x'] and kwargs['prompts'] == ['q'], kwargs\n"
    "    return [len(one) / 18 for one in completions]": Outcome.CORRECT,
    "def f(prompts, completions, data_source, completion_ids, trainer_state=None, bonus=0):\n"
    "    return [one == 'd' and ids == [7, 8] for one, ids in zip(data_source, completion_ids)]"
    "": Outcome.CORRECT,
    "def f(completions, bonus=0): return [None]": Outcome.UNKNOWN,
    "def f(completions, bonus=0): return [1.0, 1.0]": Outcome.UNKNOWN,
    "def f(completions, bonus=0): return 1.0": Outcome.UNKNOWN,
    "import numpy as np\ndef f(completions, bonus=0): return np.ones(1)": Outcome.CORRECT,
    "async def f(completions, log_extra, bonus=0):\n"
    "    log_extra('n', [4]); return [0.0]": Outcome.WRONG,
    # slime: one sample, and a group of one.
    "async def f(args, sample, bonus=0, **kwargs):\n"
    "    assert (sample.prompt, sample.label, sample.response_length) == ('q', 'x', 2)\n"
    "    assert sample.tokens == [5, 7, 8] and sample.metadata == {}\n"
    "    assert getattr(args, 'rm_url', None) is None\n"
    "    return len(sample.response) / 18": Outcome.CORRECT,
    "def f(args, sample, bonus=0): return args.rm_url": Outcome.UNKNOWN,
    "def f(args, sample, bonus=0): return sample.reward_model": Outcome.UNKNOWN,
    "async def f(args, samples, bonus=0, **kwargs):\n"
    "    return [one.label == 'x' for one in samples]": Outcome.CORRECT,
}


@pytest.mark.parametrize(("text", "outcome"), FOREIGN.items(), ids=range(len(FOREIGN)))
def test_a_reward_of_another_framework_is_called_as_there(
    source: Path, text: str, outcome: Outcome
) -> None:
    source.write_text(text)
    config = RewardConfig(kind="mine.py:f", settings={"bonus": 0})
    rewards.check(config)
    row = {"data_source": "d", "extra_info": {"i": 1}, "prompt": "q", "bonus": 5}
    extras = {"token_ids": [7, 8], "prompt_token_ids": [5], "messages": None}
    item = ("<think>a</think>b", "x", "", row, extras)
    [verdict] = judged(config, [item])
    assert verdict.outcome is outcome, verdict
    if "log_extra('n'" in text:
        assert verdict.metrics == {"n": 4}
    if "args.rm_url" in text:
        assert "args.rm_url" in verdict.reason


@pytest.mark.parametrize("row", [{}, {"extra_info": None}])
@pytest.mark.parametrize("given", ["extra_info", "extra_infos[0]"])
def test_verl_gets_an_empty_extra_info_where_a_row_has_none(
    source: Path, row: dict[str, Any], given: str
) -> None:
    names = ("data_source", "solution_str", "ground_truth", "extra_info")
    named = ", ".join(f"{one}s" if "[" in given else one for one in names)
    result = f"{given}.get('split', 'train') == 'train'"
    result = f"[{result}]" if "[" in given else result
    source.write_text(f"def f({named}): return {result}\n")
    [verdict] = judged(RewardConfig(kind="mine.py:f"), [("a", "a", "", row)])
    assert verdict.outcome is Outcome.CORRECT, verdict


def test_trl_gets_messages_where_the_prompt_is_messages(source: Path) -> None:
    source.write_text(
        "def g(prompts, completions, answer):\n"
        "    return [[prompts, completions] == eval(one) for one in answer]\n"
    )
    user = [{"role": "user", "content": "q"}]
    wanted = [[user], [[{"role": "assistant", "content": "a"}]]]
    items = [
        ("a", repr(wanted), "", {"messages": user}),
        ("a", repr(wanted), "", {"prompt": user}),
        ("a", repr([["q"], ["a"]]), "", {"prompt": "q"}),
    ]
    verdicts = judged(RewardConfig(kind="mine.py:g"), items)
    assert [one.outcome for one in verdicts] == ["correct"] * 3


def test_rewards_of_trl_itself_run_unchanged(source: Path) -> None:
    row = {"messages": [{"role": "user", "content": "q"}], "solution": r"\boxed{63}"}
    items = [(f"<think>\nhm\n</think>\n{text}", "63", "", row) for text in (r"\boxed{63}", "64")]
    items.append((r"\boxed{63}", "63", "", row))
    kinds = {"format": "trl.rewards:think_format_reward", "exact": "trl.rewards:accuracy_reward"}
    config = RewardConfig(components={name: {"kind": one} for name, one in kinds.items()})
    scores = [dict(one.metrics) for one in judged(config, items)]
    assert scores == [
        *({"format": 1, "exact": 1}, {"format": 1, "exact": 0}, {"format": 0, "exact": 1})
    ]
    assert rewards.row_columns(config) is None
    with pytest.raises(DataError, match=mentions("solution", "accuracy_reward")):
        rewards.check_row(kinds["exact"], {"messages": row["messages"]})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("def f(completions, trainer_state): ...", ["TRL", "trainer_state"]),
        ("def f(data_source, solution_str, ground_truth, judge_url): ...", ["verl", "judge_url"]),
        ("async def f(args, sample, tokenizer): ...", ["slime", "tokenizer"]),
    ],
)
def test_what_is_not_known_here_is_refused_early(source: Path, text: str, named: list[str]) -> None:
    source.write_text(text)
    with pytest.raises(ConfigError, match=mentions("reward.kind", "mine.py:f", *named)):
        rewards.check(RewardConfig(kind="mine.py:f"))
