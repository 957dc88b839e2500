"""Problems for the log-prob operator, and what float64 says about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from gapo_megatron.logprob import tiles, token_log_probs

# Absolute error of a log-prob and of an entropy, relative L2 error of dX and dW. Inputs of 16 bits
# are exact in float32, so the first two are errors of float32 sums alone. The gradient of the
# logits is rounded to 16 bits, and so are the results (each 1.7e-3 of the norm in bfloat16, an
# eighth of that in float16).
BOUNDS = {
    torch.bfloat16: (5e-5, 1e-4, 4e-3, 4e-3),
    torch.float16: (5e-5, 1e-4, 5e-4, 5e-4),
    torch.float32: (1e-5, 1e-5, 1e-5, 1e-5),
    torch.float64: (1e-12, 1e-12, 1e-12, 1e-12),
}
KINDS = ("plain", "peaked", "offset200", "offset-200")

Result = dict[str, torch.Tensor]


def problem(
    num_rows: int,
    num_columns: int,
    *,
    kind: str = "plain",
    dtype: torch.dtype = torch.float32,
    hidden_size: int = 64,
    device: str = "cpu",
    seed: int = 0,
    labels: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, output layer and labels (random ones if not given); `kind` shapes logits."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, hidden_size, generator=random)
    weight = torch.randn(num_columns, hidden_size, generator=random) / hidden_size**0.5
    if labels is None:
        labels = torch.randint(num_columns, (num_rows,), generator=random)
    if kind == "peaked":  # largest logits about 28, labels anywhere from certain to impossible
        hidden = weight[labels] * 26 + 6 * hidden
    elif kind.startswith("offset"):  # one common offset, exact in bfloat16
        hidden[:, -1], weight[:, -1] = 16.0, float(kind.removeprefix("offset")) / 16
    return hidden.to(device, dtype), weight.to(device, dtype), labels.to(device)


def reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies [R] in float64, from whole logits."""
    log_p = torch.log_softmax(hidden.double() @ weight.double()[:vocab_size].T / temperature, dim=1)
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def with_gradients(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    **options: object,
) -> list[torch.Tensor]:
    """[log-probs, entropies, dX, dW] for one upstream gradient, every third row of it zero."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (hidden, weight)]
    outputs = function(*leaves, labels, **options)
    random = torch.Generator().manual_seed(1)
    for_rows = [torch.randn(len(labels), generator=random) for _ in outputs]
    for gradient in for_rows:
        gradient[::3] = 0
    torch.autograd.backward(outputs, [g.to(o) for g, o in zip(for_rows, outputs, strict=True)])
    return [t.detach() for t in (*outputs, *(leaf.grad for leaf in leaves))]


def both(*args: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    return token_log_probs(*args, return_entropy=True, **options)


def relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.double() - expected).norm() / expected.norm())


@contextmanager
def many_blocks(*, num_columns: int = 7) -> Iterator[None]:
    """Several tiles and blocks, the last of each kind smaller, at sizes that take no time."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(tiles, "_tile_shape", lambda weight: (16, num_columns)))
        stack.enter_context(patch.object(tiles, "block_shape", lambda weight: (8, num_columns)))
        stack.enter_context(patch.object(tiles, "KEPT_BYTES", 0))
        yield


@dataclass(frozen=True)
class Case:
    """One call of the operator as a policy makes it, over any number of tensor-parallel ranks."""

    positions: str
    """One character each: "." is not scored (prompt, padding), "c" has no gradient (clipped), "a"
    has one (active). As many as a multiple of 4, so that ranks can share them."""
    padded_size: int
    """Rows of the output layer over all ranks, a multiple of 4."""
    vocab_size: int
    """Those that are tokens. The others hold NaN."""
    kind: str = "plain"
    dtype: torch.dtype = torch.float64
    hidden_size: int = 8
    with_entropy: bool = False
    into_main_grad: bool = False
    is_strided: bool = False
    """The hidden states are not contiguous in memory."""
    seed: int = 0

    @property
    def row_index(self) -> torch.Tensor:
        return torch.tensor([i for i, kind in enumerate(self.positions) if kind != "."]).long()

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states of all positions, the whole output layer, labels of all positions."""
        random = torch.Generator().manual_seed(self.seed)
        labels = torch.randint(self.vocab_size, (len(self.positions),), generator=random)
        # The first and last token of every shard of 1, 2 or 4 ranks.
        starts = torch.arange(1, 4) * self.padded_size // 4
        edges = torch.cat([torch.tensor([0]), starts, starts - 1, torch.tensor([self.padded_size])])
        edges = edges.clamp(max=self.vocab_size - 1)
        rows = self.row_index
        labels[rows[: len(edges)]] = edges[: len(rows)]
        hidden, weight, labels = problem(
            len(self.positions),
            self.padded_size,
            kind=self.kind,
            dtype=self.dtype,
            hidden_size=self.hidden_size,
            seed=self.seed,
            labels=labels,
        )
        weight[self.vocab_size :] = torch.nan
        return hidden, weight, labels

    def upstream(self) -> torch.Tensor:
        """[2, R] float64: of log-probs and of entropies."""
        random = torch.Generator().manual_seed(self.seed + 1)
        gradients = torch.randn(2, len(self.row_index), generator=random, dtype=torch.float64)
        gradients[:, [kind == "c" for kind in self.positions if kind != "."]] = 0
        if self.with_entropy:
            gradients[0, ::5] = 0  # active by its entropy alone
        return gradients

    def expected(self) -> Result:
        """From whole logits in float64, of the same inputs."""
        hidden, weight, labels = self.inputs()
        leaves = [t.double().requires_grad_() for t in (hidden, weight[: self.vocab_size])]
        rows = self.row_index
        log_probs, entropy = reference(leaves[0][rows], leaves[1], labels[rows], temperature=0.8)
        outputs = (log_probs, entropy) if self.with_entropy else (log_probs,)
        torch.autograd.backward(outputs, list(self.upstream()[: len(outputs)]))
        whole = torch.zeros(weight.shape, dtype=torch.float64)
        whole[: self.vocab_size] = leaves[1].grad
        names = ("log_probs", "entropy")[: len(outputs)]
        found = dict(zip(names, (output.detach() for output in outputs), strict=True))
        return found | {"hidden": leaves[0].grad, "weight": whole}

    def run(
        self, group: dist.ProcessGroup | None = None, *, sequence_parallel: bool = False
    ) -> Result:
        """Outputs and gradients on this rank: of its own positions and of its own shard."""
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        hidden, weight, labels = self.inputs()
        if sequence_parallel:
            hidden = own_part(hidden, rank, size)
        hidden = hidden.t().contiguous().t() if self.is_strided else hidden.clone()
        weight = own_part(weight, rank, size).clone()
        main_grad = None
        if self.into_main_grad:
            accumulated = torch.promote_types(self.dtype, torch.float32)
            main_grad = torch.full_like(weight, 0.5, dtype=accumulated)
        rows, is_whole = self.row_index, "." not in self.positions
        outputs = token_log_probs(
            hidden.requires_grad_(),
            weight.requires_grad_(),
            labels[rows],
            row_index=None if is_whole else rows,
            temperature=0.8,
            vocab_start=rank * len(weight),
            vocab_size=self.vocab_size,
            tp_group=group,
            sequence_parallel=sequence_parallel,
            main_grad=main_grad,
            return_entropy=self.with_entropy,
        )
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(
            outputs, [g.to(o) for g, o in zip(self.upstream(), outputs, strict=False)]
        )
        grad_weight = weight.grad
        if main_grad is not None:
            assert grad_weight is None
            grad_weight = main_grad - 0.5
        assert hidden.grad is not None and grad_weight is not None
        names = ("log_probs", "entropy")[: len(outputs)]
        found = dict(zip(names, (output.detach() for output in outputs), strict=True))
        return found | {"hidden": hidden.grad, "weight": grad_weight}

    def check(
        self, group: dist.ProcessGroup | None = None, *, sequence_parallel: bool = False
    ) -> None:
        """Raise AssertionError unless this rank's result is that of float64, for float64 inputs."""
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        found, expected = self.run(group, sequence_parallel=sequence_parallel), self.expected()
        expected["weight"] = own_part(expected["weight"], rank, size)
        if sequence_parallel:
            expected["hidden"] = own_part(expected["hidden"], rank, size)
        for name, right in expected.items():
            # float64 throughout: sums of up to 60 terms of order 20, logits of up to 250.
            torch.testing.assert_close(
                found[name], right, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
            )


def own_part(whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    length = len(whole) // size
    return whole[rank * length : (rank + 1) * length]


EDGE_CASES = (
    Case("", padded_size=12, vocab_size=9, with_entropy=True),
    Case("....", padded_size=12, vocab_size=9, into_main_grad=True),  # padding only
    Case("...a", padded_size=8, vocab_size=7),  # one token
    Case("aaaa", padded_size=4, vocab_size=1, with_entropy=True),  # a single one to choose from
    Case("..cccccc", padded_size=8, vocab_size=8, into_main_grad=True),  # nothing active
    # Active rows of one rank only, the last and the first.
    Case("." * 12 + "caaa", padded_size=12, vocab_size=9, with_entropy=True),
    Case("aaac" + "c" * 12, padded_size=12, vocab_size=5, into_main_grad=True),
    # With `many_blocks`: blocks that end where shards of positions end, and one row later.
    Case("a" * 32, padded_size=48, vocab_size=48),
    Case("a" * 36, padded_size=48, vocab_size=30, with_entropy=True, is_strided=True),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any positions and vocabulary, in float64; with `many_blocks` up to 8 blocks."""
    runs = draw(st.lists(st.tuples(st.sampled_from(".ca"), st.integers(1, 30)), max_size=6))
    positions = "".join(kind * length for kind, length in runs)[:60]
    padded_size = 4 * draw(st.integers(1, 12))
    return Case(
        positions=positions + "." * (-len(positions) % 4),
        padded_size=padded_size,
        vocab_size=draw(st.integers(1, padded_size)),
        kind=draw(st.sampled_from(KINDS)),
        with_entropy=draw(st.booleans()),
        into_main_grad=draw(st.booleans()),
        is_strided=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )
