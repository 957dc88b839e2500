"""The batch of the next step, where it was sampled before the checkpoint's weights were there.

A run whose generation runs ahead has it at every checkpoint between two steps: nobody could sample
it again, for the weights that did are gone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gapo_megatron.checkpoint import files
from gapo_megatron.checkpoint.open_step import OpenStep
from gapo_megatron.checkpoint.trainer_state import check_source

AHEAD_NAME = "ahead.pt"


@dataclass(frozen=True)
class Ahead:
    """The next step, open but without an update."""

    open_step: OpenStep
    """Its batch; for a save rank 0 has all tokens, after a load every rank."""
    source_state: Mapping[str, Any]
    """Place in the data after the batch; `PromptSource.state_dict`. Before it: the checkpoint's."""

    def save(self, folder: Path) -> None:
        """Write it; rank 0 alone."""
        source_state = json.dumps(self.source_state)
        files.write(folder / AHEAD_NAME, self.open_step.shared() | {"source": source_state})

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read what `save` wrote, in any parallel layout. No collective.

        Raises:
            CheckpointError: the file is missing, damaged or misshapen; names it.
        """
        with files.reading(folder / AHEAD_NAME) as shared:
            source_state = json.loads(files.plain(shared["source"], str))
            check_source(source_state)
            return cls(OpenStep.from_shared(shared), source_state)
