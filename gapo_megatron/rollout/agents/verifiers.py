"""Environments of the package `verifiers` (its v1 API): tasks, harnesses and rewards are theirs.

    [environment]
    kind = "gapo_megatron.rollout.agents.verifiers:play"
    settings.env.taskset.id = "reverse_text"                 # the package's own [env] table
    settings.env.agent.harness.id = "null"
    settings.env.agent.runtime.type = "subprocess"

    [reward]
    kind = "gapo_megatron.rollout.agents.verifiers:reward"

The harness asks the model at the session's address, and the environment's reward is the verdict.
docs/environments.md says how, and what is not supported.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import json
import threading
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

from gapo_megatron.errors import ConfigError, said

if TYPE_CHECKING:
    from gapo_megatron.rollout.agents.session import Session

SETTING = "environment.settings.env"
NO_KEY = "GAPO_MEGATRON_NO_API_KEY"
"""Name of an environment variable that nobody sets: the key is in a header instead."""
SCORED = "scored by verifiers 8b1f6f0e-6c0e-4c52-9d0a-6f5f4b1f7a53: "
"""Before the reward in what `play` returns. No text of a model begins so."""
MOST_CHARACTERS = 500
"""Longest prompt of a row in the problem file."""

_lock = threading.Lock()


def play(session: Session, *, env: Mapping[str, Any]) -> str:
    """Play the task of the problem's row; the agent of `environment.kind`.

    Args:
        session: the row needs the columns `task` and `key` (`row_of`).
        env: the package's `[env]` table: `taskset`, the agents (`agent`, unless the environment
            names others) with `harness`, `runtime` and limits, and so on.

    Returns:
        The reward, for `reward`.

    Raises:
        LookupError: the row names no task, or one that has changed since.
        RuntimeError: the episode failed, ran into a time limit, or has no reward.
    """
    with _lock:
        player = _player(json.dumps(env, sort_keys=True))
    return f"{SCORED}{player.play(session)!r}"


def check_settings(*, env: Mapping[str, Any]) -> None:
    """Refuse settings with which `play` could not begin; loads no task.

    Raises:
        ConfigError: see `load_environment`.
    """
    load_environment(env)


def reward(
    response: str, answer: str, *, whole_response: str, unscored: float | None = None
) -> float | None:
    """The environment's reward; the verifier of `reward.kind`.

    Args:
        response: not used, like `answer`.
        answer: the row's answer.
        whole_response: what `play` returned; or, at the token limit, the model's last turn.
        unscored: reward of a response that reached the token limit before the environment could
            score it; None: unknown.
    """
    is_scored = whole_response.startswith(SCORED)
    return float(whole_response.removeprefix(SCORED)) if is_scored else unscored


def row_of(task: Any, *, name: str) -> dict[str, Any]:
    """The row of a problem file that stands for a task of the taskset `name`.

    `task` is its number, and `key` the package's digest of its content. `prompt` is the beginning
    of its text, for people: the model reads what the harness sends.
    """
    number, text = task.data.idx, " ".join(task.data.prompt_text.split())
    prompt = text[:MOST_CHARACTERS] or task.data.name or f"{name}-{number}"
    return {
        **{"id": f"{name}-{number}", "prompt": prompt, "answer": "(by the environment)"},
        **{"task": number, "key": task.key},
    }


def load_environment(env: Mapping[str, Any]) -> Any:
    """An `Env` of the package from its `[env]` table; no task is loaded yet.

    Raises:
        ConfigError: the package is missing, or refuses the table; or none of its agents talks to
            the policy.
    """
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise ConfigError(
            f"{SETTING}: needs the package verifiers (pip install 'verifiers>=0.4'): {error}"
        ) from error
    try:
        loaded = vf.load_environment(vf.resolve_env_config(copy.deepcopy({**env})))
    except Exception as error:  # its own checks, and code of the environment's author
        raise ConfigError(f"{SETTING} ({dict(env)}): {said(error)}") from error
    if not _policy_agents(loaded):
        raise ConfigError(f"{SETTING}: one of the agents must be without a `client`: the policy")
    return loaded


def _policy_agents(env: Any) -> set[str]:
    """Names of the agents that talk to the policy: those without a client of their own."""
    import verifiers.v1 as vf

    agents = {name: one for name, one in env.config if isinstance(one, vf.AgentConfig)}
    return {name for name, one in agents.items() if one.client is None}


@functools.cache
def _player(env: str) -> _Player:
    """The environment of this process; `env` as JSON."""
    return _Player(load_environment(json.loads(env)))


class _Player:
    """Plays episodes of an environment, all on one event loop in a thread of its own."""

    def __init__(self, env: Any) -> None:
        """Start what the environment's episodes share, such as servers of tools."""
        from gapo_megatron.compat.verifiers import serve_each_run_alone

        self._env = env
        self._tasks, self._rest = list[Any](), iter(env.taskset)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="verifiers", daemon=True).start()
        self._serving = env.serving()  # kept: what it serves ends when it is collected
        try:
            self._wait(self._serving.__aenter__())
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise
        serve_each_run_alone(env)

    def play(self, session: Session) -> float:
        """The reward of an episode; see the function of this name."""
        row = session.problem
        if not {"task", "key"} <= row.keys():
            raise LookupError("the row needs task and key, as tools/prepare_data.py writes them")
        number = row["task"]
        task = self._task(number)
        if task.key != row["key"]:
            raise LookupError(f"task {number} has changed since the problem file was made of it")
        episode = self._wait(self._episode(task, session))
        return _reward_of(episode, policy=_policy_agents(self._env))

    def _task(self, number: int) -> Any:
        """A task by its number; others are read as far as they are needed: they may be infinite."""
        with _lock:
            self._tasks += itertools.islice(self._rest, max(number + 1 - len(self._tasks), 0))
        if number >= len(self._tasks):
            raise LookupError(f"no task {number}: the taskset has {len(self._tasks)}")
        return self._tasks[number]

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _episode(self, task: Any, session: Session) -> Any:
        import verifiers.v1 as vf

        client = vf.EvalClientConfig(
            base_url=session.base_url,
            # Its keys come from variables of the process, which threads must not set.
            api_key_var=NO_KEY,
            headers={"X-API-Key": session.api_key},
        )
        context = vf.ModelContext(model=session.model, client=client)
        return await self._env.run_episode(task, context)


def _reward_of(episode: Any, *, policy: Set[str]) -> float:
    """The reward of an `Episode` of the package: the mean over runs of agents that are the policy.

    Args:
        episode: the episode.
        policy: names of these agents.

    Raises:
        RuntimeError: see `play`; or a run is not to be trained, though all that the policy says is.
    """
    if not episode.ok:
        errors = [error for one in (*episode.traces, episode) for error in one.errors]
        why = f"{errors[-1].type}: {errors[-1].message}" if errors else "it does not say why"
        raise RuntimeError(f"the environment failed: {why}")
    traces = [one for one in episode.traces if one.agent.name in policy]
    if not traces:
        raise RuntimeError("no agent of the environment has asked the policy")
    for one in traces:
        _check_trace(one)
    return sum(float(one.reward) for one in traces) / len(traces)


def _check_trace(trace: Any) -> None:
    """Check that a run of an agent is to be trained, and has a reward."""
    if not trace.agent.trainable:
        raise RuntimeError(
            f"the environment does not train its agent {trace.agent.name}, which has asked the "
            f"policy: give it a client ({SETTING}.{trace.agent.name}.client)"
        )
    if trace.is_timeout:
        raise RuntimeError(f"the environment ran into a time limit: {trace.stop_condition}")
    missing = [name for name, one in trace.rewards.items() if one is None]
    if missing or not trace.rewards:
        raise RuntimeError(f"the environment gave no reward {', '.join(missing)}".rstrip())
