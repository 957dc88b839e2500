"""Rows with messages, the chat template's settings, and the formats of problem files."""

from __future__ import annotations

import copy
import datetime
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerBase

from gapo_megatron.config import Config, DataConfig, RewardConfig, parse_config
from gapo_megatron.data.messages import bind_template
from gapo_megatron.data.rows import count_rows
from gapo_megatron.data.schema import read_training_prompts
from gapo_megatron.data.tokenizer import load_tokenizer
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.run.inputs import read_problems as read_problems_of
from gapo_megatron.types import Prompt
from tests.messages import mentions
from tests.prepare_data_setup import put, put_tokenizer
from tests.problem_files import read_problems
from tests.tokenizers import byte_level

# Like Qwen3's: thoughts of earlier turns are dropped, and an empty thought ends thinking.
TEMPLATE = """\
{%- for m in messages -%}
<{{ m.role }}> {{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }} \
{% endfor -%}
{%- if add_generation_prompt -%}
<assistant> {% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif -%}"""

ONE_PROMPT = {"rollout_prompts": 1, "minibatch_prompts": 1}

CHAT = [
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "thoughts </think> first answer"},
    {"role": "user", "content": "second question"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """One whose text is what a test reads: every word is an unknown token."""
    tokenizer = load_tokenizer(put_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def row(id: str = "a", **columns: Any) -> dict[str, Any]:
    given = {"id": id, "prompt": "one two", "answer": "3"} | columns
    return {key: value for key, value in given.items() if value is not None}


def read(path: Path, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> list[Prompt]:
    return read_problems(
        path, tokenizer=tokenizer, **({"kind": "math", "max_prompt_tokens": 64} | settings)
    )


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts that were tokenised."""
    seen: list[str] = []
    real = type(tokenizer).encode

    def call(self: Any, text: str, **options: Any) -> Any:
        seen.append(" ".join(text.split()))
        return real(self, text, **options)

    monkeypatch.setattr(type(tokenizer), "encode", call)
    return seen


@pytest.mark.parametrize(
    ("columns", "settings", "text"),
    [
        ({}, {}, "<user> one two <assistant>"),
        ({}, {"system_prompt": "be\nbrief"}, "<system> be brief <user> one two <assistant>"),
        (
            {},
            {"chat_template_kwargs": {"enable_thinking": False}},
            "<user> one two <assistant> <think></think>",
        ),
        (
            {"prompt": None, "messages": CHAT},
            {"system_prompt": "be brief"},
            "<system> be brief <user> first question <assistant> first answer "
            "<user> second question <assistant>",
        ),
        ({"prompt": CHAT[:1]}, {}, "<user> first question <assistant>"),
        (
            {"prompt": None, "messages": [{"role": "system", "content": "own"}, *CHAT[:1]]},
            {"system_prompt": "be brief"},
            "<system> own <user> first question <assistant>",
        ),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_prompts_and_messages_go_through_the_template(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    columns: dict[str, Any],
    settings: dict[str, Any],
    text: str,
    suffix: str,
) -> None:
    path = put(tmp_path / f"p{suffix}", [row(**columns)])
    read(path, tokenizer, chat_template=True, **settings)
    assert texts[-1] == text


MESSAGES = [
    ("no list", ["messages ('no list')"]),
    ([], ["messages ([])"]),
    (["text"], ["messages[0] ('text')"]),
    ([{"role": "user"}], ["messages[0]", "content (None)"]),
    ([{"role": "user", "content": " "}], ["messages[0]", "content (' ')"]),
    ([{"role": "user", "content": ["parts"]}], ["messages[0]", "content"]),
    ([{"role": "user", "content": "\ud800"}], ["messages[0]", "surrogate"]),
    ([{"role": "human", "content": "x"}], ["messages[0]", "role ('human')", "user"]),
    ([*CHAT[:2]], ["messages[1]", "'user'", "'assistant'"]),
    ([CHAT[0], {"role": "system", "content": "x"}, CHAT[0]], ["messages[1]", "first"]),
    ([{**CHAT[0], "tool_calls": [1]}], ["messages[0]", "'tool_calls'"]),
]


@pytest.mark.parametrize(("messages", "named"), MESSAGES)
def test_wrong_messages_are_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, messages: Any, named: list[str]
) -> None:
    path = put(tmp_path / "p.jsonl", [row(), row("b", prompt=None, messages=messages)])
    with pytest.raises(DataError, match=mentions(f"{path}:2", *named)):
        read(path, tokenizer, chat_template=True)


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"messages": CHAT}, ["prompt and messages"]),
        ({"prompt": None, "question": "1?"}, ["'prompt'", "'messages'", "id, ", "question"]),
        ({"answer": None, "result": "1"}, ["'answer'", "result", "prepare_data"]),
        ({"prompt": None, "messages": CHAT}, ["messages", "data.chat_template"]),
        ({"verifier": "code"}, ["verifier ('code')", "reward.verifiers", "math"]),
        ({"verifier": "rewards.py:verify"}, ["verifier", "reward.verifiers"]),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_row_with_the_wrong_keys_is_named(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    columns: dict[str, Any],
    named: list[str],
    suffix: str,
) -> None:
    path = put(tmp_path / f"p{suffix}", [row(**columns)])
    with pytest.raises(DataError, match=mentions(f"{path}:1", *named)):
        read(path, tokenizer)


def test_a_row_that_the_template_refuses_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", refusal + TEMPLATE)
    path = put(tmp_path / "p.jsonl", [row(), row("b", prompt=None, messages=CHAT)])
    with pytest.raises(ConfigError, match=mentions(f"{path}:2", "chat template", "one turn only")):
        read(path, tokenizer, chat_template=True)


@pytest.mark.parametrize(
    ("name", "rule"), [("enable_thinkng", "no such variable"), ("tokenize", "argument")]
)
def test_variables_that_do_nothing_are_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, name: str, rule: str
) -> None:
    path = put(tmp_path / "p.jsonl", [row()])
    with pytest.raises(ConfigError, match=mentions(f"data.chat_template_kwargs.{name}", rule)):
        read(path, tokenizer, chat_template=True, chat_template_kwargs={name: True})


def test_a_system_prompt_that_the_template_drops_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[-1].content }}")
    path = put(tmp_path / "p.jsonl", [row()])
    with pytest.raises(ConfigError, match=mentions("data.system_prompt ('be brief')")):
        read(path, tokenizer, chat_template=True, system_prompt="be brief")


def test_prompts_that_are_hardly_meant_so_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = copy.deepcopy(byte_level("<|im_start|>", "<s>"))
    tokenizer.chat_template = TEMPLATE
    texts = ["1 + 1", "<s>1 + 1", "<s>1 + 2", "<|im_start|> 1"]
    path = put(tmp_path / "a.jsonl", [row(str(i), prompt=text) for i, text in enumerate(texts)])
    read(path, tokenizer, chat_template=True)
    (warned,) = caplog.messages
    assert re.search(mentions(f"{path}:2", "'<s>'"), warned)

    caplog.clear()
    read(path, tokenizer)  # the data writes control tokens
    assert not caplog.messages
    tokenizer.bos_token = "<s>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    read(path, tokenizer)
    (warned,) = caplog.messages
    assert re.search(mentions(f"{path}:2", "BOS"), warned)


def test_only_asked_for_columns_are_kept(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    columns = {"unit": "m", "tests": [{"in": 1}], "level": "easy"}
    for suffix in (".jsonl", ".parquet"):
        path = put(tmp_path / f"p{suffix}", [row(**columns)])
        some, whole = {"unit", "level", "gone", "answer"}, row(**columns) | {"answer": None}
        for asked, kept in ((), {}), (some, {"unit": "m", "level": "easy"}), (None, whole):
            (prompt,) = read(path, tokenizer, columns=asked)
            assert prompt.row == {key: one for key, one in kept.items() if one is not None}
    path = put(tmp_path / "p.parquet", [row(day=datetime.date(2024, 8, 1))])
    read(path, tokenizer)
    with pytest.raises(DataError, match=mentions(f"{path}:1", "day", "JSON")):
        read(path, tokenizer, columns=None)


def test_one_file_mixes_mathematics_programs_and_instructions(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Each answer is read by its row's verifier, and a wrong one is named."""
    tests = json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})
    asked = json.dumps({"instructions": [{"id": "punctuation:no_comma"}]})
    rows = [
        row("a"),
        row("b", verifier="math"),
        row("c", answer=tests, verifier="code"),
        row("d", answer=asked, verifier="follows"),
    ]
    settings: dict[str, Any] = {"verifiers": {"code": "code", "follows": "instructions"}}
    path = put(tmp_path / "p.jsonl", rows)
    prompts = read(path, tokenizer, **settings)
    assert [one.verifier for one in prompts] == ["", "", "code", "follows"]
    put(path, [*rows, row("e", verifier="code")])
    with pytest.raises(DataError, match=mentions("1 of 5", f"{path}:5", "'code'")):
        read(path, tokenizer, **settings)


def test_an_environment_of_the_users_own_gets_the_whole_row(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = put(tmp_path / "p.jsonl", [row(level="easy", unit="m", map=[[0, 1]])])
    settings = {"train_path": str(path), "max_prompt_tokens": 64}
    whole = {"id": "a", "prompt": "one two", "level": "easy", "unit": "m", "map": [[0, 1]]}
    for environment, kept in ({}, {}), ({"kind": "maze.py:Maze"}, whole):
        given = config(batch=ONE_PROMPT, environment=environment, data=settings)
        (prompt,), _ = read_problems_of(given, tokenizer)
        assert prompt.row == kept


def test_a_verifier_gets_the_columns_it_names_or_the_row_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    own = tmp_path / "named.py"
    own.write_text("def verify(response, answer, id, prompt, level, unit, scale=1): ...\n")
    whole = row(level="easy", unit="m")
    for suffix in ".jsonl", ".parquet":
        path = put(tmp_path / f"p{suffix}", [whole])
        [prompt] = read(path, tokenizer, kind=f"{own}:verify", columns=None)
        assert prompt.row == {"id": "a", "prompt": "one two", "level": "easy", "unit": "m"}
        for column in "id", "level", "unit":
            put(path, [{key: one for key, one in whole.items() if key != column}])
            with pytest.raises(DataError, match=mentions(f"{path}:1", repr(column), own)):
                read(path, tokenizer, kind=f"{own}:verify", columns=None)


def test_rows_without_ids_are_numbered(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Also where a Parquet file has nulls."""
    rows = [
        {"id": "a", "prompt": "one", "messages": None, "answer": "1", "level": None},
        {"id": None, "prompt": None, "messages": CHAT, "answer": "2", "level": "easy"},
    ]
    path = put(tmp_path / "p.parquet", rows)
    prompts = read(path, tokenizer, chat_template=True)
    assert [(one.id, one.level) for one in prompts] == [("a", ""), ("2", "easy")]
    path = put(tmp_path / "p.jsonl", [row("2"), row(None)])
    with pytest.raises(DataError, match=mentions(f"{path}:2", "'2'", "line 1")):
        read(path, tokenizer)


def test_ids_of_sources_do_not_clash(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    given = [
        {"name": name, "path": str(put(tmp_path / f"{name}.jsonl", [row("1"), row("2")]))}
        for name in ("math", "more")
    ]
    data = DataConfig.model_validate({"source": given})
    prompts = read_training_prompts(data, tokenizer=tokenizer, reward=RewardConfig(kind="math"))
    assert [one.id for one in prompts] == ["math/1", "math/2", "more/1", "more/2"]
    assert [one.source for one in prompts] == ["math", "math", "more", "more"]


def test_a_json_file_may_hold_lines(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """As many published files of this suffix do."""
    path = tmp_path / "p.json"
    path.write_text("\n" + "".join(f"{json.dumps(row(id))}\n" for id in "ab"), "utf-8-sig")
    assert [one.id for one in read(path, tokenizer)] == ["a", "b"]
    assert count_rows(path) == 2
    for suffix in (".jsonl", ".json", ".parquet", ".txt"):
        assert count_rows(put(tmp_path / f"p{suffix}", [row(str(i)) for i in range(7)])) == 7


def config(data: dict[str, Any], **sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "run": {"output_dir": "runs/x", "num_steps": 10},
        "model": {"hf_dir": "m"},
        "rollout": {"max_response_tokens": 64},
        "reward": {"kind": "math"},
    }
    return parse_config(tree | {"data": data} | sections, source="FILE")


def table(name: str = "a", **settings: Any) -> dict[str, Any]:
    return {"name": name, "path": f"{name}.jsonl", **settings}


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({}, ["train_path ('')", "[[data.source]]", 0]),
        (
            {"train_path": "x", "source": [table()]},
            ["train_path ('x')", "[[data.source]]", 1, "source = []"],
        ),
        ({"source": [table(), table()]}, ["data", "source", "'a'", 2]),
        ({"source": [{"name": "a"}]}, ["data.source.0.path", "required"]),
        ({"source": [table(wieght=1.0)]}, ["data.source.0.wieght", "'weight'"]),
        ({"source": [table(weight=0.0)]}, ["data.source.0.weight (0.0)"]),
        ({"source": [table("a/b")]}, ["data.source.0.name ('a/b')"]),
        ({"source": [table(first_step=5, last_step=4)]}, ["data.source.0", "last_step (4)"]),
        ({"source": [table(last_step=4)]}, ["data.source", "steps 5 to 9", "run.num_steps (10)"]),
        (
            {"source": [table(last_step=2), table("b", first_step=4)]},
            ["data.source", "steps 3 to 3"],
        ),
        ({"train_path": "x", "system_prompt": "brief"}, ["system_prompt ('brief')", "true"]),
        (
            {"train_path": "x", "chat_template_kwargs": {"a": 1}},
            ["chat_template_kwargs", "chat_template = true"],
        ),
        (
            {"train_path": "x", "chat_template": True, "chat_template_kwargs": {"a": [1]}},
            ["data.chat_template_kwargs.a ([1])"],
        ),
    ],
)
def test_settings_that_cannot_be_are_named(data: dict[str, Any], named: list[Any]) -> None:
    with pytest.raises(ConfigError, match=mentions("FILE", *named)):
        config(data)


@pytest.mark.parametrize(
    ("end", "is_odd"),
    [
        ("{% if add_generation_prompt %}<assistant> {% endif %}", False),
        ("<assistant> ", False),  # whatever is asked for
        ("", True),
    ],
)
def test_a_template_that_never_opens_the_models_turn_is_named(
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    end: str,
    is_odd: bool,
) -> None:
    template = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}" + end
    data = DataConfig(train_path="unused", chat_template=True)
    monkeypatch.setattr(tokenizer, "chat_template", template)
    bind_template(tokenizer, data)
    assert [bool(re.search(mentions("'<assistant>'"), one)) for one in caplog.messages] == (
        [True] * is_odd
    )
    caplog.clear()
    # As Mistral's: the end of the question is the beginning of the answer.
    monkeypatch.setattr(
        tokenizer,
        "chat_template",
        "{% for m in messages %}{{ '[Q] ' ~ m.content ~ ' [/Q]' if m.role == 'user' else "
        "' ' ~ m.content }}{% endfor %}",
    )
    bind_template(tokenizer, data)
    assert not caplog.messages
