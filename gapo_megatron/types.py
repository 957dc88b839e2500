"""Data passed between the stages of a step beside the table (`rollouts`), in this order."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # verifier workers need `Verdict`, and start without torch
    import numpy as np
    import torch

Factors: TypeAlias = "tuple[str, torch.Tensor, torch.Tensor]"
"""Name of a linear layer in the Hugging Face model, such as `model.layers.0.self_attn.q_proj`, then
A [rank, in] and B [out, rank] beside its weight W: the layer computes W x + scale * B A x."""

ChooseExperts: TypeAlias = "Callable[[int, torch.Tensor], torch.Tensor]"
"""Chooses the experts of a rank's tokens in a layer: called with the layer's number in the whole
model, from 0, and the router's own choice [tokens, experts per token] int64, in ascending order."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A problem of the dataset, as the model sees it."""

    id: str
    """Unique within its file; seeds the sampling of its rollouts."""
    token_ids: tuple[int, ...]
    """Tokens of the prompt, with the template applied; tokenised once."""
    answer: str
    """Ground truth for the verifier."""
    level: str = ""
    """Stratum for reports (difficulty, subject); empty if the data has none."""
    source: str = ""
    """Name of the data source; empty if there is only `data.train_path`."""
    verifier: str = ""
    """Verifier of the row, if its file names one; empty: `reward.kind`."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The row's columns, as JSON values, that user verifiers take (or all, for a
    user environment), but `answer` and `verifier`; its prompt as it was read."""
    answer_key: str = ""
    """Where `row` has the answer all the same, in rows of other formats: agents get it without
    (`row_formats.without`). Empty: nowhere."""
    failure: str = ""
    """Why the environment could not begin with it; the verdicts on its responses are unknown."""

    def for_user(self) -> Prompt:
        """A copy for user code: changing its row does not reach the data."""
        return replace(self, row=copy.deepcopy(self.row)) if self.row else self


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """What one turn of the model must be, and what ends it beside EOS and `environment.stop`."""

    stop: tuple[str, ...] = ()
    """Texts, as `environment.stop`: the token that completes one stays, as it was sampled."""
    max_tokens: int | None = None
    """Largest number of tokens of the turn; None: as many as the response has room for."""
    grammar: str = ""
    """A structural tag of xgrammar, as JSON, that masks the tokens of the turn, which ends at EOS
    alone; empty: none. Needs `environment.structured_outputs`."""
    num_cut: int = 0
    """Tokens that were cut from results of calls before the turn (`environment.max_call_tokens`):
    only for the metrics."""
    conversation: int = 0
    """Number of the conversation that the turn and the tokens before it belong to. A response
    begins with 0, which has the prompt; any other has only its own tokens, and opens with its
    first. Numbers follow one another."""
    num_alternatives: int = 0
    """Most likely tokens to keep at the place of each of the turn's tokens, 0 to 20, with their
    log-probs (`Episode.alternatives`)."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> TurnSettings:
        """From the fields of `asdict`, which may have been JSON in between."""
        return cls(**{**fields, "stop": tuple(fields["stop"])})


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """A response to a prompt, complete or still being generated.

    Environments and verifiers read it. A response is never tokenised again.
    """

    prompt: Prompt
    sample: int
    """Number of the response among the k of its prompt."""
    token_ids: np.ndarray
    """[num_response_tokens] int32, EOS included if the model sampled it."""
    log_probs: np.ndarray
    """[num_response_tokens] float32: `rollout_log_probs`, the engine's, while sampling."""
    truncated: bool = False
    """True if generation stopped at the token limit instead of at EOS."""
    finished: bool = True
    """False during generation, and between steps if the next step continues the response."""
    response_mask: np.ndarray | None = None
    """[num_response_tokens] bool: True where the model sampled the token, False where the
    environment appended it (log-prob 0, nothing is learned from it); None: all sampled."""
    conversations: np.ndarray | None = None
    """[num_response_tokens] int32: number of the conversation that each token belongs to
    (`TurnSettings.conversation`); tokens are in the order in which they came. None: all of 0."""
    carried_log_probs: np.ndarray | None = None
    """[n] float32 for the first n tokens, sampled by earlier steps: the trainer's log-probs at the
    weights that sampled each token (`old_log_probs`); None without such tokens, and on ranks that
    only generate."""
    carried_versions: np.ndarray | None = None
    """[n] int32 for the first n tokens, sampled by earlier steps: policy version that sampled each;
    None without such tokens."""
    failure: str = ""
    """Why the environment ended the episode without an answer; its verdict is then unknown."""
    final_text: str | None = None
    """Text with which the environment ended the episode (`Environment.respond`); None: without."""
    turn: TurnSettings = field(default_factory=TurnSettings)
    """Settings of the model's current turn, if the environment has given some."""
    num_drafted: int = 0
    """Tokens that a draft proposed for it in this step (`engine.Completion`)."""
    num_accepted: int = 0
    """Those of them that were accepted."""
    routes: np.ndarray | None = None
    """[n, layers x experts per token] uint8, for the first n tokens of prompt and response: the
    experts that the engine chose, layer by layer, when it first read each token. All but the last
    token of a finished response have some. None: not kept (`objective.routing_replay`)."""
    alternatives: np.ndarray | None = None
    """[n] of `rollout.alternatives.ALTERNATIVE`, in order: at the tokens of each turn that asked
    for them (`TurnSettings.num_alternatives`), the most likely first. None: none, or finished."""

    @property
    def is_sampled(self) -> np.ndarray:
        """[num_response_tokens] bool: `response_mask`, all True if that is None."""
        import numpy as np

        if self.response_mask is None:
            return np.ones(len(self.token_ids), dtype=bool)
        return self.response_mask

    @property
    def num_conversations(self) -> int:
        """Number of conversations so far."""
        return 1 if self.conversations is None else 1 + int(self.conversations.max(initial=0))

    def context(self, end: int | None = None) -> np.ndarray:
        """Tokens that the model has read when it samples the response's token `end`: [n] int32.

        Those of its conversation before it, and of the first also the prompt's.

        Args:
            end: number of the token; None: the next one, of the current turn.
        """
        import numpy as np

        tokens, prompt = self.token_ids[:end], np.asarray(self.prompt.token_ids, np.int32)
        if self.conversations is None:
            return np.concatenate([prompt, tokens])
        number = self.turn.conversation if end is None else self.conversations[end]
        tokens = tokens[self.conversations[:end] == number]
        return tokens if number else np.concatenate([prompt, tokens])

    def for_user(self) -> Episode:
        """A copy for user code: without routes, with arrays that are read-only."""

        def copied(array: np.ndarray | None) -> np.ndarray | None:
            if array is None:
                return None
            array = array.copy()
            array.setflags(write=False)
            return array

        names = (
            *("token_ids", "log_probs", "response_mask", "conversations"),
            *("carried_log_probs", "carried_versions"),
            "alternatives",
        )
        arrays: dict[str, Any] = {name: copied(getattr(self, name)) for name in names}
        return replace(self, prompt=self.prompt.for_user(), routes=None, **arrays)

    @property
    def num_sampled_tokens(self) -> int:
        """Number of sampled tokens."""
        return len(self.token_ids) if self.response_mask is None else int(self.response_mask.sum())


class Outcome(enum.StrEnum):
    """Possible results of a verifier. Unknown is not wrong: it says nothing about the response."""

    WRONG = "wrong"
    CORRECT = "correct"
    UNKNOWN = "unknown"

    @property
    def code(self) -> int:
        """The number that stands for it in the table of a batch: its position in this class."""
        return [*Outcome].index(self)

    @classmethod
    def of_code(cls, code: int) -> Outcome:
        """The outcome of a `code`."""
        return [*cls][code]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verifier's result for a response."""

    outcome: Outcome
    reason: str = ""
    """Reason for an unknown outcome (or for a wrong one, if the verifier gives it)."""
    grade: float | None = None
    """The verifier's number, if it gives one; with `reward.graded` the advantages come from it."""
    answer: str = ""
    """The answer that it found correct, for `objective.answers`; empty if it is no single text."""
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Further numbers of the verifier, and the scores of components; logged as `verifier/NAME`."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A judged response as text, for people to read: a line of samples.jsonl."""

    step: int
    problem: str
    """`Prompt.id`."""
    sample: int
    """Number of the response among the responses to its prompt."""
    source: str
    """`Prompt.source`."""
    c: int
    """Correct responses to the prompt (`num_correct`)."""
    k: int
    """Responses to the prompt with a known verdict (`group_size`)."""
    verdict: str
    """The value of its `Outcome`."""
    reason: str
    """`Verdict.reason`."""
    grade: float | None
    """`Verdict.grade`."""
    num_tokens: int
    """Tokens of the response, with EOS and what the environment appended."""
    truncated: bool
    prompt: str
    """The prompt's tokens as text, with the chat template and special tokens."""
    response: str
    """The response's tokens as text, with special tokens."""
    answer: str
    """Start of the reference answer."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """`Verdict.metrics`."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SampleTokens:
    """A `Sample` token by token, with what its update made of it: a row of tokens/step_N.parquet.

    Arrays have an element for each of its `num_tokens`. What is a number of sampled tokens is NaN
    at those that an environment appended.
    """

    sample: Sample
    token_ids: np.ndarray
    """Int32."""
    pieces: list[str]
    """Text of each token; together they are `Sample.response`."""
    response_mask: np.ndarray
    """Bool: True where the model sampled the token."""
    conversations: np.ndarray
    """Int32: number of the conversation that each token belongs to (`Episode.conversations`)."""
    policy_versions: np.ndarray
    """Int32: version of the weights that sampled each token."""
    rollout_log_probs: np.ndarray
    """Float32: the engine's, while sampling."""
    advantage: float
    update: int | None = None
    """Number of its update within the step, from 0. None, as all that follows: the model was not
    computed for it (A = 0)."""
    ratio: float | None = None
    """Ratio s of the sequence at its update; None where each token has a ratio."""
    clip_low: float | None = None
    """Lower bound of the ratio; None where the method's widths are no such bounds."""
    clip_high: float | None = None
    """Upper bound of the ratio, likewise."""
    clipped: float | None = None
    """1 if its ratio was clipped, else 0; where each token has a ratio, the share of them."""
    clip_side: str | None = None
    """Where its clipped ratios lie: `high` above 1, `low` below, `both`; empty without any."""
    token_clipped: np.ndarray | None = None
    """Float32: 1 where the token's ratio was clipped, else 0; None where sequences have ratios."""
    old_log_probs: np.ndarray | None = None
    """Float32: the trainer's, at the start of the step or, of carried tokens, at the weights that
    sampled them; None: not computed, with `objective.old_log_probs` = "rollout"."""
    log_probs: np.ndarray | None = None
    """Float32: the trainer's, at its update."""
    log_ratio: np.ndarray | None = None
    """Float32: `log_probs` minus the log-probs that the ratio compares with."""


@dataclass(frozen=True, slots=True)
class Span:
    """A turn of the model, or a call of the environment; seconds since the generation began."""

    is_call: bool
    start_s: float
    """Start; a turn starts when the engine gets its request, which may then wait there."""
    end_s: float
    """That of a call which an earlier attempt has made, and the journal answers, is its start."""
    num_tokens: int
    """Tokens of the turn, or of the environment's answer."""
    failed: bool = False
    """Whether the call failed."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """When the turns and calls of a `Sample` took place: a line of timelines.jsonl."""

    step: int
    problem: str
    sample: int
    spans: tuple[Span, ...]
    """In order; of the last generation, should an earlier step have begun the response."""


@dataclass(frozen=True, slots=True)
class Minibatch:
    """An optimizer step of the plan."""

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]
    """[data_parallel_size][num_microbatches] tuples of indices into the Batch; () for padding only.

    Every data-parallel rank has the same number of micro-batches, so collectives always match.
    """
    num_tokens_global: int
    """Response tokens of all valid sequences of the mini-batch, skipped sequences included."""
    num_sequences_global: int
    """Number of valid sequences of the mini-batch, skipped sequences included."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Assignment of sequences to ranks and micro-batches, used by the old and the new pass."""

    minibatches: tuple[Minibatch, ...]
    num_tokens_skipped: int = 0
    """Prompt + response tokens of sequences that are skipped because A = 0."""
    num_tokens_computed: int = 0
    """Prompt + response tokens of the computed sequences."""
    rounding: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Sequences that measure a step's rounding, in the form of `Minibatch.microbatches`."""


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """Packed sequences of a forward pass, on the compute device: this rank's part of them.

    T = packed tokens (padded to a multiple), S = packed sequences, C = their conversations of two
    tokens or more, R = sampled response tokens = rows that the head scores. Row r is the position
    whose *next* token is response token r. Context parallel ranks split the tokens (T_local = T /
    cp) and the rows (R_local of R); without context parallelism a rank has all tokens and rows.
    """

    tokens: torch.Tensor
    """[1, T_local] int64; padding at the end is a separate sequence to which no token attends."""
    position_ids: torch.Tensor
    """[1, T_local] int64, restarting at 0 in every conversation."""
    cu_seqlens: torch.Tensor
    """[C + 1 (+ 1 if padded)] int32 boundaries of the whole packed conversations."""
    max_seqlen: int
    row_index: torch.Tensor
    """[R_local] int64 positions in 0..T_local-1."""
    labels: torch.Tensor
    """[R_local] int64 response tokens."""
    sequence_ids: torch.Tensor
    """[R] int64 in 0..S-1, non-decreasing, of all rows."""
    row_offsets: torch.Tensor
    """[S + 1] int64: sequence s has rows row_offsets[s]..row_offsets[s + 1] - 1 of R."""
    is_padding: torch.Tensor
    """[1, T_local] bool: tokens of no sequence, at the end and where sequences are padded."""
    indices: tuple[int, ...] = ()
    """[S] row numbers in the batch: row s of any per-sequence tensor."""
    rows: torch.Tensor | None = None
    """[R_local] int64, rows of R that this rank scores; None: all."""
    row_edges: tuple[int, ...] = ()
    """Number of scored rows before the positions of each sequence parallel rank, and R_local at the
    end; (0, R_local) without sequence parallelism."""
    choose_experts: ChooseExperts | None = None
    """Chooses the experts of its tokens; None: the routers do (`learn.checks.routes`)."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LossMicrobatch(Microbatch):
    """A micro-batch with the inputs of the loss, for its S sequences and R rows."""

    advantages: torch.Tensor
    """[S] float64."""
    num_correct: torch.Tensor
    """[S] int64."""
    group_size: torch.Tensor
    """[S] int64."""
    is_carried: torch.Tensor
    """[S] bool: earlier steps sampled the sequence's first tokens."""
    keys: torch.Tensor
    """[S] int64: a hash of the problem and the sample (`objective.draws`)."""
    rollout_log_probs: torch.Tensor
    """[R] float32."""
    carried_log_probs: torch.Tensor | None = None
    """[R] float32, 0 for tokens that are not carried; None: this step sampled every token."""
    is_carried_row: torch.Tensor | None = None
    """[R] bool: True for carried tokens; None if there are none."""
