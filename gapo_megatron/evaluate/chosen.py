"""What a command evaluates: benchmarks, the paper's or the user's own, and files of problems."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from gapo_megatron import user_code
from gapo_megatron.config import Config, RewardConfig
from gapo_megatron.data.benchmarks import Benchmark, check_name, find_benchmark
from gapo_megatron.errors import ConfigError
from gapo_megatron.evaluate.benchmark import Task
from gapo_megatron.io.files import file_sha256
from gapo_megatron.io.toml_tree import read_tree

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
        data = config.data
        if self.benchmark is None:
            (path,) = self.files
            return Task.of_file(self.name, path, reward=self.reward, tokenizer=tokenizer, data=data)
        return Task.read(
            self.benchmark,
            *self.files,
            reward=self.reward,
            tokenizer=tokenizer,
            data=data,
        )


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


def judge_of(reward: RewardConfig, kind: str | None, config: Path | None) -> RewardConfig:
    """The verifier of `--problems`: of `--kind`, or of the training config `--config`.

    Raises:
        ConfigError: see `with_kind` and `read_reward`.
    """
    if config is not None:
        return read_reward(config, field="--config")
    return reward if kind is None else with_kind(reward, kind, field="--kind")


def with_kind(reward: RewardConfig, kind: str, *, field: str) -> RewardConfig:
    """The same options for another verifier.

    Raises:
        ConfigError: there is no such verifier; names the field.
    """
    return _checked(reward.model_dump() | {"kind": kind}, field=f"{field} ({kind!r})")


def read_reward(path: Path, *, field: str) -> RewardConfig:
    """Section [reward] of a training config, the file that its `base` names included.

    Raises:
        ConfigError: the file cannot be read, or the section is not valid.
    """
    return _checked(read_tree(path).get("reward", {}), field=f"{field} ({path}): reward")


def _checked(tree: object, *, field: str) -> RewardConfig:
    try:
        return RewardConfig.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f".{part}" for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{field}{place}: {message}") from None
