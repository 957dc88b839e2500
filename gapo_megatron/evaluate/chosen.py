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
            chat_template=data.chat_template,
            max_prompt_tokens=data.max_prompt_tokens,
        )


def choose(
    benchmarks: Sequence[str],
    problems: Sequence[Path],
    *,
    kind: str,
    data_dir: Path,
    reward: RewardConfig,
) -> list[Chosen]:
    """Find what the options of `tools/evaluate.py` name.

    Args:
        benchmarks: `--benchmarks`.
        problems: `--problems`; each file is a benchmark with the file's name.
        kind: `--kind`, verifier of the problems.
        data_dir: `--data`.
        reward: options of all verifiers.

    Raises:
        ConfigError: no such benchmark, file or verifier, or two benchmarks of one name; names the
            option and the value.
    """
    chosen = []
    for given in benchmarks:
        one = find_benchmark(given, field="--benchmarks")
        code = (user_code.find_file(given, setting="--benchmarks"),) * user_code.is_code(given)
        judge = _with_kind(reward, one.kind, of=f"benchmark {one.name}")
        chosen.append(Chosen(one.name, judge, tuple(one.find_files(data_dir)), one, code))
    for path in problems:
        name = re.sub(r"[^\w+-]", "_", path.stem)
        check_name(name, field=f"--problems ({path}): its name")
        chosen.append(Chosen(name, _with_kind(reward, kind, of="--kind"), (path,)))
    for name in _repeated([one.name for one in chosen]):
        raise ConfigError(f"--benchmarks, --problems: two of them are named {name!r}")
    return chosen


def _repeated(names: Sequence[str]) -> Iterator[str]:
    return (name for name in names if names.count(name) > 1)


def _with_kind(reward: RewardConfig, kind: str, *, of: str) -> RewardConfig:
    try:
        return type(reward).model_validate(reward.model_dump() | {"kind": kind})
    except ValidationError as error:
        rule = error.errors(include_url=False)[0]["msg"]
        raise ConfigError(f"{of}: verifier {kind!r}: {rule}") from None
