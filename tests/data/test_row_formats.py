"""Rows of other frameworks: recognised or refused, read whole, and never guessed."""

from __future__ import annotations

import decimal
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from gapo_megatron import rewards
from gapo_megatron.config import DataConfig, RewardConfig
from gapo_megatron.config.data_section import RowKeys
from gapo_megatron.data.row_formats import FORMATS, first_row, without
from gapo_megatron.data.schema import read_prompts, read_training_prompts
from gapo_megatron.errors import DataError
from gapo_megatron.rewards.conversation import prompt_messages
from gapo_megatron.types import Outcome, Prompt
from tests.messages import mentions
from tests.row_files import ASKED, FORMS, gapo, openai, orz, put_form, put_rows, slime, trl, user
from tests.row_files import verl as verl_row

OWN = """\
def verify(response, answer, **row):
    return response == answer
"""


def read(
    path: Path, *, kind: str | RewardConfig = "math", columns: Any = (), **data: Any
) -> list[Prompt]:
    """The problems without their tokens."""
    settings = DataConfig.model_validate({"train_path": "unused", "chat_template": True, **data})
    reward = RewardConfig(kind=kind) if isinstance(kind, str) else kind
    return read_prompts(path, tokenizer=None, data=settings, reward=reward, columns=columns)


@pytest.mark.parametrize("name", FORMS)
def test_each_format_is_recognised_named_and_read(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, said, keys = FORMS[name]
    caplog.set_level(logging.INFO, "gapo_megatron.data")
    path = put_form(tmp_path / name)
    prompts = read(path, columns=None)
    assert [one.answer.strip("$") for one in prompts] == [answer for _, answer in ASKED]
    ids = [f"own-{i}" for i in range(3)] if make is gapo else ["1", "2", "3"]
    assert [one.id for one in prompts] == ids
    assert any(path.name in one and said in one and keys in one for one in caplog.messages)
    first = first_row(path, RowKeys())
    assert first is not None
    asked = first[1].prompt
    texts = [asked] if isinstance(asked, str) else [one["content"] for one in asked]
    assert len(texts) == 1 and texts[0].endswith(ASKED[0][0])
    # The row's other columns, whole: what is not there in one file format is in no other.
    whole = make(0, *ASKED[0])
    given = whole if isinstance(whole, dict) else {str(i): one for i, one in enumerate(whole)}
    kept = json.loads(json.dumps(prompts[0].row))
    if make is orz:
        assert kept["1"]["ground_truth"] == {"value": "42"}
    else:
        if make is openai:  # the last message is the answer
            given = given | {"messages": given["messages"][:-1]}
        assert kept == {key: one for key, one in given.items() if key != "answer"}


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "gapo"])
def test_a_later_row_of_another_form_is_named_with_what_the_first_was(
    tmp_path: Path, name: str
) -> None:
    makers = {"verl": verl_row, "slime": slime, "orz": orz, "trl": trl, "openai": openai}
    rows = [makers[name](0, *ASKED[0]), makers[name](1, *ASKED[1]), gapo(2, *ASKED[2])]
    path = put_rows(tmp_path / "rows.jsonl", rows)
    named = (f"{path}:3: ", f"{path}:1 was recognised as {name} format", "data.answer_key")
    with pytest.raises(DataError, match=mentions(*named)):
        read(path)


@pytest.mark.parametrize(
    ("row", "both", "setting", "answer"),
    [
        (
            {"prompt": "a", "solution": "1", "ground_truth": "2"},
            ["trl format: prompt, solution", "trl format: prompt, ground_truth"],
            {"answer_key": "ground_truth"},
            "2",
        ),
        (
            {"prompt": "a", "label": "1", "reward_model": {"ground_truth": "2"}},
            ["slime", "label", "verl", "reward_model.ground_truth"],
            {"format": "verl"},
            "2",
        ),
        (
            {"messages": [*user("a"), {"role": "assistant", "content": "1"}], "label": "2"},
            ["slime", "label", "openai", "messages.-1.content"],
            {"format": "openai"},
            "1",
        ),
        (
            {"prompt": "a", "completion": "1", "label": "2"},
            ["slime", "trl", "completion"],
            {"format": "trl"},
            "1",
        ),
    ],
)
def test_two_readings_of_a_row_are_an_error_until_a_setting_decides(
    tmp_path: Path, row: dict[str, Any], both: list[str], setting: dict[str, str], answer: str
) -> None:
    path = put_rows(tmp_path / "rows.jsonl", [row])
    with pytest.raises(DataError, match=mentions(f"{path}:1", *both, "data.format")):
        read(path)
    assert [one.answer for one in read(path, **setting)] == [answer]
    # The key of this project's own format is not in question.
    put_rows(path, [row | {"answer": "3", "prompt": "a", "messages": None}])
    assert [one.answer for one in read(path)] == ["3"]


UNFIT: list[tuple[dict[str, Any], dict[str, str], list[str]]] = [
    ({"text": "a"}, {}, ["'prompt'", "'messages'", "it has text", "data.prompt_key"]),
    ({"prompt": "a", "chosen": "1"}, {}, ["'answer'", "prompt, chosen", "data.answer_key"]),
    ({"messages": user("a")}, {}, ["'answer'", "has messages"]),  # nobody answers
    ({"messages": user("a")}, {"format": "openai"}, ["must end with the model's"]),
    ({"prompt": "a", "label": "1"}, {"format": "verl"}, ["'reward_model.ground_truth'", "label"]),
    ({"prompt": "a", "label": "1"}, {"format": "orz"}, ["'0.value'", "prompt, label"]),
    ({"prompt": None, "label": "1"}, {}, ["prompt is null"]),
    ({"prompt": 3, "label": "1"}, {}, ["prompt (3)", "string or a list"]),
    ({"prompt": "", "label": "1"}, {}, ["prompt is empty"]),
]


@pytest.mark.parametrize(("row", "settings", "named"), UNFIT)
def test_a_first_row_that_no_format_fits_is_named(
    tmp_path: Path, row: dict[str, Any], settings: dict[str, str], named: list[str]
) -> None:
    path = put_rows(tmp_path / "rows.jsonl", [row])
    with pytest.raises(DataError, match=mentions(f"{path}:1", *named)):
        read(path, **settings)


def test_keys_that_are_set_overrule_and_reach_into_values(tmp_path: Path) -> None:
    row = {
        "question": {"en": [{"text": "What?"}]},
        "extra": json.dumps({"gold": "3", "n": 17}),
        "answer": "1",
        "a.b": "4",
    }
    path = put_rows(tmp_path / "rows.jsonl", [row])
    keys = {"prompt_key": "question.en.-1.text", "answer_key": "extra.gold", "id_key": "extra.n"}
    (prompt,) = read(path, **keys)
    assert (prompt.id, prompt.answer) == ("17", "3")
    first = first_row(path, RowKeys(prompt_key="question.en.0.text", answer_key="a.b"))
    assert first is not None and (first[1].prompt, first[1].answer) == ("What?", "4")
    put_rows(path, [row | {"a": {"b": "5"}}])
    with pytest.raises(DataError, match=mentions("'a.b'", "column", "'a'")):
        read(path, prompt_key="question.en.0.text", answer_key="a.b")
    with pytest.raises(DataError, match=mentions(f"{path}:1", "question.en.1.text", "extra")):
        read(path, prompt_key="question.en.1.text", answer_key="answer")


def test_sources_have_keys_of_their_own_and_else_those_of_the_section(tmp_path: Path) -> None:
    one = put_rows(tmp_path / "one.jsonl", [{"q": "1?", "a": 1}])
    two = put_rows(tmp_path / "two.jsonl", [{"q": "2?", "b": 2, "n": 7}])
    data = DataConfig.model_validate(
        {
            "prompt_key": "q",
            "answer_key": "a",
            "source": [
                {"name": "one", "path": str(one)},
                {"name": "two", "path": str(two), "answer_key": "b", "id_key": "n"},
            ],
        }
    )
    prompts = read_training_prompts(data, tokenizer=None, reward=RewardConfig(kind="math"))
    assert [(one.id, one.answer) for one in prompts] == [("one/1", "1"), ("two/7", "2")]
    with pytest.raises(ValueError, match=r"source\.0\.format"):
        DataConfig.model_validate({"source": [{"name": "a", "path": "a", "format": "ours"}]})


IDS = [
    ([3, 4], None),
    (["3", "4"], None),
    ([2**60, -1], None),
    ([3, 3], ("'3'", "line 1")),
    ([3, "3"], ("'3'", "line 1")),
    ([3, True], ("True", "integer")),
    ([3, 4.0], ("4.0", "integer")),
    ([3, None], ("data.id_key", "'extra_info.index'", "null")),
    ([3, " "], ("extra_info.index", "empty")),
    ([3, "\ud800"], ("extra_info.index", "surrogate")),
]


@pytest.mark.parametrize(("ids", "named"), IDS)
def test_ids_are_texts_or_integers_and_unique(
    tmp_path: Path, ids: list[Any], named: tuple[str, ...] | None
) -> None:
    rows = [verl_row(0, *ASKED[0]) | {"extra_info": {"index": one}} for one in ids]
    path = put_rows(tmp_path / "rows.jsonl", rows)
    assert [one.id for one in read(path)] == ["1", "2"]  # which no set of sets makes twice
    if named is None:
        prompts = read(path, id_key="extra_info.index")
        assert [one.id for one in prompts] == [str(one) for one in ids]
        return
    with pytest.raises(DataError, match=mentions(f"{path}:2", *named)):
        read(path, id_key="extra_info.index")


ANSWERS: list[tuple[Any, str, str | tuple[str, ...]]] = [
    (72, "math", "72"),
    (-(2**70), "exact", str(-(2**70))),
    (0.5, "math", "0.5"),
    (72.0, "exact", "72.0"),
    (1e22, "exact", "1e+22"),
    ("0.50", "exact", "0.50"),
    (["72"], "math", "72"),
    ([72], "exact", "72"),
    (["1/2", 0.5], "math", '["1/2", "0.5"]'),
    ('["1/2", "0.5"]', "math", '["1/2", "0.5"]'),
    (["1", "2"], "exact", ("2 accepted", "'exact'", "'math'")),
    (["1", "2"], "OWN", '["1", "2"]'),
    ({"target": 98, "numbers": [44, 19]}, "OWN", '{"target": 98, "numbers": [44, 19]}'),
    ({"target": 98}, "math", ("'target': 98", "string")),
    ({"instructions": [{"id": "punctuation:no_comma"}]}, "instructions", "no_comma"),
    ([{"input": "1", "output": "2"}], "code", '[{"input": "1", "output": "2"}]'),
    (None, "math", ("null",)),
    (True, "math", ("True", "string")),
    ("  ", "math", ("empty",)),
    ([], "math", ("empty",)),
    ({}, "OWN", ("empty",)),
    ([None, "1"], "math", ("[0]", "None")),
    (["1", True], "math", ("[1]", "True")),
    ([["1"], "2"], "math", ("[0]", "['1']")),
    (["1", ""], "math", ("[1]", "empty")),
    (math.nan, "math", ("nan", "number")),
    (math.inf, "exact", ("inf", "number")),
    ("\ud800", "math", ("surrogate",)),
]


@pytest.mark.parametrize(("answer", "kind", "found"), ANSWERS)
def test_answers_become_texts_or_are_named(
    tmp_path: Path, answer: Any, kind: str, found: str | tuple[str, ...]
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    kind = f"{tmp_path / 'own.py'}:verify" if kind == "OWN" else kind
    rows = [verl_row(0, "a?", answer if isinstance(found, str) else "1"), verl_row(1, "b?", answer)]
    if not isinstance(found, str) and kind != "math":
        rows[0] = verl_row(0, "a?", "1")
    path = put_rows(tmp_path / "rows.jsonl", rows)
    if isinstance(found, str):
        assert found in read(path, kind=kind)[1].answer
    else:
        place = f"{path}:2: reward_model.ground_truth"
        with pytest.raises(DataError, match=mentions(place, *found)):
            read(path, kind=kind)


@pytest.mark.parametrize(
    ("response", "answer", "outcome"),
    [
        (r"\boxed{0.5}", '["1/3", "1/2"]', Outcome.CORRECT),
        (r"\boxed{\frac13}", '["1/3", "1/2"]', Outcome.CORRECT),
        (r"\boxed{0.25}", '["1/3", "1/2"]', Outcome.WRONG),
        (r"\boxed{0.25}", '["1/3", "{"]', Outcome.UNKNOWN),
        (r"\boxed{[1, 2]}", "[1, 2]", Outcome.CORRECT),  # an interval
        (r"\boxed{1}", "[1, 2]", Outcome.WRONG),
    ],
)
def test_any_accepted_answer_is_right_and_an_unknown_verdict_never_wrong(
    response: str, answer: str, outcome: Outcome
) -> None:
    verdicts = rewards.try_verifiers(RewardConfig(kind="math"), [(response, answer)])
    assert [one.outcome for one in verdicts] == [outcome]


def test_columns_of_parquet_are_json_values_and_numbers_have_their_digits(tmp_path: Path) -> None:
    """Structs, lists, maps, dictionaries, large strings, decimals, nulls."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "own.py").write_text(OWN)
    columns = {
        "prompt": pyarrow.array(["a?", "b?"], pyarrow.large_string()).dictionary_encode(),
        "answer": pyarrow.array([decimal.Decimal("0.50"), decimal.Decimal("7.00")]),
        "map": pyarrow.array([[("x", 1)], None], pyarrow.map_(pyarrow.string(), pyarrow.int8())),
        "pairs": [[[1, 2], [3]], []],
        "never": pyarrow.nulls(2),
    }
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    prompts = read(path, kind=f"{tmp_path / 'own.py'}:verify", columns=None)
    assert [one.answer for one in prompts] == ["0.50", "7.00"]
    assert prompts[0].row == {
        "prompt": "a?",
        "map": {"x": 1},
        "pairs": [[1, 2], [3]],
        "never": None,
    }


def test_messages_in_a_cell_are_read_and_such_a_prompt_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cell = json.dumps(user("What?"))
    path = put_rows(tmp_path / "rows.csv", [{"messages": cell, "answer": 1}])
    first = first_row(path, RowKeys())
    assert first is not None and first[1].prompt == user("What?")
    assert not caplog.messages
    for text in (cell, repr(user("What?"))):
        put_rows(path, [{"prompt": text, "answer": 1}])
        first = first_row(path, RowKeys())
        assert first is not None and first[1].prompt == text
        caplog.clear()
        read(path)
        assert any("list of messages" in one for one in caplog.messages)


def test_rows_that_other_loaders_trip_over(tmp_path: Path) -> None:
    """Arrays and tuples that pandas wrote, columns of nulls, JSON within text, mixed types."""
    pandas, numpy = pytest.importorskip("pandas"), pytest.importorskip("numpy")
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "own.py").write_text(OWN)
    own = f"{tmp_path / 'own.py'}:verify"
    path = tmp_path / "rows.parquet"
    cells = {
        "prompt": [numpy.array(user("a?"), dtype=object)],
        "reward_model": [{"ground_truth": numpy.array(["1"], dtype=object)}],
        "extra_info": [{"index": numpy.int64(3), "split": ("train", "dapo")}],
    }
    pandas.DataFrame(cells).to_parquet(path)
    (prompt,) = read(path, columns={"prompt", "extra_info"}, id_key="extra_info.index", kind="math")
    assert (prompt.id, prompt.answer) == ("3", "1")
    assert prompt.row == {
        "prompt": user("a?"),
        "extra_info": {"index": 3, "split": ["train", "dapo"]},
    }
    text = json.dumps({"ground_truth": '{"target": 98}', "style": "rule"})
    table = {"prompt": [user("a?")], "reward_model": [text], "extra_info": pyarrow.nulls(1)}
    parquet.write_table(pyarrow.table(table), path)
    (prompt,) = read(path, columns=None, kind=own)
    assert (prompt.id, prompt.answer) == ("1", '{"target": 98}')
    assert prompt.row["extra_info"] is None and prompt.row["reward_model"] == text
    # Each label keeps what it is in its row, whatever the other rows have.
    labels = [1, "1.0", [2], 2.5]
    mixed = [{"id": i, "prompt": user("a?"), "label": one} for i, one in enumerate(labels)]
    prompts = read(put_rows(tmp_path / "mixed.jsonl", mixed))
    assert [(one.id, one.answer) for one in prompts] == [
        ("0", "1"), ("1", "1.0"), ("2", "2"), ("3", "2.5")
    ]  # fmt: skip
    # Flattened, as tables are.
    flat = [{"prompt": "a?", "reward_model.ground_truth": "007", "extra_info.index": 5}]
    (prompt,) = read(put_rows(tmp_path / "flat.csv", flat), id_key="extra_info.index")
    assert (prompt.id, prompt.answer) == ("5", "007")


def test_messages_of_every_row_end_with_the_models(tmp_path: Path) -> None:
    rows = [openai(0, *ASKED[0]), {"messages": [*openai(1, *ASKED[1])["messages"], *user("?")]}]
    path = put_rows(tmp_path / "rows.jsonl", rows)
    named = (f"{path}:2: messages.-1.role ('user') must be 'assistant'", f"{path}:1 was recognised")
    with pytest.raises(DataError, match=mentions(*named)):
        read(path)


def test_a_text_under_a_key_that_is_set_is_read_whole(tmp_path: Path) -> None:
    row = {"question": "What is 1 + 2?", **openai(0, "?", "3")}
    path = put_rows(tmp_path / "rows.jsonl", [row])
    first = first_row(path, RowKeys(prompt_key="question"))
    assert first is not None and first[1].prompt == "What is 1 + 2?"


SECRET = "41999"
ROWS_WITH_ANSWERS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "verl": (verl_row(0, "What?", SECRET), {}),
    "verl_text": ({"prompt": user("What?"), "reward_model": '{"ground_truth": "41999"}'}, {}),
    "slime": ({"prompt": "What?", "label": SECRET, "metadata": {"level": 3}}, {}),
    "trl": ({"prompt": user("What?"), "completion": openai(0, "", SECRET)["messages"][1:]}, {}),
    "openai": (openai(0, "What?", SECRET), {}),
    "keys": (
        {"question": "What?", "extra_info": [{"n": 1, "answer": SECRET}]}
        | {"messages": openai(0, "What?", SECRET)["messages"]},
        {"prompt_key": "question", "answer_key": "extra_info.0.answer"},
    ),
    "a_dotted_column": (
        {"messages": user("What?"), "a.b": SECRET, "a": {"b": SECRET, "c": 1}},
        {"prompt_key": "messages", "answer_key": "a.b"},
    ),
}


@pytest.mark.parametrize("name", ROWS_WITH_ANSWERS)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_kept_row_has_its_prompt_as_read_and_agents_get_it_without_the_answer(
    tmp_path: Path, name: str, suffix: str
) -> None:
    row, keys = ROWS_WITH_ANSWERS[name]
    (prompt,) = read(put_rows(tmp_path / f"rows{suffix}", [row]), columns=None, **keys)
    assert prompt.answer == SECRET
    shown = prompt_messages(prompt.row)
    assert [one["role"] for one in shown] == ["user"] and shown[0]["content"].endswith("What?")
    assert SECRET not in json.dumps(shown)
    assert (SECRET in json.dumps(prompt.row)) == (name != "openai")  # verifiers get their columns
    given = without(prompt.row, prompt.answer_key)
    assert SECRET not in json.dumps(given)
    assert prompt_messages(given) == shown
    others = {"extra_info", "metadata", "a", "reward_model"} & row.keys()
    assert others <= given.keys()


def test_messages_in_a_cell_are_kept_as_messages(tmp_path: Path) -> None:
    cell = json.dumps(user("What?"))
    path = put_rows(tmp_path / "rows.csv", [{"messages": cell, "answer": 1}])
    (prompt,) = read(path, columns=None)
    assert prompt.row == {"messages": user("What?")}


TESTS = {"inputs": ["1\n"], "outputs": ["2\n"]}


@pytest.mark.parametrize(
    ("components", "answer"),
    [
        ({"m": "math"}, ["1", "2"]),
        ({"c": "code"}, TESTS),
        ({"c": "code", "again": {"kind": "code", "weight": -1}}, TESTS),
        ({"m": "math", "e": "exact"}, ["7"]),
    ],
)
def test_components_read_an_answer_as_their_kinds_do(
    tmp_path: Path, components: dict[str, Any], answer: Any
) -> None:
    path = put_rows(tmp_path / "rows.jsonl", [{"prompt": "?", "answer": answer}])
    first = next(iter(components.values()))
    [alone] = read(path, kind=first)
    [made] = read(path, kind=RewardConfig(components=components))
    assert made.answer == alone.answer


@pytest.mark.parametrize(
    ("components", "row", "named"),
    [
        ({"m": "math", "e": "exact"}, {"answer": ["1", "2"]}, ("'exact' takes one", "m + e")),
        ({"m": "math", "c": "code"}, {"answer": ["1"]}, ("m + c", "math '1'", "code '[\"1\"]'")),
        ({"m": "math"}, {"answer": "1", "verifier": "x"}, ("reward.components (m)", "none")),
    ],
)
def test_what_components_cannot_read_is_named(
    tmp_path: Path, components: dict[str, Any], row: dict[str, Any], named: tuple[str, ...]
) -> None:
    path = put_rows(tmp_path / "rows.jsonl", [{"prompt": "?", **row}])
    with pytest.raises(DataError, match=mentions(*named)) as caught:
        read(path, kind=RewardConfig(components=components))
    assert "''" not in str(caught.value)
