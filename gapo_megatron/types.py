"""What flows between the stages of one step, in the order in which it appears."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gapo_megatron.facts import Facts as Facts
from gapo_megatron.facts import Held as Held
from gapo_megatron.facts import Tokens as Tokens

if TYPE_CHECKING:  # the workers that judge responses need `Verdict`, and start without torch
    import numpy as np
    import torch


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem of the dataset, as the model sees it."""

    id: str
    """Unique within its file; seeds the sampling of its rollouts."""
    token_ids: tuple[int, ...]
    """What is sent to the model: template applied, tokenised once."""
    answer: str
    """Ground truth for the verifier."""
    level: str = ""
    """Stratum for reports (difficulty, subject); empty when the data has none."""


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One sampled response. Tokens stay tokens: a response is never tokenised again."""

    token_ids: np.ndarray
    """[num_response_tokens] int32, EOS included when the model produced it."""
    log_probs: np.ndarray
    """[num_response_tokens] float32: `rollout_log_probs`, the engine's own while sampling."""
    truncated: bool
    """True when generation stopped at the token limit instead of at EOS."""
    finished: bool = True
    """False only within an `OpenGroup`: the next step continues from these tokens."""
    carried: Carried | None = None
    """Old log-probs of the prefix generated in earlier steps; None if there is none."""
    response_mask: np.ndarray | None = None
    """[num_response_tokens] bool: True where the model sampled the token, False where the
    environment gave it (its log-prob is 0 then, and nothing learns from it); None: all sampled."""

    @property
    def is_sampled(self) -> np.ndarray:
        """`response_mask`, written out where it is None."""
        import numpy as np

        if self.response_mask is None:
            return np.ones(len(self.token_ids), dtype=bool)
        return self.response_mask


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """The first n tokens of a response, which earlier steps sampled."""

    oldest_version: int
    """Policy version of the weights that sampled the first of them; those of the others follow."""
    old_log_probs: np.ndarray
    """[n] float32: the trainer's log-probs of the tokens, each at the weights that sampled it."""


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One response to a prompt, as far as it has come: what environment and verifier look at."""

    prompt: Prompt
    sample: int
    """Number of the response among the k of its prompt."""
    rollout: Rollout


@dataclass(frozen=True, slots=True, eq=False)
class OpenGroup:
    """A prompt with unfinished responses: the next step continues them."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    """k, finished or not; between steps all their tokens are `carried`."""


class Outcome(enum.StrEnum):
    """What a verifier can say. Unknown is not wrong: it says nothing about the response."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verifier's answer about one response."""

    outcome: Outcome
    reason: str = ""
    """Why the outcome is unknown (or wrong, when the verifier can tell)."""

    @property
    def reward(self) -> float:
        """1.0 correct, 0.0 wrong, NaN unknown (`objective.group_advantages` leaves NaN out)."""
        return {Outcome.CORRECT: 1.0, Outcome.WRONG: 0.0, Outcome.UNKNOWN: float("nan")}[
            self.outcome
        ]


@dataclass(frozen=True, slots=True)
class Group:
    """All rollouts of one prompt, with their verdicts: the unit in which c and k are counted."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def rewards(self) -> list[float]:
        return [verdict.reward for verdict in self.verdicts]


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """B sequences of tokens to be scored: what packing and the forward pass need to know."""

    prompt_ids: Sequence[np.ndarray]
    """B arrays of int32 prompt tokens."""
    response_ids: Sequence[np.ndarray]
    """B arrays of int32 response tokens."""
    response_masks: Sequence[np.ndarray] = field(default_factory=list, kw_only=True)
    """B arrays of bool, `Rollout.response_mask`: a token that the model did not sample is read, and
    has no row, no log-prob and no part in any denominator. No array at all: all were sampled."""

    def __len__(self) -> int:
        return len(self.response_ids)

    def is_sampled(self, i: int) -> np.ndarray:
        """[len(response_ids[i])] bool: which response tokens of sequence i the model sampled."""
        import numpy as np

        if not self.response_masks:
            return np.ones(len(self.response_ids[i]), dtype=bool)
        return self.response_masks[i]

    @property
    def num_response_tokens(self) -> torch.Tensor:
        """[B] int64: sampled ones, the |y_i| of every mean and denominator."""
        import torch

        counted = self.response_masks or self.response_ids
        count = (lambda mask: int(mask.sum())) if self.response_masks else len
        return torch.tensor([count(one) for one in counted], dtype=torch.int64)

    @property
    def num_fed_tokens(self) -> torch.Tensor:
        """[B] int64: prompt + response - 1; the last response token is predicted, never read."""
        import torch

        pairs = zip(self.prompt_ids, self.response_ids, strict=True)
        lengths = [len(prompt) + len(response) - 1 for prompt, response in pairs]
        return torch.tensor(lengths, dtype=torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Batch(Sequences):
    """Every sequence of one rollout batch, flat, group after group: facts, c, k, A on every rank.

    Of the tokens and log-probs a rank has those of its share; asking for others is a KeyError.
    B = sequences = prompts x rollouts per prompt. Tensors live on the CPU.
    """

    rollout_log_probs: Sequence[np.ndarray]
    """B arrays of float32, aligned with `response_ids`."""
    advantages: torch.Tensor
    """[B] float64. Zero for unknown verdicts and for groups with c = 0 or c = k."""
    num_correct: torch.Tensor
    """[B] int64: c of the sequence's group, counted over valid rollouts."""
    group_size: torch.Tensor
    """[B] int64: k of the sequence's group, counted over valid rollouts (0 if none is valid)."""
    valid: torch.Tensor
    """[B] bool: False for unknown verdicts; those leave loss, denominators and metrics."""
    carried_log_probs: Sequence[np.ndarray] = field(default_factory=list)
    """B arrays of float32, `Carried.old_log_probs` of each response's first tokens; no array at
    all where this step sampled every token."""
    facts: Facts = None  # type: ignore[assignment]
    """Facts of the B sequences; by default those that the tokens say themselves, all of them here
    (`Facts.of`)."""

    def __post_init__(self) -> None:
        if self.facts is None:
            tokens = [self.tokens(i) for i in range(len(self.response_ids))]
            object.__setattr__(self, "facts", Facts.of(tokens))

    def tokens(self, i: int) -> Tokens:
        """Sequence i, which must be of this rank's share."""
        import numpy as np

        carried = self.carried_log_probs
        mask = self.response_masks[i] if self.response_masks else None
        return Tokens(
            self.prompt_ids[i],
            self.response_ids[i],
            self.rollout_log_probs[i],
            carried[i] if carried else np.empty(0, dtype=np.float32),
            None if mask is None or mask.all() else mask,
        )

    def with_tokens(self, tokens: Mapping[int, Tokens]) -> Batch:
        """The same batch with the tokens of these sequences, by number, and of no others."""
        size, facts = len(self.facts), self.facts
        masks: Sequence[np.ndarray] = []
        carried: Sequence[np.ndarray] = []
        if (facts.num_sampled_tokens < facts.num_response_tokens).any():
            masks = Held(size, {i: one.is_sampled for i, one in tokens.items()})
        if facts.num_carried_tokens.any():
            carried = Held(size, {i: one.carried_log_probs for i, one in tokens.items()})
        return replace(
            self,
            prompt_ids=Held(size, {i: one.prompt_ids for i, one in tokens.items()}),
            response_ids=Held(size, {i: one.response_ids for i, one in tokens.items()}),
            rollout_log_probs=Held(size, {i: one.rollout_log_probs for i, one in tokens.items()}),
            carried_log_probs=carried,
            response_masks=masks,
        )

    @property
    def num_response_tokens(self) -> torch.Tensor:
        """[B] int64: sampled ones, of every sequence, wherever its tokens are."""
        import torch

        return torch.from_numpy(self.facts.num_sampled_tokens).long()

    @property
    def num_fed_tokens(self) -> torch.Tensor:
        """[B] int64: as of `Sequences`, of every sequence."""
        import torch

        facts = self.facts
        fed = facts.num_prompt_tokens + facts.num_response_tokens - 1
        return torch.from_numpy(fed).long()


@dataclass(frozen=True, slots=True)
class Minibatch:
    """One optimizer step of the plan."""

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]
    """[data_parallel_size][num_microbatches] tuples of indices into the Batch; () computes nothing.

    Every data-parallel rank has the same number of micro-batches, so collectives always match.
    """
    num_tokens_global: int
    """Response tokens of all valid sequences of the mini-batch, those not computed included."""
    num_sequences_global: int
    """Valid sequences of the mini-batch, those not computed included."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Which rank computes which sequence in which micro-batch; one plan serves old and new pass."""

    minibatches: tuple[Minibatch, ...]
    num_tokens_skipped: int = 0
    """Prompt + response tokens of sequences that never enter the trunk because A = 0."""
    num_tokens_computed: int = 0
    """Prompt + response tokens of the sequences that do."""


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """Packed sequences of one forward pass, on the compute device.

    T = packed tokens (padded to a multiple), S = packed sequences, R = response tokens = rows the
    head scores. Row r is the position whose *next* token is response token r.
    """

    tokens: torch.Tensor
    """[1, T] int64; the padding at the end is a sequence of its own that no one attends to. One
    rank's share is [1, T / context_parallel_size] (`policy.context`), and so `position_ids`."""
    position_ids: torch.Tensor
    """[1, T] int64, restarting at 0 in every sequence."""
    cu_seqlens: torch.Tensor
    """[S + 1 (+ 1 if padded)] int32 boundaries of the packed sequences."""
    max_seqlen: int
    row_index: torch.Tensor
    """[R] int64 positions in 0..T-1."""
    labels: torch.Tensor
    """[R] int64 response tokens."""
    sequence_ids: torch.Tensor
    """[R] int64 in 0..S-1, non-decreasing."""
    indices: tuple[int, ...] = field(default=())
    """[S] positions in the Batch: row s of any per-sequence tensor."""
    share: Share | None = None
    """What this rank computes of it (`policy.context.to_rank`); None: not known yet."""


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One rank's part of a micro-batch, and what its host must know before the device does."""

    microbatch: Microbatch
    """Tokens, positions, rows and labels that this rank holds; all of them without context
    parallelism. Boundaries stay those of whole sequences."""
    rows: torch.Tensor | None
    """[R_local] int64, which of the R rows it scores; None: all."""
    row_edges: tuple[int, ...]
    """Scored rows before the positions of each rank that shards them (sequence parallelism), and
    all of them at the end; (0, R_local) without."""
