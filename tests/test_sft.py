"""Supervised training: what it reads, and how its learning rate moves."""

import json

import pytest
from transformers import AutoTokenizer

from gapo_megatron.config import parse_config
from gapo_megatron.data import arithmetic
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.sft import _learning_rate, _read_examples, train_supervised


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    arithmetic.write_tokenizer(["1+2=3>45", "67890+"], folder)
    return AutoTokenizer.from_pretrained(folder)


def config(**supervised):
    return parse_config(
        {
            "run": {"output_dir": "out", "num_steps": 1},
            "model": {"hf_dir": "model", "precision": "fp32"},
            "data": {"train_path": "train.jsonl", "max_prompt_tokens": 6},
            "rollout": {"max_response_tokens": 6},
            "reward": {"kind": "exact"},
            **supervised,
        },
        source="test",
    )


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_examples_are_tokens_with_one_eos(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", {"prompt": "1+2=", "response": "3"})
    ((prompt, response),) = _read_examples(path, tokenizer, config())
    assert tokenizer.decode(prompt) == "1+2="
    assert response.tolist() == [*tokenizer.encode("3"), tokenizer.eos_token_id]


def test_bad_examples_name_file_and_line(tmp_path, tokenizer):
    good = {"prompt": "1+2=", "response": "3"}
    path = write(tmp_path / "long.jsonl", good, {"prompt": "1+2=", "response": "3>" * 6})
    with pytest.raises(DataError, match=r"long\.jsonl:2.*12"):
        _read_examples(path, tokenizer, config())
    path = write(tmp_path / "key.jsonl", good, good, {"prompt": "1+2="})
    with pytest.raises(DataError, match=r"key\.jsonl:3.*response"):
        _read_examples(path, tokenizer, config())


def test_learning_rate_rises_then_falls_to_a_tenth():
    rates = [_learning_rate(1.0, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0
    assert sorted(rates[9:], reverse=True) == rates[9:]
    assert rates[-1] == pytest.approx(0.1, abs=0.011)


def test_a_config_without_the_section_is_refused():
    with pytest.raises(ConfigError, match="supervised"):
        train_supervised(config())
