"""Implementations of `rollout.environment.Environment`, a file for each, and the config's choice.

Importing this package imports no torch: a wrong setting is found before seconds of imports.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from gapo_megatron import user_code
from gapo_megatron.config.environment import SERVED
from gapo_megatron.errors import ConfigError, said, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from gapo_megatron.config import EnvironmentConfig
    from gapo_megatron.rollout.environment import Environment

SETTING = "environment.kind"
_OURS = {
    "one_turn": "gapo_megatron.rollout.environments.one_turn:OneTurn",
    "tools": "gapo_megatron.rollout.environments.tools:Tools",
    "nemo_gym": "gapo_megatron.rollout.environments.nemo_gym:NemoGym",
    "openenv": "gapo_megatron.rollout.environments.openenv:OpenEnv",
}
"""Code of the kinds that a word names."""
_METHODS = ("begin", "respond", "judge")


def check(config: EnvironmentConfig, *, system_prompt: str = "") -> None:
    """Import the code that the config names, and check it, without a tokenizer.

    A function whose first parameter is called `session` is an agent (`rollout.agents`).

    Args:
        config: section `environment`.
        system_prompt: `data.system_prompt`, which an agent would never send.

    Raises:
        ConfigError: names setting, file, name, and what is missing.
    """
    made = _load(config)
    if config.structured_outputs and not is_agent(made.func):
        raise ConfigError(
            f"environment.structured_outputs (true) must be false: {SETTING} ({config.kind!r}) is "
            "no agent, whose requests could ask for one"
        )
    _with_limit(config, made)
    if is_agent(made.func):
        if system_prompt:
            raise ConfigError(
                f"data.system_prompt or --system-prompt ({shown(system_prompt)}) must be empty: "
                f"{SETTING} ({config.kind!r}) is an agent, which sends its own"
            )
        _check_settings(config.kind, made)
    elif isinstance(made.func, type):
        _check_methods(config.kind, made.func)
    if config.kind == "openenv" and system_prompt:
        raise ConfigError(
            f"data.system_prompt or --system-prompt ({shown(system_prompt)}) must be empty: with "
            f"{SETTING} ('openenv') a row's own messages begin the conversation"
        )
    if config.kind in SERVED and "url" not in config.settings:
        raise ConfigError(f"environment.settings.url is missing: {config.kind!r} needs an address")


def is_agent(found: Callable[..., Any]) -> bool:
    """Whether the code that a config names is an agent: its first parameter is `session`."""
    first = next(iter(inspect.signature(found).parameters), "")
    return first == "session" and not isinstance(found, type)


def build(
    config: EnvironmentConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template: bool = True,
) -> Environment:
    """Build the config's environment.

    Args:
        config: section `environment`.
        tokenizer: the policy's, which renders as prompts were rendered (`bind_template`).
        chat_template: `data.chat_template`: whether prompts are rendered by the tokenizer's chat
            template; for `tools`, unless its settings say otherwise.

    Raises:
        ConfigError: see `check`; or its class refuses the settings.
    """
    made = _load(config)
    if is_agent(made.func):
        from gapo_megatron.rollout.agents.environment import Agents

        return Agents(tokenizer, made, config)
    made = _with_limit(config, made)
    if config.kind in SERVED:
        made = functools.partial(made, timeout_s=config.call_timeout_s)
    if config.kind == "tools":
        made = functools.partial(made, **{"chat_template": chat_template} | made.keywords)
    environment = user_code.build(made, tokenizer, setting=SETTING)
    _check_methods(config.kind, environment)
    return cast("Environment", environment)


def _load(config: EnvironmentConfig) -> functools.partial[Any]:
    name = _OURS.get(config.kind, config.kind)
    return user_code.load_with_settings(name, config.settings, setting=SETTING)


def _with_limit(config: EnvironmentConfig, made: functools.partial[Any]) -> functools.partial[Any]:
    """The environment with `environment.max_call_tokens`, if it is set.

    Raises:
        ConfigError: nothing would be cut: it is a class without such an argument.
    """
    if not config.max_call_tokens or is_agent(made.func):
        return made
    if "max_call_tokens" not in inspect.signature(made.func).parameters:
        raise ConfigError(
            f"environment.max_call_tokens ({config.max_call_tokens}) must be 0: {SETTING} "
            f"({config.kind!r}) takes no argument max_call_tokens (rollout.chat.cut_middle)"
        )
    return functools.partial(made, max_call_tokens=config.max_call_tokens)


def _check_settings(kind: str, agent: functools.partial[Any]) -> None:
    """Refuse an agent's settings that its call would refuse, or `check_settings` of its module."""
    try:
        inspect.signature(agent.func).bind(None, **agent.keywords)
    except TypeError as error:
        raise ConfigError(f"{SETTING} ({kind!r}): settings {agent.keywords}: {error}") from None
    check = getattr(sys.modules.get(agent.func.__module__), "check_settings", None)
    try:
        if check is not None:
            check(**agent.keywords)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{SETTING} ({kind!r}): check_settings: {said(error)}") from error


def _check_methods(kind: str, found: object) -> None:
    missing = [name for name in _METHODS if not callable(getattr(found, name, None))]
    if missing:
        raise ConfigError(
            f"{SETTING} ({kind!r}) must have the methods {', '.join(_METHODS)} "
            f"(gapo_megatron/rollout/environment.py); missing: {', '.join(missing)}. Or it is an "
            "agent, a function whose first parameter is called session"
        )
