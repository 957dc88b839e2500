"""The order in which problems are drawn: seeded, endless, and resumed where it stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from gapo_megatron.errors import CheckpointError, ConfigError
from gapo_megatron.types import Prompt


class PromptSource:
    """Draws every problem once per epoch, each epoch in an order of its own; again what comes back.

    A batch may begin in one epoch and end in the next; no problem appears in a batch twice, since
    its rollouts would be the same ones. Every rank draws the same batches; nothing is communicated.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int) -> None:
        """Start before the first problem of epoch 0.

        Args:
            prompts: the dataset, the same on every rank.
            seed: seed of the orders; epoch e depends on (seed, e) alone.
        """
        self._prompts = list(prompts)
        self._numbers = {prompt.id: i for i, prompt in enumerate(self._prompts)}
        self._seed = seed
        self._epoch = 0
        self._remaining = self._order(0)

    @property
    def problems(self) -> Sequence[Prompt]:
        """The dataset."""
        return self._prompts

    def number_of(self, prompt_id: str) -> int:
        """Place of a problem in `problems`."""
        return self._numbers[prompt_id]

    def next_batch(self, num_prompts: int, *, drawn: Sequence[Prompt] = ()) -> list[Prompt]:
        """Draw the next `num_prompts` different problems.

        Args:
            num_prompts: how many.
            drawn: problems of earlier calls for the same batch; none of them comes again.

        Raises:
            ConfigError: the dataset holds fewer.
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
            # Problems this batch already has wait at the front of what is left of the new epoch.
            self._remaining += self._order(self._epoch)
            taken = {i for i in self._remaining if self._prompts[i].id in ids} | set(chosen)
            chosen += self._take(num_prompts - len(chosen), taken)
        return [self._prompts[i] for i in chosen]

    def give_back(self, prompts: Sequence[Prompt]) -> None:
        """Append these to what remains: drawn after it, and before the next epoch.

        A prompt given back after the next epoch has started may be drawn twice in that epoch.
        """
        self._remaining += [self.number_of(prompt.id) for prompt in prompts]

    def _take(self, count: int, avoided: set[int]) -> list[int]:
        """Remove the first `count` different ones of what remains, but for `avoided`, which stay.

        A problem that was given back may be there twice, where a new epoch has begun.
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
        """Position as plain numbers and text; `load_state_dict` continues from it exactly."""
        return {
            "epoch": self._epoch,
            "remaining": list(self._remaining),
            "dataset": self._fingerprint(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            CheckpointError: the state belongs to another dataset, or the dataset has changed, or it
                names problems that there are not.
        """
        if state["dataset"] != self._fingerprint():
            raise CheckpointError(
                "the checkpoint was made with other training problems than data.train_path holds "
                f"now ({len(self._prompts)} problems); resume with the same file, or start afresh "
                "in another run.output_dir"
            )
        remaining = [int(i) for i in state["remaining"]]
        if remaining and not 0 <= min(remaining) <= max(remaining) < len(self._prompts):
            raise CheckpointError(
                f"the checkpoint's place in the data is damaged: remaining goes from "
                f"{min(remaining)} to {max(remaining)}, and there are {len(self._prompts)} problems"
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
