"""Reading problem files with the settings that a test is about, and defaults for the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from gapo_megatron.config import DataConfig, RewardConfig
from gapo_megatron.data.messages import bind_template
from gapo_megatron.data.schema import read_prompts
from gapo_megatron.types import Prompt

_OF_REWARD = ("kind", "verifiers")
_OF_DATA = tuple(DataConfig.model_fields)


def read_problems(
    path: str | Path, *, tokenizer: PreTrainedTokenizerBase, **given: Any
) -> list[Prompt]:
    """The problems of a file.

    Args:
        path: the file.
        tokenizer: of the policy.
        given: settings of the sections `data` and `reward`, and options of `read_prompts`.
    """
    reward = {name: given.pop(name) for name in _OF_REWARD if name in given}
    given_data = {name: given.pop(name) for name in _OF_DATA if name in given}
    data = DataConfig.model_validate({"train_path": "unused", **given_data})
    bind_template(tokenizer, data, date=data.template_date)
    return read_prompts(
        path,
        tokenizer=tokenizer,
        data=data,
        reward=RewardConfig.model_validate(reward),
        **given,
    )
