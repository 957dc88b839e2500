"""Environments that are called, without a run: `rollout.calls` with its settings, for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gapo_megatron.config import EnvironmentConfig
from gapo_megatron.rollout.calls import Acting, Calls, Run
from gapo_megatron.rollout.environments.one_turn import OneTurn
from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.rollout.turns import Turns
from gapo_megatron.types import Episode
from tests.scripted_engine import LoneReplicas

EOS = 1
Respond = Callable[[Episode], Any]


def at_once(function: Callable[[], None]) -> None:
    """No thread: the answer has come before the next decoding step."""
    function()


def acting_of(
    environment: Any,
    *,
    eos_token_ids: Sequence[int] = (EOS,),
    stop: Sequence[str] = (),
    tokenizer: Any = None,
    max_response_tokens: int = 1000,
    run_dir: Path | None = None,
    run: Run = at_once,
    template_variables: Mapping[str, Any] = {},
    **settings: Any,
) -> Acting:
    """How a run would call the environment, here by default at once."""
    return Acting(
        environment,
        EnvironmentConfig(kind="tests.two_turn:TwoTurn", stop=tuple(stop), **settings),
        Turns(tokenizer, stop, eos_token_ids=eos_token_ids),
        max_response_tokens=max_response_tokens,
        vocab_size=100_000,
        run_dir=run_dir,
        run=run,
        template_variables=template_variables,
    )


def one_turn_inputs(source: Any, tokenizer: Any) -> Any:
    """What `run.start.build_rollouter` reads of a run's inputs."""
    return SimpleNamespace(
        source=source,
        tokenizer=tokenizer,
        environment=OneTurn(tokenizer),
        turns=Turns(tokenizer, (), eos_token_ids=()),
    )


def one_turn_acting(tokenizer: Any) -> Acting:
    """Nothing answers: a response is a single turn."""
    turns = Turns(tokenizer, (), eos_token_ids=())
    return Acting(
        OneTurn(tokenizer),
        EnvironmentConfig(),
        turns,
        max_response_tokens=1000,
        vocab_size=100_000,
    )


def calls_of(
    respond: Respond, *, replicas: Replicas | None = None, name: str = "step_0", **options: Any
) -> Calls:
    """The calls of one generation."""
    environment = SimpleNamespace(respond=respond)
    return acting_of(environment, **options).calls(name, replicas or LoneReplicas())
