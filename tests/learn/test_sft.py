"""Supervised training: its examples, its learning rate, and its result."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from gapo_megatron.config import Config, DataConfig
from gapo_megatron.data.tokenizer import load_tokenizer
from gapo_megatron.errors import ConfigError, ConversionError, DataError
from gapo_megatron.policy import destroy
from gapo_megatron.run.supervised import _learning_rate, _read_examples
from gapo_megatron.sft import train_supervised
from gapo_tools.demonstration import demo_task as arithmetic
from tests.chat_templates import tokenizer_of
from tests.configs import config_of
from tests.messages import mentions
from tests.tokenizers import llama2_like

LINES = [
    {"prompt": f"{a}+{b}=", "response": f"{a}+{b}>{a + b}"} for a in (1, 2, 3) for b in (1, 2, 3)
]


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers with a tokenizer of characters."""
    folder: Path = tmp_path_factory.mktemp("initial")
    tokenizer = arithmetic.write_tokenizer(["1+2=3>45", "67890+"], folder)
    torch.manual_seed(0)
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,  # 32 per head, the least that vLLM serves on a CPU
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(initial: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(initial)


def config(**sections: dict[str, Any]) -> Config:
    usual = {
        "run": {"output_dir": "out"},
        "model": {"hf_dir": "model", "precision": "fp32"},
        "data": {"train_path": "train.jsonl", "max_prompt_tokens": 6},
        "rollout": {"max_response_tokens": 6},
        "batch": {"max_tokens_per_microbatch": 32},
    }
    return config_of(usual, sections)


LIMITS: dict[str, Any] = {"end": 3, "data": DataConfig(train_path="unused"), "longest": 12}
"""Arguments of `_read_examples`, as `config` gives them."""


def write(path: Path, *rows: dict[str, str]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_examples_are_tokens_with_one_end(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "1+2=", "response": "3"})
    ((prompt, response),) = _read_examples(path, tokenizer, **LIMITS)
    assert tokenizer.decode(prompt) == "1+2="
    assert response.tolist() == [*tokenizer.encode("3"), LIMITS["end"]]


@pytest.mark.parametrize(
    ("asked", "answer", "tokens"),
    [
        ("1+2=", "3", ["3"]),  # not a space and 3
        ("1+2=\n", " 3", ["\u25813"]),
        ("1+2", "=3", ["\u2581", "=", "3"]),  # not the token "2=": the prompt stays as it is
    ],
)
def test_a_response_has_the_tokens_that_continue_its_prompt(
    tmp_path: Path, asked: str, answer: str, tokens: list[str]
) -> None:
    tokenizer = llama2_like("123+=", ("\u2581", "1"), ("\u2581", "3"), ("2", "="))
    path = write(tmp_path / "a.jsonl", {"prompt": asked, "response": answer})
    ((prompt, response),) = _read_examples(path, tokenizer, **LIMITS)
    assert prompt.tolist() == tokenizer.encode(asked)
    assert tokenizer.convert_ids_to_tokens(response[:-1].tolist()) == tokens
    assert response[-1] == LIMITS["end"]


def test_a_thought_that_the_template_begins_is_not_begun_again(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("r1_distill")  # its prompts end with <think> and a line break
    limits = {"end": 3, "longest": 100}
    data = DataConfig(train_path="unused", chat_template=True)
    plain = {"prompt": "1+2=", "response": "Easy. I say <think> no more.</think> 3"}
    path = write(tmp_path / "a.jsonl", plain, plain | {"response": "\n<think>\nEasy.</think> 3"})
    with pytest.raises(DataError, match=mentions("a.jsonl:2", "'<think>'", "chat_template")):
        _read_examples(path, tokenizer, data=data, **limits)
    without = DataConfig(train_path="unused", chat_template=False)
    assert len(_read_examples(path, tokenizer, data=without, **limits)) == 2


def test_bad_examples_name_file_and_line(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    good = {"prompt": "1+2=", "response": "3"}
    path = write(tmp_path / "long.jsonl", good, {"prompt": "1+2=", "response": "3>" * 6})
    with pytest.raises(DataError, match=mentions("long.jsonl:2", 4, 13, 12)):
        _read_examples(path, tokenizer, **LIMITS)
    path = write(tmp_path / "long.jsonl", good, {"prompt": "1+2=" * 4, "response": "3"})
    with pytest.raises(DataError, match=mentions("long.jsonl:2: the prompt has", 16, 12)):
        _read_examples(path, tokenizer, **LIMITS)
    path = write(tmp_path / "key.jsonl", good, good, {"prompt": "1+2="})
    with pytest.raises(DataError, match=r"key\.jsonl:3.*response"):
        _read_examples(path, tokenizer, **LIMITS)
    (tmp_path / "torn.jsonl").write_text(json.dumps(good) + '\n{"prompt": "1')
    with pytest.raises(DataError, match=r"torn\.jsonl:2.*JSON"):
        _read_examples(str(tmp_path / "torn.jsonl"), tokenizer, **LIMITS)
    with pytest.raises(DataError, match=mentions(tmp_path / "empty.jsonl")):
        _read_examples(write(tmp_path / "empty.jsonl"), tokenizer, **LIMITS)


def test_learning_rate_rises_then_falls_to_a_tenth() -> None:
    rates = [_learning_rate(1.0, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0
    assert sorted(rates[9:], reverse=True) == rates[9:]
    assert rates[-1] == pytest.approx(0.1, abs=0.011)


def test_a_config_without_the_section_is_refused() -> None:
    with pytest.raises(ConfigError, match="supervised"):
        train_supervised(config())


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ("initial", "supervised.initial_hf_dir"),
        ("initial/x/..", "supervised.initial_hf_dir"),
        ("link", "supervised.initial_hf_dir"),
        ("data", "supervised.train_path"),
        ("file", "is a file"),
        ("", "working directory"),
        (".", "working directory"),
        ("..", "data.train_path"),
        ("train", "data.train_path"),
        ("other", "new, empty"),
    ],
)
def test_only_an_earlier_result_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, named: str
) -> None:
    for name in ("initial", "data", "other", "here"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_text("")
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("initial")
    monkeypatch.chdir(tmp_path / "here" if target in ("", ".", "..") else tmp_path)
    before = sorted(tmp_path.rglob("*"))
    settings = {
        "initial_hf_dir": str(tmp_path / "initial"),
        "train_path": str(tmp_path / "data/lines.jsonl"),
        "num_steps": 1,
    }
    data = {"train_path": str(tmp_path / "train/lines.jsonl"), "max_prompt_tokens": 6}
    with pytest.raises(ConfigError) as error:
        train_supervised(config(model={"hf_dir": target}, data=data, supervised=settings))
    assert "model.hf_dir" in str(error.value) and named in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


def negative_log_likelihood(folder: Path, tokenizer: PreTrainedTokenizerBase) -> float:
    """Loss by transformers, per response token of LINES, at temperature 1."""
    model = Qwen2ForCausalLM.from_pretrained(folder)
    total, count = 0.0, 0
    for line in LINES:
        prompt, response = tokenizer.encode(line["prompt"]), tokenizer.encode(line["response"])
        ids = torch.tensor([[*prompt, *response, tokenizer.eos_token_id]])
        with torch.no_grad():
            log_p = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        total -= float(log_p.gather(1, ids[0, len(prompt) :, None]).sum())
        count += len(log_p)
    return total / count


@pytest.mark.parametrize(
    ("name", "value", "error", "named"),
    [
        ("norm", torch.inf, ConversionError, ("model.norm.weight", "initial/model", "inf")),
        ("layers.1.mlp.up_proj", 6e4, ConfigError, ("'fp16'", "layer 1, mlp", "supervised.train")),
    ],
)
def test_weights_that_are_not_finite_or_leave_fp16s_range_are_refused(
    tmp_path: Path,
    initial: Path,
    name: str,
    value: float,
    error: type[Exception],
    named: tuple[str, ...],
) -> None:
    folder = tmp_path / "initial"
    shutil.copytree(initial, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.{name}.weight"][..., -1] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {
        "initial_hf_dir": str(folder),
        "train_path": write(tmp_path / "lines.jsonl", *LINES),
        "num_steps": 1,
    }
    out = tmp_path / "out"
    run = config(model={"hf_dir": str(out), "precision": "fp16"}, supervised=settings)
    with patch.dict(os.environ), pytest.raises(error, match=mentions(*named)):
        try:
            train_supervised(run)
        finally:
            destroy()
            dist.destroy_process_group()
    assert not out.exists()


def test_a_run_lowers_the_likelihoods_loss(
    tmp_path: Path, initial: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    def train(num_steps: int) -> float:
        supervised = {
            "initial_hf_dir": str(initial),
            "train_path": write(tmp_path / "lines.jsonl", *LINES),
            "num_steps": num_steps,
            "batch_sequences": len(LINES),
            "learning_rate": 1e-2,
        }
        # Nothing of [objective], and no temperature, has a say.
        loss = {"kl_coef": 1.0, "entropy_coef": 1.0}
        settings = config(
            model={"hf_dir": str(tmp_path / f"after{num_steps}")},
            rollout={"temperature": 0.5},
            objective=loss,
            supervised=supervised,
        )
        with patch.dict(os.environ):
            try:
                return train_supervised(settings)
            finally:
                destroy()
                dist.destroy_process_group()

    before = negative_log_likelihood(initial, tokenizer)
    # A mean of float32 log-probs of order 3, to about 1e-6.
    assert train(1) == pytest.approx(before, abs=3e-6)
    last = train(20)
    assert last < 0.5 * before
    after = negative_log_likelihood(tmp_path / "after20", tokenizer)
    assert after < last  # the loss is the last step's, before its update
    assert load_tokenizer(tmp_path / "after20").get_vocab() == tokenizer.get_vocab()
    generation = json.loads((tmp_path / "after20/generation_config.json").read_text())
    assert generation["eos_token_id"] == [tokenizer.eos_token_id]  # of the examples
    assert negative_log_likelihood(initial, tokenizer) == before
