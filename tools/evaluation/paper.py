"""The paper's evaluation settings and published figures (paper_tables.toml)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gapo_megatron.io.documents import read_toml

PAPER_TABLES = Path(__file__).with_name("paper_tables.toml")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of an evaluation."""

    num_samples: int
    """n, samples per problem."""
    temperature: float
    top_p: float
    max_response_tokens: int
    """T_max."""
    environment: str = ""
    """`environment.kind`, if it answers the model; empty: a response is a single turn."""
    environment_sha256: str = ""
    """Digest of the environment's settings, code, ends of turns and time limits; empty without."""

    @property
    def text(self) -> str:
        """The settings in one line, for people."""
        return (
            f"n={self.num_samples}, temperature={self.temperature:g}, top-p={self.top_p:g}, "
            f"T_max={self.max_response_tokens}"
        ) + (f", environment {_shown(self)}" if self.environment or self.environment_sha256 else "")


def _shown(sampling: Sampling) -> str:
    digest = sampling.environment_sha256[:8]
    return (sampling.environment or "one_turn") + (f" ({digest})" if digest else "")


@dataclass(frozen=True, slots=True)
class Setting:
    """A base model of the paper: its sampling settings and published figures."""

    name: str
    title: str
    """Name of the model in the paper."""
    sampling: Sampling
    published: dict[str, dict[str, tuple[str, str]]]
    """Method -> benchmark (or `average`) -> pass@1 and pass@n in %, as printed; "" if missing."""


def read_settings(path: Path = PAPER_TABLES) -> dict[str, Setting]:
    """The paper's settings by name."""
    settings = {}
    for name, table in read_toml(path)["settings"].items():
        settings[name] = Setting(
            name=name,
            title=table["title"],
            sampling=Sampling(
                num_samples=table["num_samples"],
                temperature=table["temperature"],
                top_p=table["top_p"],
                max_response_tokens=table["max_response_tokens"],
            ),
            published={
                method: _cells(table["columns"], cells) for method, cells in table["rows"].items()
            },
        )
    return settings


def _cells(columns: list[str], cells: list[Any]) -> dict[str, tuple[str, str]]:
    pairs = (cell.partition("/") for cell in cells)
    return {column: (first, last) for column, (first, _, last) in zip(columns, pairs, strict=True)}
