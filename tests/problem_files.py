"""Reading problem files with the settings that a test is about, and defaults for the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from gapo_megatron.config import DataConfig, RewardConfig
from gapo_megatron.data.schema import read_prompts
from gapo_megatron.types import Prompt

_OPTIONS = ("source", "keep_unreadable", "with_rows")


def read_problems(
    path: str | Path, *, tokenizer: PreTrainedTokenizerBase, kind: str, **settings: Any
) -> list[Prompt]:
    """The problems of a file.

    Args:
        path: the file.
        tokenizer: of the policy.
        kind: `reward.kind`.
        settings: of the section `data`, and options of `read_prompts`.
    """
    options = {name: settings.pop(name) for name in _OPTIONS if name in settings}
    return read_prompts(
        path,
        tokenizer=tokenizer,
        data=DataConfig.model_validate({"train_path": "unused", **settings}),
        reward=RewardConfig.model_validate({"kind": kind}),
        **options,
    )
