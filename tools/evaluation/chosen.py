"""What a command evaluates: benchmarks, the paper's or the user's own, and files of problems."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from gapo_megatron import rewards, user_code
from gapo_megatron.config import (
    CONFIG_NAME,
    Config,
    EnvironmentConfig,
    RewardConfig,
    with_digest,
)
from gapo_megatron.data.template_date import read_date
from gapo_megatron.errors import ConfigError
from gapo_megatron.io.files import file_sha256
from gapo_megatron.io.toml_tree import read_tree
from gapo_tools.evaluation.benchmarks import Benchmark, check_name, find_benchmark
from gapo_tools.evaluation.sampler import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Chosen:
    """A benchmark to evaluate, before its problems are read."""

    name: str
    reward: RewardConfig
    """Its verifier, with the command's options."""
    files: tuple[Path, ...]
    """Files of its problems."""
    benchmark: Benchmark | None = None
    """How its rows are read; None: as training data."""
    code: tuple[Path, ...] = ()
    """File of the benchmark's own code, if it is the user's."""

    @property
    def sha256(self) -> str:
        """SHA-256 of every file that decides what is asked."""
        return " ".join(map(file_sha256, (*self.files, *self.code)))

    def read(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> Task:
        """Read and tokenise the problems; raises as `Task.read` and `Task.of_file`."""
        columns = None if config.environment.takes_rows else rewards.row_columns(self.reward)
        options: dict[str, Any] = {
            "reward": self.reward,
            "tokenizer": tokenizer,
            "data": config.data,
            "columns": columns,
        }
        if self.benchmark is None:
            return Task.of_file(self.name, *self.files, **options)
        return Task.read(self.benchmark, *self.files, **options)


def choose(
    benchmarks: Sequence[str],
    problems: Sequence[Path],
    *,
    data_dir: Path,
    reward: RewardConfig,
    judge: RewardConfig,
) -> list[Chosen]:
    """Find what the options of `tools/evaluate.py` name.

    Args:
        benchmarks: `--benchmarks`.
        problems: `--problems`; each file is a benchmark with the file's name.
        data_dir: `--data`.
        reward: options of the benchmarks' verifiers.
        judge: verifier of the problems.

    Raises:
        ConfigError: no such benchmark, file or verifier, or two benchmarks of one name; names the
            option and the value.
    """
    chosen: list[Chosen] = []
    code: tuple[Path, ...]
    for given in benchmarks:
        one = find_benchmark(given, field="--benchmarks")
        code = ()
        if user_code.is_code(given):
            code = (user_code.find_file(given, setting="--benchmarks"),)
        own = with_kind(reward, one.kind, field=f"benchmark {one.name}: kind")
        chosen.append(Chosen(one.name, own, tuple(one.find_files(data_dir)), one, code))
    for path in problems:
        name = re.sub(r"[^\w+-]", "_", path.stem)
        check_name(name, field=f"--problems ({path}): its name")
        chosen.append(Chosen(name, judge, (path,)))
    for name in _repeated([one.name for one in chosen]):
        raise ConfigError(f"--benchmarks, --problems: two of them are named {name!r}")
    return chosen


def _repeated(names: Sequence[str]) -> Iterator[str]:
    return (name for name in names if names.count(name) > 1)


def judge_of(
    reward: RewardConfig, kind: str | None, config: Path | None, *, sandbox: str | None = None
) -> RewardConfig:
    """The verifier of `--problems`: of `--kind`, or of the training config `--config`.

    Args:
        reward: options of `--kind`.
        kind: `--kind`.
        config: `--config`.
        sandbox: `--sandbox`, in place of the config's.

    Raises:
        ConfigError: see `with_kind` and `read_reward`.
    """
    if config is None:
        return reward if kind is None else with_kind(reward, kind, field="--kind")
    judge = read_reward(config, field="--config")
    if sandbox is None:
        return judge
    tree = judge.model_dump() | {"sandbox": sandbox}
    return _checked(RewardConfig, tree, field=f"--sandbox ({sandbox!r}) with --config: reward")


def with_kind(reward: RewardConfig, kind: str, *, field: str) -> RewardConfig:
    """The same options for another verifier.

    Raises:
        ConfigError: there is no such verifier; names the field.
    """
    tree = reward.model_dump() | {"kind": kind}
    return _checked(RewardConfig, tree, field=f"{field} ({kind!r})")


def read_reward(path: Path, *, field: str) -> RewardConfig:
    """Section [reward] of a training config; see `_read` for errors."""
    return _read(RewardConfig, "reward", path, field=field)


def environment_of(kind: str | None, config: Path | None) -> EnvironmentConfig:
    """What answers the model: `--environment`, or else as the training config `--config` says.

    Raises:
        ConfigError: there is no such environment; or see `_read`.
    """
    if kind is None:
        if config is None:
            return EnvironmentConfig()
        return _read(EnvironmentConfig, "environment", config, field="--config")
    field = f"--environment ({kind!r})"
    section = _checked(EnvironmentConfig, {"kind": kind}, field=field)
    return with_digest(section, name="environment", source=field)


_OF_PROMPTS: dict[str, Any] = {
    "chat_template": False,
    "system_prompt": "",
    "chat_template_kwargs": {},
    "end_tokens": [],
    "template_date": "",
}
"""Options named as the settings of [data] that say how prompts are made, and their defaults."""


def with_prompts_of_config(arguments: Namespace) -> Namespace:
    """The command line, with prompts made as in training by `--config` where no option says how.

    Raises:
        ConfigError: see `config_tree`.
    """
    if arguments.config is None:
        return arguments
    data = config_tree(arguments.config, field="--config").get("data")
    trained = {
        name: data[name]
        for name, usual in _OF_PROMPTS.items()
        if isinstance(data, dict) and name in data and getattr(arguments, name) == usual
    }
    return Namespace(**vars(arguments) | trained)


def date_of_run(model: Path, config: Path | None) -> str:
    """Date in the prompts of the run that `--model` was exported by, or that `--config` names."""
    runs = [model.parent, *([config if config.is_dir() else config.parent] if config else [])]
    return next(filter(None, map(read_date, runs)), "")


AnySection = TypeVar("AnySection", bound=BaseModel)


def _read(model: type[AnySection], name: str, path: Path, *, field: str) -> AnySection:
    """A section of `config_tree`.

    Raises:
        ConfigError: see `config_tree`; or the section is not valid, or its `code` is the digest of
            other code.
    """
    tree = config_tree(path, field=field)
    source = f"{field} ({path})"
    section = _checked(model, tree.get(name, {}), field=f"{source}: {name}")
    return with_digest(section, name=name, source=source)


def config_tree(path: Path, *, field: str) -> dict[str, Any]:
    """A training config, or the config of a run's folder, `base` included.

    Raises:
        ConfigError: the file cannot be read; names the field.
    """
    try:
        return read_tree(path / CONFIG_NAME if path.is_dir() else path)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from None


def _checked(model: type[AnySection], tree: object, *, field: str) -> AnySection:
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f".{part}" for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{field}{place}: {message}") from None
