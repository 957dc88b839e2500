"""What ends a response: stated once, whatever the model's files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gapo_megatron.config import DataConfig
from gapo_megatron.data.end_tokens import EndTokens, find_end_tokens
from gapo_megatron.data.messages import bind_template
from gapo_megatron.errors import ConfigError
from tests.chat_templates import FAMILIES, put_family, tokenizer_of
from tests.messages import mentions

OTHER = 7
"""A token that only config.json names."""


def ends_of(folder: Path, tokenizer: Any, **settings: Any) -> EndTokens:
    tree = {"train_path": "unused", "chat_template": True, **settings}
    data = DataConfig.model_validate(tree)
    bind_template(tokenizer, data, date="2026-07-01" if data.chat_template else "")
    return find_end_tokens(tokenizer, data, folder, vocab_size=len(tokenizer))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_response_ends_at_all_that_the_files_name_and_the_template_writes(
    name: str, tmp_path: Path
) -> None:
    tokenizer, family = tokenizer_of(name), FAMILIES[name]
    put_family(tmp_path, name, eos_token_id=OTHER)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [OTHER, 9]}))
    end, eos = tokenizer.convert_tokens_to_ids([family.ends, family.eos])
    ends = ends_of(tmp_path, tokenizer)
    assert ends.ids[0] == end, "training examples end as the template's turns do"
    assert {*ends.ids} == {end, eos, OTHER, 9} and not ends.warning
    assert ends.sources[OTHER] == ("generation_config.json", "config.json")
    if name == "gpt_oss":  # its other messages of the model do not end a response
        assert tokenizer.convert_tokens_to_ids("<|end|>") not in ends.ids
    without = ends_of(tmp_path, tokenizer, chat_template=False)
    assert without.ids[0] == eos and {*without.ids} == {eos, OTHER, 9}


def test_a_setting_overrules_all_others(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen3")
    put_family(tmp_path, "qwen3")
    given = ["<|im_end|>", "<|endoftext|>"]
    ends = ends_of(tmp_path, tokenizer, end_tokens=given)
    assert list(ends.ids) == tokenizer.convert_tokens_to_ids(given) and not ends.warning
    assert ends_of(tmp_path, tokenizer, end_tokens=given[1:]).warning
    with pytest.raises(ConfigError, match=mentions("data.end_tokens", "two words", 9)):
        ends_of(tmp_path, tokenizer, end_tokens=["two words"])


@pytest.mark.parametrize("after", ["\\n\\nUser:", ""])
def test_a_template_whose_turns_end_at_nothing_is_told(tmp_path: Path, after: str) -> None:
    """With no token at all, or with a word: responses invent the turns that follow."""
    tokenizer = tokenizer_of("qwen3")
    put_family(tmp_path, "qwen3")
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ m.content }}}}{after}{{% endfor %}}"
    ends = ends_of(tmp_path, tokenizer)
    assert ends.ids == (tokenizer.eos_token_id,)
    assert "model.hf_dir" in ends.warning and str(ends) in ends.warning


def test_no_end_at_all_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen3")
    put_family(tmp_path, "qwen3", eos_token_id=None)
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match=mentions("model.hf_dir", "data.end_tokens")):
        ends_of(tmp_path, tokenizer, chat_template=False)
