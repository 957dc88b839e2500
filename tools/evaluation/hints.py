"""What `tools/evaluate.py` says where `--config` and other options may not mean the same."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from typing import Any

from gapo_megatron.config import EnvironmentConfig
from gapo_tools.evaluation.chosen import config_tree

_OF_PROMPTS: dict[str, Any] = {
    "chat_template": False,
    "system_prompt": "",
    "chat_template_kwargs": {},
    "end_tokens": [],
}
"""Settings of [data] that have an option of the same name, and their defaults."""


def hints(arguments: Namespace, acts: EnvironmentConfig, *, has_template: bool) -> list[str]:
    """Warnings, each one line.

    Args:
        arguments: arguments of the command line.
        acts: the environment they choose.
        has_template: whether the tokenizer has a chat template.

    Raises:
        ConfigError: the file of `--config` cannot be read.
    """
    if arguments.config is None:
        return [_UNUSED_TEMPLATE] if has_template and not arguments.chat_template else []
    found = []
    if not arguments.problems and (arguments.environment or acts == EnvironmentConfig()):
        why = "--environment replaces it" if arguments.environment else "it is one_turn"
        found.append(f"--config: without --problems only [environment] is read from it, and {why}")
    data = config_tree(arguments.config, field="--config").get("data")
    if isinstance(data, dict):
        found += _differences(data, arguments)
    elif has_template and not arguments.chat_template:
        found.append(_UNUSED_TEMPLATE)
    return found


_UNUSED_TEMPLATE = (
    "the tokenizer has a chat template, but --chat-template is not given; give it if "
    "data.chat_template was true in training"
)


def _differences(data: dict[str, Any], arguments: Namespace) -> list[str]:
    """Prompts are made as the options say, not as the config does."""
    found = []
    for name, usual in _OF_PROMPTS.items():
        trained, option = data.get(name, usual), f"--{name.replace('_', '-')}"
        if trained == getattr(arguments, name):
            continue
        if isinstance(trained, str):
            option += f" {shlex.quote(trained)}"
        elif isinstance(trained, dict):
            option += f" {shlex.quote(json.dumps(trained))}"
        elif isinstance(trained, list):
            option += f" {shlex.join(trained)}"
        remedy = f"give {option}" if trained else f"leave out {option.split()[0]}"
        found.append(f"--config ({arguments.config}): data.{name} is {trained!r}: {remedy}")
    return found
