"""What every rank knows of a batch's sequences, and the tokens that only some ranks have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:  # `types` needs this, and the workers that judge responses need `types`
    import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """One sequence, as it travels to the ranks that compute it (`exchange`)."""

    prompt_ids: np.ndarray
    """[num_prompt_tokens] int32."""
    response_ids: np.ndarray
    """[num_response_tokens] int32."""
    rollout_log_probs: np.ndarray
    """[num_response_tokens] float32: the engine's own while sampling."""
    carried_log_probs: np.ndarray
    """[num_carried_tokens] float32, `Carried.old_log_probs`; empty where this step sampled all."""
    response_mask: np.ndarray | None = None
    """[num_response_tokens] bool, `Rollout.response_mask`; None: all sampled."""

    @property
    def is_sampled(self) -> np.ndarray:
        """`response_mask`, written out where it is None."""
        import numpy as np

        if self.response_mask is None:
            return np.ones(len(self.response_ids), dtype=bool)
        return self.response_mask


class _Column:
    def __init__(self, number: int) -> None:
        self._number = number

    def __get__(self, facts: Facts, _: object = None) -> np.ndarray:
        column: np.ndarray = facts.table[:, self._number]
        return column


class Facts:
    """What every rank knows of B sequences, group after group: the tokens are elsewhere.

    All columns are [B] int32, views of `table`.

    Attributes:
        table: [B, NUM_COLUMNS] int32.
    """

    NUM_COLUMNS = 14

    problem = _Column(0)
    """Number of the problem in the data (`PromptSource.problems`)."""
    sample = _Column(1)
    """Number of the response within its group."""
    num_prompt_tokens = _Column(2)
    num_response_tokens = _Column(3)
    """All of them, those that the environment gave included."""
    num_sampled_tokens = _Column(4)
    """Those that the model sampled: the |y_i| of every mean and denominator."""
    num_carried_tokens = _Column(5)
    """The first ones of a response, sampled or given in earlier steps."""
    num_carried_sampled = _Column(6)
    """Sampled ones among these."""
    oldest_version = _Column(7)
    """Version of the weights that sampled its first token."""
    is_truncated = _Column(8)
    is_finished = _Column(9)
    outcome = _Column(10)
    """0 wrong, 1 correct, 2 unknown."""
    holder = _Column(11)
    """Rank, of the channel that tokens travel over, that has the tokens."""
    # The last two are `log_prob_sum`.

    def __init__(self, table: np.ndarray) -> None:
        assert table.ndim == 2 and table.shape[1] == self.NUM_COLUMNS, table.shape
        self.table = table

    @classmethod
    def of(cls, tokens: Sequence[Tokens]) -> Facts:
        """Lengths and sums of these; every other column is 0."""
        import numpy as np

        facts = cls(np.zeros((len(tokens), cls.NUM_COLUMNS), dtype=np.int32))
        sums = np.zeros(len(tokens), dtype=np.float64)
        for i, one in enumerate(tokens):
            log_probs, mask = one.rollout_log_probs, one.response_mask
            num_carried = len(one.carried_log_probs)
            facts.num_prompt_tokens[i] = len(one.prompt_ids)
            facts.num_response_tokens[i] = facts.num_sampled_tokens[i] = len(one.response_ids)
            facts.num_carried_tokens[i] = facts.num_carried_sampled[i] = num_carried
            if mask is not None:
                facts.num_sampled_tokens[i] = mask.sum()
                facts.num_carried_sampled[i] = mask[:num_carried].sum()
                log_probs = log_probs[mask]
            sums[i] = np.sum(log_probs, dtype=np.float64)
        facts.table[:, -2:] = sums[:, None].view(np.int32)
        return facts

    @classmethod
    def join(cls, parts: Iterable[Facts]) -> Facts:
        """The sequences of all parts, in order."""
        import numpy as np

        none = np.empty((0, cls.NUM_COLUMNS), dtype=np.int32)
        return cls(np.concatenate([none, *(part.table for part in parts)]))

    @classmethod
    def from_bytes(cls, content: bytes) -> Facts:
        """What `to_bytes` made."""
        import numpy as np

        return cls(np.frombuffer(content, dtype=np.int32).reshape(-1, cls.NUM_COLUMNS).copy())

    def to_bytes(self) -> bytes:
        """The table alone: rows of little-endian int32."""
        return self.table.tobytes()

    def __len__(self) -> int:
        return len(self.table)

    def take(self, rows: Sequence[int] | np.ndarray) -> Facts:
        """The sequences `rows`, in that order."""
        import numpy as np

        return Facts(self.table[np.asarray(rows, dtype=np.int64)])

    def changed(self, **columns: Any) -> Facts:
        """A copy with other values in the named columns."""
        copy = Facts(self.table.copy())
        for name, values in columns.items():
            getattr(copy, name)[:] = values
        return copy

    @property
    def group_size(self) -> int:
        """k: every group has as many responses; 0 where there is no group."""
        import numpy as np

        num_groups = int((self.sample == 0).sum())
        if not num_groups:
            assert not len(self), "groups begin with their first response"
            return 0
        size = len(self) // num_groups
        if len(self) % num_groups or (self.sample != np.arange(len(self)) % size).any():
            starts = np.append(np.flatnonzero(self.sample == 0), len(self))
            sizes = sorted({int(size) for size in np.diff(starts)})
            raise AssertionError(f"groups must have the same number of rollouts, not {sizes}")
        return size

    @property
    def rewards(self) -> np.ndarray:
        """[B] float64: `Verdict.reward`."""
        import numpy as np

        return np.array([0.0, 1.0, np.nan])[self.outcome]

    @property
    def log_prob_sum(self) -> np.ndarray:
        """[B] float64: `rollout_log_probs` of the sampled tokens, summed."""
        import numpy as np

        return np.ascontiguousarray(self.table[:, -2:]).view(np.float64)[:, 0]


class Held(Sequence["np.ndarray"]):
    """One array for each of B sequences, those of this rank's share alone.

    Whoever asks for another one has planned wrong: it is a KeyError that names the sequence.
    """

    def __init__(self, size: int, arrays: Mapping[int, np.ndarray]) -> None:
        self._size = size
        self._arrays = arrays

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, place: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, place: slice) -> list[np.ndarray]: ...
    def __getitem__(self, place: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(self._size))]
        if not 0 <= place < self._size:
            raise IndexError(place)
        if place not in self._arrays:
            raise KeyError(f"the tokens of sequence {place} are not on this rank")
        return self._arrays[place]


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """B sequences whose tokens are spread over the ranks."""

    facts: Facts
    """The same on every rank."""
    held: Mapping[int, Tokens]
    """By number those whose tokens are here."""

    @classmethod
    def join(cls, parts: Iterable[Spread]) -> Spread:
        """The sequences of all parts, in order."""
        parts, first = [*parts], 0
        held: dict[int, Tokens] = {}
        for part in parts:
            held |= {first + i: tokens for i, tokens in part.held.items()}
            first += len(part.facts)
        return cls(Facts.join(part.facts for part in parts), held)

    def take(self, rows: Sequence[int] | np.ndarray) -> Spread:
        """The sequences `rows`, in that order and numbered anew."""
        numbered = enumerate(int(row) for row in rows)
        held = {i: self.held[row] for i, row in numbered if row in self.held}
        return Spread(self.facts.take(rows), held)

    def __len__(self) -> int:
        return len(self.facts)
