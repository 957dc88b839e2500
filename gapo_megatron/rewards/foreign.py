"""Reward functions written for verl, TRL and slime, called as they are called there.

They are known by the names of their parameters. Each becomes a function with the parameters of a
verifier, so that nothing else knows of them. They get the whole response, with its thinking.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gapo_megatron.errors import ConfigError
from gapo_megatron.rewards.conversation import Conversation
from gapo_megatron.rewards.results import UnreadableError

Asked = tuple[Sequence[Any], Mapping[str, Any], Callable[[Any], Any]]
"""Arguments and keyword arguments of a call, and what makes a verifier's result of its result."""

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_TRL_OWN = ("prompts", "completions", "completion_ids", "answer", "log_extra", "log_metric")
"""What TRL gives beside the columns of the data; `answer` is a column there."""
_TRL_UNKNOWN = ("trainer_state", "environments")
_SLIME_FIRST = {("args", "sample"): False, ("args", "samples"): True}
"""First two parameters of slime's functions, and whether they judge a whole group."""


def adapted(function: Callable[..., Any], *, setting: str, name: str) -> Callable[..., Any]:
    """The function itself, or one with a verifier's parameters that calls it as its framework does.

    Args:
        function: user code, with its settings.
        setting: setting that names it, for messages.
        name: value of the setting.

    Raises:
        ConfigError: it needs what is not known here; names the parameter.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # of a built-in function
        return function
    known: tuple[str, ...]
    if {"solution_str", "ground_truth"} <= parameters.keys():
        framework, known, adapter = "verl", _VERL, _verl
    elif {"solution_strs", "ground_truths"} <= parameters.keys():
        framework, known, adapter = "verl", _VERL_LISTS, _verl
    elif "completions" in parameters:
        framework, known, adapter = "TRL", _TRL_OWN, _trl
    elif (first := tuple(parameters)[:2]) in _SLIME_FIRST:
        framework, known = "slime", first
        adapter = functools.partial(_slime, is_group=_SLIME_FIRST[first])
    else:
        return function
    columns = [
        one
        for key, one in parameters.items()
        if key not in known and one.kind in _BY_NAME and one.default is one.empty
    ]
    refused = [one.name for one in columns if framework != "TRL" or one.name in _TRL_UNKNOWN]
    if refused:
        raise ConfigError(
            f"{setting} ({name!r}): its parameters are those of a reward for {framework}, and "
            f"{refused[0]!r} is not known here: give it a default, set it in `settings`, or write "
            "verify(response, answer, **row) (docs/rewards.md)"
        )
    return adapter(function, parameters)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call of it returns a coroutine."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function)


def _calling(
    function: Callable[..., Any],
    ask: Callable[..., Asked],
    parameters: Sequence[inspect.Parameter] = (),
) -> Callable[..., Any]:
    """A verifier that calls `function` with what `ask` makes of the verifier's arguments.

    Args:
        function: the reward function; if it is async, so is the verifier.
        ask: has the parameters of the verifier, but for `**columns`.
        parameters: the verifier's parameters in place of `**columns`.
    """

    def verify(*arguments: Any, **given: Any) -> Any:
        args, kwargs, read = ask(*arguments, **given)
        return read(function(*args, **kwargs))

    async def verify_later(*arguments: Any, **given: Any) -> Any:
        args, kwargs, read = ask(*arguments, **given)
        return read(await function(*args, **kwargs))

    own = [one for one in inspect.signature(ask).parameters.values() if one.kind in _BY_NAME]
    made: Any = verify_later if is_async(function) else verify
    made.__signature__ = inspect.Signature([*own, *parameters])
    return made


_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_VERL_LISTS = tuple(f"{name}s" for name in _VERL)


def _verl(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Callable[..., Any]:
    """`compute_score(data_source, solution_str, ground_truth, extra_info=None)`: number or dict.

    Or `compute_score(data_sources, solution_strs, ground_truths, extra_infos)`: a list, of one.
    """
    is_list = "solution_strs" in parameters

    def ask(
        response: str,
        answer: str,
        *,
        whole_response: str,
        data_source: Any = None,
        extra_info: Any = None,
    ) -> Asked:
        values = (data_source, whole_response, answer, {} if extra_info is None else extra_info)
        known = dict(zip(_VERL_LISTS if is_list else _VERL, values, strict=True))
        kwargs = {key: one for key, one in known.items() if key in parameters}
        if not is_list:
            return (), kwargs, _same
        return (), {key: [one] for key, one in kwargs.items()}, lambda results: _first(results, {})

    return _calling(function, ask)


def _trl(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Callable[..., Any]:
    """`reward(completions, **columns)`: a list, here of one. Messages where the prompt is some."""
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())

    def ask(
        response: str,
        answer: str,
        *,
        whole_response: str,
        messages: Conversation,
        token_ids: list[int],
        prompt: Any = None,
        **columns: Any,
    ) -> Asked:
        num, is_text = messages.num_prompt, isinstance(prompt, str)
        metrics: dict[str, Any] = {}
        known = {
            "prompts": [prompt if is_text else [*messages[:num]]],
            "completions": [whole_response if is_text else [*messages[num:]]],
            "completion_ids": [token_ids],
            "answer": [answer],
            "log_extra": lambda name, values: metrics.update({name: values[0]}),
            "log_metric": lambda name, value: metrics.update({name: value}),
        }
        kwargs = {key: one for key, one in known.items() if takes_all or key in parameters}
        kwargs = {key: [one] for key, one in columns.items() if key not in known} | kwargs
        return (), kwargs, lambda results: _first(results, metrics)

    own = {"prompt", *_TRL_OWN, *_TRL_UNKNOWN}
    further = [
        one.replace(kind=one.VAR_KEYWORD if one.kind is one.VAR_KEYWORD else one.KEYWORD_ONLY)
        for key, one in parameters.items()
        if key not in own and one.kind in (*_BY_NAME, one.VAR_KEYWORD)
    ]
    return _calling(function, ask, further)


def _first(results: Any, metrics: Mapping[str, Any]) -> Any:
    """The result of a list of one, with the metrics that the function has logged."""
    results = results.tolist() if hasattr(results, "tolist") else results
    if not isinstance(results, list | tuple) or len(results) != 1:
        size = f" of {len(results)}" if isinstance(results, list | tuple) else ""
        raise UnreadableError(
            f"it returned {type(results).__name__}{size}, not a list with one reward: it is called "
            "with one completion"
        )
    return {**metrics, "score": results[0]} if metrics else results[0]


def _slime(
    function: Callable[..., Any], parameters: Mapping[str, Any], *, is_group: bool
) -> Callable[..., Any]:
    """`async def reward_func(args, sample, **kwargs)`, or of samples: number, dict, or a list."""

    def ask(
        response: str,
        answer: str,
        *,
        whole_response: str,
        messages: Conversation,
        token_ids: list[int],
        prompt_token_ids: list[int],
        prompt: Any = None,
        metadata: Any = None,
    ) -> Asked:
        tokens = [prompt_token_ids or [], token_ids or []]
        sample = Sample(
            prompt=prompt if isinstance(prompt, str) else [*messages[: messages.num_prompt]],
            response=whole_response,
            label=answer,
            tokens=[*tokens[0], *tokens[1]],
            response_length=len(tokens[1]),
            metadata=metadata or {},
        )
        return (NoArguments(), sample), {}, _same

    def ask_all(
        responses: list[str],
        answer: str,
        *,
        whole_response: list[str],
        messages: list[Conversation],
        token_ids: list[list[int]],
        prompt_token_ids: list[list[int]],
        prompt: Any = None,
        metadata: Any = None,
    ) -> Asked:
        columns = zip(responses, whole_response, messages, token_ids, prompt_token_ids, strict=True)
        names = ("whole_response", "messages", "token_ids", "prompt_token_ids")
        samples = []
        for one, *values in columns:
            given: dict[str, Any] = dict(zip(names, values, strict=True))
            (_, sample), *_ = ask(one, answer, **given, prompt=prompt, metadata=metadata)
            samples.append(sample)
        return (NoArguments(), samples), {}, _same

    return _calling(function, ask_all if is_group else ask)


def _same(result: Any) -> Any:
    return result


class Sample:
    """What is known here of slime's `Sample`: the attributes that it is made with."""

    def __init__(self, **values: Any) -> None:
        self.__dict__ = values

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"sample.{name} is not known here; sample has {', '.join(vars(self))}")


class NoArguments:
    """Stands for slime's command line, which a run here has not."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"args.{name}: a run has no arguments of slime; write it in the file")
