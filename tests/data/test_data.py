"""Problem files, tokenizer checks, the order of problems, and the demo's generated task."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import sentencepiece
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig

from gapo_megatron.data.schema import read_jsonl
from gapo_megatron.data.source import PromptSource
from gapo_megatron.data.tokenizer import load_tokenizer
from gapo_megatron.errors import CheckpointError, ConfigError, DataError
from gapo_megatron.types import Prompt
from gapo_tools.demonstration import demo_task as arithmetic
from tests.messages import mentions
from tests.problem_files import read_problems


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    arithmetic.write_task(folder, seed=0, num_eval=400, num_train=400, num_supervised=500)
    return folder


@pytest.fixture(scope="module")
def hf_dir(task):
    rows = read_jsonl(task / "supervised.jsonl", keys=("prompt", "response"))
    tokenizer = arithmetic.write_tokenizer(
        arithmetic.training_texts([row for _, row in rows]), task / "initial"
    )
    arithmetic.write_initial_model(tokenizer, task / "initial", seed=0)
    return task / "initial"


@pytest.fixture(scope="module")
def tokenizer(hf_dir):
    return load_tokenizer(hf_dir)


def _write(path: Path, *rows: object) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _row(id: str = "a", prompt: str = "1+2=", answer: str = "3", **more: object) -> dict:
    return {"id": id, "prompt": prompt, "answer": answer, **more}


def _read(path: Path, tokenizer, **options) -> list[Prompt]:
    defaults = {"max_prompt_tokens": 16, "kind": "exact"}
    return read_problems(path, tokenizer=tokenizer, **(defaults | options))


def test_a_good_file_is_read_in_order_with_its_tokens(tmp_path, tokenizer):
    rows = _row(level="easy", source="kept out"), "", _row("b", "9+9=", "18")
    prompts = _read(_write(tmp_path / "p.jsonl", *rows), tokenizer)
    assert prompts == [
        Prompt("a", tuple(tokenizer.encode("1+2=")), "3", "easy"),
        Prompt("b", tuple(tokenizer.encode("9+9=")), "18", ""),
    ]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"id": "b", "prompt": ', ["JSON"]),
        ("[1, 2]", ["[1, 2]"]),
        ({"id": "b", "prompt": "1+2="}, ["'answer'", "missing", "id, prompt"]),
        ({"id": "b", "prompt": "1+2=", "\ud800": ""}, ["'answer'", "missing", "prompt, \\ud800"]),
        (_row("b", answer=True), ["answer (True)"]),
        (_row("b", level=2), ["level (2)"]),
        (_row("b", prompt="  "), ["prompt", "empty"]),
        (_row("b", level="half \ud800"), ["level", "surrogate"]),
        (_row("a"), ["id 'a'", "line 1"]),
        (_row("b", "1+2+3+4+5+6+7+8+9="), ["18", "data.max_prompt_tokens", "16"]),
    ],
)
def test_a_bad_line_is_named_with_the_rule_it_breaks(tmp_path, tokenizer, line, named):
    path = _write(tmp_path / "p.jsonl", _row(), "", line)
    with pytest.raises(DataError, match=mentions(f"{path}:3:", *named)):
        _read(path, tokenizer)


def test_an_answer_may_lie_in_a_file_beside_the_problems(tmp_path, tokenizer):
    (tmp_path / "tests.jsonl").write_bytes(b'["first"]\n["second"]\n')
    reference = {"file": "tests.jsonl", "offset": 10, "length": 10}
    path = _write(tmp_path / "p.jsonl", _row(answer=reference))
    (prompt,) = _read(path, tokenizer, kind="code")
    assert json.loads(prompt.answer) == reference | {"file": str(tmp_path / "tests.jsonl")}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"length": 11}, ["10", "21", "tests.jsonl"]),
        ({"offset": -1}, ["-1", "9", "tests.jsonl"]),
        ({"length": 0}, ["10 to 10", "tests.jsonl"]),
        ({"offset": None}, ["string", "file", "offset", "length"]),
        ({"length": True}, ["string", "file", "offset", "length"]),
        ({"file": "gone.jsonl"}, ["gone.jsonl", "No such file"]),
        ({"file": "."}, ["directory"]),
        ({"file": "/dev/null", "offset": 0}, ["/dev/null", "regular file"]),
        ({"file": "fifo"}, ["fifo", "regular file"]),
        ({"file": "a\0b"}, ["NUL"]),
        ({"file": "\ud800"}, ["string", "file"]),
        ({"file": "x" * 300}, ["too long"]),
        ({"offset": 10**4299}, ["string", "offset"]),
        ({"offset": 9}, ["reward.kind 'code'", "JSON"]),
        ({"length": 9}, ["reward.kind 'code'", "JSON"]),
    ],
)
def test_an_answer_that_is_not_where_it_should_be_is_an_error(tmp_path, tokenizer, change, named):
    (tmp_path / "tests.jsonl").write_bytes(b'["first"]\n["second"]')
    os.mkfifo(tmp_path / "fifo")
    reference = {"file": "tests.jsonl", "offset": 10, "length": 10} | change
    path = _write(tmp_path / "p.jsonl", _row(answer=json.dumps(TESTS)), _row("b", answer=reference))
    with pytest.raises(DataError, match=mentions(f"{path}:2:", "answer", *named)):
        _read(path, tokenizer, kind="code")


TESTS = {"inputs": ["1\n"], "outputs": ["2\n"]}
REFERENCE = {"file": "tests.jsonl", "offset": 0, "length": 9}


@pytest.mark.parametrize(
    ("kind", "answer", "named"),
    [
        ("exact", REFERENCE, ["row"]),
        ("exact", "11>25", ["'>'"]),
        ("math", "\\frac{1", ["frac"]),
        ("code", "25", ["object or list"]),
        ("code", json.dumps(TESTS | {"fn_name": 3}), ["fn_name", "3"]),
        ("code", json.dumps({"file": "gone", "offset": 0, "length": 1}), ["gone"]),
        ("instructions", "no comma", ["instructions"]),
        ("instructions", '{"instructions": [{"id": "no:such"}]}', ["no:such"]),
    ],
)
def test_an_answer_that_no_verifier_could_judge_by_is_refused(
    tmp_path, tokenizer, kind, answer, named
):
    (tmp_path / "tests.jsonl").write_bytes(b'["first"]\n')
    path = _write(tmp_path / "p.jsonl", _row(answer=answer))
    with pytest.raises(
        DataError, match=mentions(f"{path}:1:", "answer", f"reward.kind '{kind}'", *named)
    ):
        _read(path, tokenizer, kind=kind)


def test_all_unreadable_answers_are_counted(tmp_path, tokenizer):
    rows = [_row(str(i), answer="{2" if i % 2 else "2") for i in range(20)]
    rows[7]["answer"] = REFERENCE
    (tmp_path / "tests.jsonl").write_bytes(b'["first"]\n')
    path = _write(tmp_path / "p.jsonl", *rows)
    with pytest.raises(DataError, match=mentions("10 of 20", f"{path}:2:", f"{path}:8:")) as error:
        _read(path, tokenizer, kind="math")
    assert len(str(error.value)) < 2000


def test_empty_and_missing_files_are_errors(tmp_path, tokenizer):
    with pytest.raises(DataError, match=mentions(tmp_path / "empty.jsonl", "no problems")):
        _read(_write(tmp_path / "empty.jsonl", ""), tokenizer)
    with pytest.raises(DataError, match=mentions(tmp_path / "gone.jsonl", "No such file")):
        _read(tmp_path / "gone.jsonl", tokenizer)


def test_chat_template_is_applied_once_and_needs_one(tmp_path, hf_dir):
    tokenizer = load_tokenizer(hf_dir)
    path = _write(tmp_path / "p.jsonl", _row())
    with pytest.raises(ConfigError, match=r"data\.chat_template"):
        _read(path, tokenizer, chat_template=True)
    tokenizer.chat_template = (
        "{% for m in messages %}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    (prompt,) = _read(path, tokenizer, chat_template=True)
    assert prompt.token_ids == tuple(tokenizer.encode(">1+2=>"))


def test_a_template_that_makes_a_book_of_a_prompt_is_refused(tmp_path, hf_dir):
    tokenizer = load_tokenizer(hf_dir)
    tokenizer.chat_template = "{{ messages[0].content }}{{ '=' * 100000000 }}"
    with pytest.raises(ConfigError, match=f"chat template.*{10**8 + 4}.*{2**20}"):
        _read(_write(tmp_path / "p.jsonl", _row()), tokenizer, chat_template=True)


def test_special_tokens_come_from_the_tokenizer_or_the_template_not_both(tmp_path, hf_dir):
    tokenizer = load_tokenizer(hf_dir)
    bos = tokenizer.convert_tokens_to_ids("=")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="= $A", special_tokens=[("=", bos)]
    )
    path = _write(tmp_path / "p.jsonl", _row())
    assert _read(path, tokenizer)[0].token_ids[:2] == (bos, *tokenizer.encode("1")[1:])
    tokenizer.chat_template = "={% for m in messages %}{{ m.content }}{% endfor %}"
    assert _read(path, tokenizer, chat_template=True)[0].token_ids.count(bos) == 2  # and "1+2="


@pytest.mark.parametrize(
    ("template", "expected", "eos"),
    [
        ("$A </s>", "1+2=", "</s>"),
        ("= $A </s>", "=1+2=", "</s>"),
        ("</s> $A </s>", "</s>1+2=", "</s>"),
        ("</s> $A", "</s>1+2=", "</s>"),  # a BOS that is the EOS
        ("$A", "1+2=", "1"),  # any text may end with it
    ],
)
def test_an_end_that_the_tokenizer_appends_is_no_part_of_a_prompt(
    tmp_path, hf_dir, template, expected, eos
):
    tokenizer = load_tokenizer(hf_dir)
    tokenizer.eos_token = eos
    end, bos = tokenizer.convert_tokens_to_ids(["</s>", "="])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("</s>", end), ("=", bos)]
    )
    path = _write(tmp_path / "p.jsonl", _row(), _row("b", "1+2=</s>"))
    first, written = (list(one.token_ids) for one in _read(path, tokenizer))
    assert tokenizer.convert_ids_to_tokens(first) == tokenizer.tokenize(expected)
    assert written == [*first, end]  # the text's own


def test_a_folder_that_has_no_tokenizer_for_training_is_an_error(tmp_path, hf_dir):
    with pytest.raises(ConfigError, match=mentions(f"model.hf_dir ({tmp_path})", "config.json")):
        load_tokenizer(tmp_path)
    broken = tmp_path / "broken"
    load_tokenizer(hf_dir).save_pretrained(broken)
    AutoConfig.from_pretrained(hf_dir).save_pretrained(broken)
    settings = json.loads((broken / "tokenizer_config.json").read_text())
    settings["eos_token"] = None
    (broken / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=mentions("model.hf_dir", broken, "eos_token")):
        load_tokenizer(broken)
    (tmp_path / "config.json").write_text((hf_dir / "config.json").read_text())
    with pytest.raises(ConfigError, match=mentions("model.hf_dir", tmp_path, "tokenizer.json")):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=mentions("model.hf_dir", tmp_path, "tokenizer", "load")):
        load_tokenizer(tmp_path)


def _prompts(num: int) -> list[Prompt]:
    return [Prompt(str(i), (i,), "") for i in range(num)]


def _ids(batch: list[Prompt]) -> list[int]:
    return [int(prompt.id) for prompt in batch]


def test_every_epoch_holds_every_problem_once_in_another_order():
    source = PromptSource(_prompts(12), seed=1)
    epochs = [_ids(source.next_batch(4) + source.next_batch(8)) for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]
    assert epochs[0] != _ids(PromptSource(_prompts(12), seed=2).next_batch(12))


def test_problems_are_read_once_for_all_positions() -> None:
    """Every rank takes a position twice a step, and there may be millions of problems."""
    num_read = 0

    class Tokens(tuple[int, ...]):
        __slots__ = ()

        def __repr__(self) -> str:
            nonlocal num_read
            num_read += 1
            return "()"

    source = PromptSource([Prompt(f"p{i}", Tokens(), "") for i in range(5)], seed=0)
    first = source.state_dict()
    first["dataset"]["rows"] = "changed"
    source.require_same(
        PromptSource([Prompt(f"p{i}", (), "") for i in range(5)], seed=0).state_dict()
    )
    assert source.state_dict()["dataset"]["rows"] != "changed"
    assert num_read == 5


def test_resume_with_other_problems_is_an_error():
    state = PromptSource(_prompts(10), seed=0).state_dict()
    with pytest.raises(CheckpointError, match=mentions("data.train_path", 11, "run.output_dir")):
        PromptSource(_prompts(11), seed=0).load_state_dict(state)
    for remaining in ([3, 10], [-1]):
        says = mentions("remaining", remaining[-1], "10 problems")
        with pytest.raises(CheckpointError, match=says):
            PromptSource(_prompts(10), seed=0).load_state_dict(state | {"remaining": remaining})


def test_generated_task_is_reproducible_and_holds_problems_out(task, tmp_path):
    arithmetic.write_task(tmp_path, seed=0, num_eval=400, num_train=400, num_supervised=500)
    for name in ("eval", "train", "supervised"):
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (task / f"{name}.jsonl").read_bytes()

    def prompts(name: str) -> list[str]:
        return [row["prompt"] for _, row in read_jsonl(task / f"{name}.jsonl", keys=("prompt",))]

    held_out, train = prompts("eval"), prompts("train")
    assert len(held_out) == len(set(held_out)) == 400
    assert len(train) == len(set(train)) == 400
    assert len(prompts("supervised")) == 500
    assert not set(held_out) & (set(train) | set(prompts("supervised")))


def test_generated_answers_are_right_and_graded(task):
    rows = [row for _, row in read_jsonl(task / "eval.jsonl", keys=("prompt", "answer", "level"))]
    for row in rows:
        terms = row["prompt"].removesuffix("=").split("+")
        assert int(row["answer"]) == sum(map(int, terms))
        assert row["level"] == f"additions_{len(terms) - 1}"
    levels = [row["level"] for row in rows]
    assert {levels.count(level) for level in levels} == {100}


def test_hugging_face_tokenizer_is_the_sentencepiece_model(task, hf_dir, tokenizer):
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(hf_dir / "tokenizer.model"))
    rows = [row for _, row in read_jsonl(task / "supervised.jsonl", keys=("prompt", "response"))]
    for text in arithmetic.training_texts(rows):
        assert tokenizer.encode(text) == pieces.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
        # Prompt and response meet at a token boundary: tokenised apart they are the same tokens.
        prompt, equals, response = text.partition("=")
        assert tokenizer.encode(prompt + equals) + tokenizer.encode(response) == pieces.encode(text)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, len(pieces))
