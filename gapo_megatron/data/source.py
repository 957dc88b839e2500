"""Draws training problems in a seeded, endless and resumable order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from gapo_megatron.errors import CheckpointError, ConfigError
from gapo_megatron.types import Prompt


class PromptSource:
    """Draws every problem once per epoch, in a new order each, and returned problems again.

    A batch may span two epochs. No problem is in a batch twice, because its rollouts would be the
    same. Every rank draws the same batches, without communication.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int) -> None:
        """Start before the first problem of epoch 0.

        Args:
            prompts: the dataset, the same on every rank.
            seed: seed of the orders; that of epoch e depends only on (seed, e).
        """
        self._prompts = list(prompts)
        self._numbers = {prompt.id: i for i, prompt in enumerate(self._prompts)}
        self._seed = seed
        self._epoch = 0
        self._remaining = self._order(0)

    @property
    def problems(self) -> Sequence[Prompt]:
        """All problems of the dataset."""
        return self._prompts

    def number_of(self, prompt_id: str) -> int:
        """Index of a problem in `problems`."""
        return self._numbers[prompt_id]

    def next_batch(self, num_prompts: int, *, drawn: Sequence[Prompt] = ()) -> list[Prompt]:
        """Draw the next `num_prompts` different problems.

        Args:
            num_prompts: number of problems.
            drawn: problems that earlier calls drew for the same batch; they are not drawn again.

        Raises:
            ConfigError: the dataset has fewer problems.
        """
        wanted = num_prompts + len(drawn)
        if wanted > len(self._prompts):
            raise ConfigError(
                f"a batch of {wanted} different problems is larger than the dataset "
                f"({len(self._prompts)} problems)"
            )
        ids = {prompt.id for prompt in drawn}
        taken = {i for i in self._remaining if self._prompts[i].id in ids} if ids else set()
        chosen = self._take(num_prompts, taken)
        if len(chosen) < num_prompts:
            self._epoch += 1
            # Problems that this batch already has stay first in the new epoch.
            self._remaining += self._order(self._epoch)
            taken = {i for i in self._remaining if self._prompts[i].id in ids} | set(chosen)
            chosen += self._take(num_prompts - len(chosen), taken)
        return [self._prompts[i] for i in chosen]

    def give_back(self, prompts: Sequence[Prompt]) -> None:
        """Return problems, to be drawn after those that remain of this epoch.

        A problem that is returned after the next epoch has started may be drawn twice in it.
        """
        self._remaining += [self.number_of(prompt.id) for prompt in prompts]

    def _take(self, count: int, avoided: set[int]) -> list[int]:
        """Remove and return the first `count` different remaining problems that are not `avoided`.

        A returned problem may remain twice once a new epoch has begun.
        """
        chosen: dict[int, None] = {}
        left = []
        for i in self._remaining:
            if len(chosen) < count and i not in avoided and i not in chosen:
                chosen[i] = None
            else:
                left.append(i)
        self._remaining = left
        return list(chosen)

    def state_dict(self) -> dict[str, Any]:
        """Position as numbers and text, for `load_state_dict`."""
        return {
            "epoch": self._epoch,
            "remaining": list(self._remaining),
            "dataset": self._fingerprint(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            CheckpointError: the dataset is different or has changed, or the state is damaged.
        """
        if state["dataset"] != self._fingerprint():
            raise CheckpointError(
                "the checkpoint was made with other training problems than data.train_path has now "
                f"({len(self._prompts)} problems); resume with the same file, or start a new run "
                "in another run.output_dir"
            )
        remaining = [int(i) for i in state["remaining"]]
        if remaining and not 0 <= min(remaining) <= max(remaining) < len(self._prompts):
            raise CheckpointError(
                "the checkpoint's data position is damaged: remaining problems have the "
                f"numbers {min(remaining)} to {max(remaining)}, of {len(self._prompts)} problems"
            )
        self._epoch, self._remaining = int(state["epoch"]), remaining

    def _order(self, epoch: int) -> list[int]:
        random = np.random.default_rng([self._seed, epoch])
        return [int(i) for i in random.permutation(len(self._prompts))]

    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for prompt in self._prompts:
            digest.update(repr((prompt.id, prompt.token_ids, prompt.answer)).encode())
        return digest.hexdigest()
