"""Table of a batch, with a row for each response, the same on every rank; and this rank's tokens.

A row has tens of bytes; tokens and log-probs are on the ranks that sampled a response or that
compute it. `take`, `join` and the group operations keep both together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch

from gapo_megatron.types import Outcome, Plan, Sample, Timeline

ROW = np.dtype(
    [
        ("problem", np.int32),  # number of the problem in the data (`PromptSource.problems`)
        ("sample", np.int32),  # number of the response within its group, 0..k-1
        ("num_prompt_tokens", np.int32),
        ("num_response_tokens", np.int32),  # appended tokens included
        ("num_sampled_tokens", np.int32),  # the |y_i| of every mean and denominator
        ("num_carried_tokens", np.int32),  # leading tokens of earlier steps, sampled or appended
        ("num_carried_sampled", np.int32),  # sampled tokens among these
        ("oldest_version", np.int32),  # policy version that sampled the first token
        ("is_truncated", np.int32),
        ("is_finished", np.int32),
        ("outcome", np.int32),  # `Outcome.code`
        ("holder", np.int32),  # rank that has the tokens, in the channel of the exchange
        ("log_prob_sum", np.float64),  # sum over the sampled tokens, by the engine
        ("grade", np.float64),  # the verifier's number in place of 0 or 1; inf: none
        ("num_scored_tokens", np.int32),  # leading carried tokens with the trainer's log-probs
        ("newest_version", np.int32),  # policy version that sampled the tokens not carried
        ("num_routed_tokens", np.int32),  # leading prompt and response tokens with routes
        ("num_routes", np.int32),  # numbers of experts of each of these tokens, over all layers
        ("num_note_bytes", np.int32),  # of `notes`
        ("answer", np.int64),  # hash of the answer that is correct (`objective.answers`); 0: none
        ("answer_form", np.int64),  # hash of its form
        ("num_conversations", np.int32),  # of the episode (`Episode.conversations`)
    ]
)
"""Facts of one response. Checkpoints store tables as int32 words of this layout."""

COLUMNS = {
    "prompt_ids": np.int32,
    "response_ids": np.int32,
    "rollout_log_probs": np.float32,
    "carried_log_probs": np.float32,
    "response_masks": np.bool_,
    "conversations": np.int32,
    "carried_versions": np.int32,
    "routes": np.uint8,
    "notes": np.uint8,
}
"""Arrays of a response, in the order of messages; see the properties of `Rollouts`."""

Tokens = Mapping[str, Mapping[int, np.ndarray]]
"""Arrays by column and row."""


class LocalArrays(dict[int, np.ndarray]):
    """Arrays by row; raises KeyError for rows whose tokens are not on this rank."""

    def __missing__(self, row: int) -> np.ndarray:
        raise KeyError(f"the tokens of sequence {row} are not on this rank")


@dataclass(frozen=True, slots=True, eq=False)
class Rollouts:
    """B responses, group by group: the table on every rank, tokens only on ranks that hold them.

    Reading an array of a row whose tokens are not on this rank raises KeyError.
    """

    table: np.ndarray
    """[B] of `ROW`, the same on every rank."""
    tokens: Tokens = field(default_factory=lambda: {name: LocalArrays() for name in COLUMNS})
    """Arrays of this rank's rows, by column; read them through the properties."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the step that collected them; empty otherwise."""
    samples: Sequence[Sample] = ()
    timelines: Sequence[Timeline] = ()
    """Some of a step's responses as text, the same on every rank; empty otherwise."""

    @classmethod
    def of(
        cls,
        prompt_ids: Sequence[np.ndarray],
        response_ids: Sequence[np.ndarray],
        rollout_log_probs: Sequence[np.ndarray] = (),
        *,
        carried_log_probs: Sequence[np.ndarray] = (),
        carried_versions: Sequence[np.ndarray] = (),
        response_masks: Sequence[np.ndarray | None] = (),
        conversations: Sequence[np.ndarray | None] = (),
        routes: Sequence[np.ndarray | None] = (),
        notes: Sequence[bytes] = (),
    ) -> Rollouts:
        """Responses with all tokens on this rank; lengths and sums are computed, other facts are 0.

        Args:
            prompt_ids: B arrays of int32.
            response_ids: B arrays of int32.
            rollout_log_probs: B arrays of float32; empty for sequences that are only scored.
            carried_log_probs: B arrays of float32, for leading tokens; may be empty.
            carried_versions: B arrays of int32, for at least these tokens; empty: for exactly
                these, version 0.
            response_masks: B masks, or empty; a mask is None if the model sampled every token.
            conversations: B arrays as of `Episode.conversations`, or empty.
            routes: B arrays as of `Episode.routes`, each None without any; or empty.
            notes: B texts in UTF-8, most of them empty; or none. See `notes`.
        """
        count = len(response_ids)
        table = np.zeros(count, dtype=ROW)
        table["grade"] = np.inf
        scored = carried_log_probs or [np.empty(0, np.float32)] * count
        carried = carried_versions or [np.zeros(len(one), np.int32) for one in scored]
        masks = {
            i: mask for i, mask in enumerate(response_masks) if mask is not None and not mask.all()
        }
        table["num_prompt_tokens"] = [len(one) for one in prompt_ids]
        table["num_response_tokens"] = [len(one) for one in response_ids]
        table["num_sampled_tokens"] = table["num_response_tokens"]
        table["num_scored_tokens"] = [len(one) for one in scored]
        table["num_carried_tokens"] = [len(one) for one in carried]
        table["num_carried_sampled"] = table["num_carried_tokens"]
        for i, mask in masks.items():
            table["num_sampled_tokens"][i] = mask.sum()
            table["num_carried_sampled"][i] = mask[: len(carried[i])].sum()
        for i, log_probs in enumerate(rollout_log_probs):
            sampled = log_probs[masks[i]] if i in masks else log_probs
            table["log_prob_sum"][i] = np.sum(sampled, dtype=np.float64)
        columns = (prompt_ids, response_ids, rollout_log_probs, scored)
        tokens = [*(LocalArrays(enumerate(column)) for column in columns), LocalArrays(masks)]
        several = {i: one for i, one in enumerate(conversations) if one is not None and one.any()}
        table["num_conversations"] = 1
        for i, one in several.items():
            table["num_conversations"][i] = 1 + one.max()
        tokens.append(LocalArrays(several))
        tokens.append(LocalArrays(enumerate(carried)))
        routed = {i: one for i, one in enumerate(routes) if one is not None and one.size}
        for i, one in routed.items():
            table["num_routed_tokens"][i], table["num_routes"][i] = one.shape
        tokens.append(LocalArrays((i, one.reshape(-1)) for i, one in routed.items()))
        noted = {i: np.frombuffer(one, np.uint8) for i, one in enumerate(notes) if one}
        for i, text in noted.items():
            table["num_note_bytes"][i] = len(text)
        tokens.append(LocalArrays(noted))
        return Rollouts(table, dict(zip(COLUMNS, tokens, strict=True)))

    @classmethod
    def join(cls, parts: Iterable[Rollouts]) -> Rollouts:
        """The rows of all parts, in order."""
        parts = [*parts]
        table = np.concatenate([np.empty(0, dtype=ROW), *(part.table for part in parts)])
        firsts = np.cumsum([0, *map(len, parts)]).tolist()
        tokens = {
            name: LocalArrays(
                (first + row, array)
                for first, part in zip(firsts, parts, strict=False)
                for row, array in part.tokens[name].items()
            )
            for name in COLUMNS
        }
        return Rollouts(table, tokens)

    @property
    def prompt_ids(self) -> Mapping[int, np.ndarray]:
        """[num_prompt_tokens] int32 of each row on this rank."""
        return self.tokens["prompt_ids"]

    @property
    def response_ids(self) -> Mapping[int, np.ndarray]:
        """[num_response_tokens] int32, EOS included."""
        return self.tokens["response_ids"]

    @property
    def rollout_log_probs(self) -> Mapping[int, np.ndarray]:
        """[num_response_tokens] float32: the engine's, while sampling; 0 for appended tokens."""
        return self.tokens["rollout_log_probs"]

    @property
    def carried_log_probs(self) -> Mapping[int, np.ndarray]:
        """[num_scored_tokens] float32: the trainer's, at the weights that sampled each token."""
        return self.tokens["carried_log_probs"]

    @property
    def carried_versions(self) -> Mapping[int, np.ndarray]:
        """[num_carried_tokens] int32: version of the weights that sampled each carried token."""
        return self.tokens["carried_versions"]

    @property
    def response_masks(self) -> Mapping[int, np.ndarray]:
        """[num_response_tokens] bool: False where the environment appended the token.

        Only for rows with such tokens; see `is_sampled`.
        """
        return self.tokens["response_masks"]

    @property
    def conversations(self) -> Mapping[int, np.ndarray]:
        """[num_response_tokens] int32: `Episode.conversations`, of rows with several."""
        return self.tokens["conversations"]

    @property
    def routes(self) -> Mapping[int, np.ndarray]:
        """[num_routed_tokens x num_routes] uint8, of rows that have some; see `routes_of`."""
        return self.tokens["routes"]

    @property
    def notes(self) -> Mapping[int, np.ndarray]:
        """[num_note_bytes] uint8: what an environment said of the episode, JSON in UTF-8.

        Only of open groups, for rows whose environment has ended them or set their current turn.
        """
        return self.tokens["notes"]

    def __len__(self) -> int:
        return len(self.table)

    @property
    def rows_here(self) -> list[int]:
        """Numbers of the rows whose tokens are on this rank, ascending."""
        return sorted(self.response_ids)

    def take(self, rows: Sequence[int] | np.ndarray) -> Rollouts:
        """These rows, in this order, numbered from 0."""
        numbers = [int(row) for row in rows]
        tokens = {
            name: LocalArrays((i, held[row]) for i, row in enumerate(numbers) if row in held)
            for name, held in self.tokens.items()
        }
        return Rollouts(self.table[np.asarray(numbers, dtype=np.int64)], tokens)

    def take_groups(self, groups: Sequence[int]) -> Rollouts:
        """The rows of these groups, in this order, numbered from 0."""
        return self.take(self.rows_of(groups))

    def changed(self, **facts: Any) -> Self:
        """A copy with new values in the named columns of the table; tokens are shared."""
        table = self.table.copy()
        for name, values in facts.items():
            table[name] = values
        return replace(self, table=table)

    def with_tokens(self, tokens: Tokens) -> Self:
        """A copy with exactly these arrays."""
        held = {name: LocalArrays(tokens[name]) for name in COLUMNS}
        for name in ("response_masks", "conversations", "routes", "notes"):  # not of every row
            held[name] = LocalArrays((row, one) for row, one in held[name].items() if len(one))
        return replace(self, tokens=held)

    def is_sampled(self, row: int) -> np.ndarray:
        """[num_response_tokens] bool: True for sampled tokens; the row must be on this rank."""
        masks = self.tokens["response_masks"]
        return masks[row] if row in masks else np.ones(len(self.response_ids[row]), dtype=bool)

    def conversations_of(self, row: int) -> np.ndarray:
        """[num_response_tokens] int32: `Episode.conversations`; the row must be on this rank."""
        held = self.tokens["conversations"]
        return held[row] if row in held else np.zeros(len(self.response_ids[row]), np.int32)

    def by_conversation(self, row: int, values: np.ndarray) -> np.ndarray:
        """Values of the response tokens [num_response_tokens], one conversation after another.

        So the policy reads them; within a conversation they stay in order.
        """
        if row not in self.conversations:
            return values
        return values[np.argsort(self.conversations[row], kind="stable")]

    def in_order(self, row: int, values: torch.Tensor) -> torch.Tensor:
        """Values of the sampled tokens [num_sampled_tokens] in the order in which they came.

        Undoes `by_conversation`.
        """
        if row not in self.conversations:
            return values
        sampled = self.conversations[row][self.is_sampled(row)]
        places = torch.from_numpy(np.argsort(sampled, kind="stable"))
        return torch.empty_like(values).index_copy_(0, places, values)

    def routes_of(self, row: int) -> np.ndarray | None:
        """[num_routed_tokens, num_routes] uint8: `Episode.routes`; the row must be on this rank."""
        num_tokens = self.table["num_routed_tokens"][row]
        return self.routes[row].reshape(num_tokens, -1) if num_tokens else None

    def versions(self, row: int) -> np.ndarray:
        """[num_response_tokens] int32: version of the weights that sampled each token.

        An appended token has that of the tokens before it; the row must be on this rank.
        """
        carried, newest = self.carried_versions[row], self.table["newest_version"][row]
        num_new = len(self.response_ids[row]) - len(carried)
        return np.concatenate([carried, np.full(num_new, newest, np.int32)])

    def carried(self) -> Self:
        """A copy in which all tokens are carried, each with its version."""
        table = self.table
        changed = self.changed(
            num_carried_tokens=table["num_response_tokens"],
            num_carried_sampled=table["num_sampled_tokens"],
        )
        versions = {row: self.versions(row) for row in self.rows_here}
        return changed.with_tokens({**self.tokens, "carried_versions": versions})

    def spread(self, *, rank: int, size: int) -> Self:
        """A copy without the tokens of other ranks; before, every one of `size` ranks has all."""
        holder = np.arange(len(self)) % size
        mine = {*np.flatnonzero(holder == rank).tolist()}
        return self.changed(holder=holder).with_tokens(
            {
                name: {row: array for row, array in held.items() if row in mine}
                for name, held in self.tokens.items()
            }
        )

    @property
    def has_carried(self) -> bool:
        """Whether earlier steps sampled tokens of any row."""
        return bool(self.table["num_carried_tokens"].any())

    @property
    def has_scored(self) -> bool:
        """Whether the trainer's log-probs of any carried tokens are kept."""
        return bool(self.table["num_scored_tokens"].any())

    @property
    def has_routes(self) -> bool:
        """Whether the engine's routes of any tokens are kept."""
        return bool(self.table["num_routed_tokens"].any())

    @property
    def num_sampled_tokens(self) -> torch.Tensor:
        """[B] int64: sampled tokens, the |y_i| of every mean and denominator."""
        return torch.from_numpy(self.table["num_sampled_tokens"].astype(np.int64))

    @property
    def num_fed_tokens(self) -> torch.Tensor:
        """[B] int64: prompt + response, but the last token of each conversation, only a label."""
        lengths = self.table["num_prompt_tokens"] + self.table["num_response_tokens"]
        lengths = lengths - self.table["num_conversations"]
        return torch.from_numpy(lengths.astype(np.int64))

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens in all rows."""
        return int(self.table["num_sampled_tokens"].sum(dtype=np.int64))

    @property
    def rollouts_per_prompt(self) -> int:
        """Rows of each group; 0 for an empty table. AssertionError: groups differ in size."""
        sample = self.table["sample"]
        num_groups = int((sample == 0).sum())
        if not num_groups:
            assert not len(self), "groups begin with sample 0"
            return 0
        size = len(self) // num_groups
        if len(self) % num_groups or (sample != np.arange(len(self)) % size).any():
            sizes = np.diff(np.append(np.flatnonzero(sample == 0), len(self)))
            raise AssertionError(
                f"groups must have the same number of rollouts, not {sorted(set(sizes.tolist()))}"
            )
        return size

    @property
    def num_groups(self) -> int:
        return int((self.table["sample"] == 0).sum())

    @property
    def problems(self) -> list[int]:
        """Number in the data of each group's problem."""
        problems: list[int] = self.table["problem"][self.table["sample"] == 0].tolist()
        return problems

    def rows_of(self, groups: Sequence[int]) -> list[int]:
        """Row numbers of these groups, in this order."""
        size = self.rollouts_per_prompt
        return [row for group in groups for row in range(group * size, (group + 1) * size)]

    @property
    def outcomes(self) -> np.ndarray:
        """[B] float64: 1 correct, 0 wrong, NaN unknown."""
        codes = self.table["outcome"]
        return np.where(codes == Outcome.UNKNOWN.code, np.nan, codes == Outcome.CORRECT.code)

    @property
    def rewards(self) -> np.ndarray:
        """[B] float64: `outcomes`, or the verifier's numbers with `reward.graded`; NaN unknown."""
        outcomes, grades = self.outcomes, self.table["grade"]
        return np.where(np.isnan(outcomes) | np.isinf(grades), outcomes, grades)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Batch(Rollouts):
    """The rollouts of a step, with c, k and A, and the packing plan.

    Tensors are on the CPU and the same on every rank.
    """

    advantages: torch.Tensor
    """[B] float64. Zero for unknown verdicts and for groups with c = k, or c = 0 without
    `Method.virtual_correct`."""
    num_correct: torch.Tensor
    """[B] int64: c of the sequence's group, counted over valid rollouts."""
    group_size: torch.Tensor
    """[B] int64: k of the sequence's group, counted over valid rollouts (0 if none is valid)."""
    valid: torch.Tensor
    """[B] bool: False for unknown verdicts, which loss, denominators and metrics exclude."""
    plan: Plan | None = None
    """The packing plan (`learn.plan`); None: not planned yet."""


__all__ = ["COLUMNS", "ROW", "Batch", "LocalArrays", "Rollouts"]
