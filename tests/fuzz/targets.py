"""All targets. A process group of one rank must be up; see `tests.dist.single_rank`."""

from __future__ import annotations

from tests.fuzz import checkpoints, models, run_folder, text
from tests.fuzz.campaign import Target

TARGETS: list[Target] = [
    *text.targets(),
    *models.targets(),
    *run_folder.targets(),
    *checkpoints.targets(),
]
