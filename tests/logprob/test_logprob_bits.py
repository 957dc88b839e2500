"""Which bits of the operator do not depend on what else is in the call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gapo_megatron.compat import onednn
from gapo_megatron.logprob import Sequences, tiles, token_log_probs
from tests.logprob_setup import many_blocks, problem

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
LENGTHS = (1, 2, 3, 40, 100, 5, 260, 17, 90)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["MKL", "oneDNN"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "_SMALLEST", 1)
    monkeypatch.setattr(onednn, "_is_faster", lambda: request.param == "oneDNN")


@pytest.mark.usefixtures("threads", "library")
@DTYPES
@pytest.mark.parametrize("num_columns", [50, 2049, 5000])
def test_a_row_keeps_its_bits_whatever_its_neighbours(num_columns: int, dtype: torch.dtype) -> None:
    # Other kinds of CPU than the one at hand have kernels of 4, 6 and 16 rows.
    assert not any(tiles.CPU_ROWS % rows for rows in (4, 6, 16))
    hidden, weight, labels = problem(600, num_columns, dtype=dtype)
    whole = token_log_probs(hidden, weight, labels)
    random = torch.Generator().manual_seed(2)
    for size in (1, 2, 3, 5, 15, 17, 100, 511, 599):
        rows = torch.randperm(600, generator=random)[:size]
        assert torch.equal(token_log_probs(hidden[rows], weight, labels[rows]), whole[rows])
        # The same rows, picked among all positions.
        rows = rows.sort().values
        picked = token_log_probs(hidden, weight, labels[rows], row_index=rows)
        assert torch.equal(picked, whole[rows])


@DTYPES
def test_the_precision_that_a_process_allows_changes_nothing(dtype: torch.dtype) -> None:
    inputs = problem(64, 300, dtype=dtype)
    before = torch.get_float32_matmul_precision()
    results = []
    for precision in ("highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        try:
            leaves = [t.clone().requires_grad_() for t in inputs[:2]]
            log_probs = token_log_probs(*leaves, inputs[2])
            log_probs.sum().backward()
            assert torch.get_float32_matmul_precision() == precision
        finally:
            torch.set_float32_matmul_precision(before)
        results.append([log_probs, *(leaf.grad for leaf in leaves)])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


@pytest.mark.usefixtures("threads")
@DTYPES
@pytest.mark.parametrize("kind", ["plain", "peaked", "offset200"])
def test_a_sequence_keeps_the_bits_of_its_ratio_in_any_packing(
    kind: str, dtype: torch.dtype
) -> None:
    hidden, weight, labels = problem(sum(LENGTHS), 3000, kind=kind, dtype=dtype)
    random = torch.Generator().manual_seed(4)
    old = 0.1 * torch.randn(sum(LENGTHS), generator=random) - 5
    sequence_of = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))

    def log_ratios(sequences: list[int]) -> torch.Tensor:
        rows = torch.cat([(sequence_of == i).nonzero()[:, 0] for i in sequences])
        lengths = torch.tensor([LENGTHS[i] for i in sequences])
        log_probs = token_log_probs(hidden[rows], weight, labels[rows])
        assert isinstance(log_probs, torch.Tensor)
        ids = torch.repeat_interleave(torch.arange(len(sequences)), lengths)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        return Sequences(ids, offsets).log_ratio(log_probs, old[rows])

    together = log_ratios(list(range(len(LENGTHS))))
    for sequences in (*([i] for i in range(len(LENGTHS))), [8, 0, 5], [3, 2, 1, 0], [6, 4]):
        assert torch.equal(log_ratios(sequences), together[sequences]), sequences


@pytest.mark.usefixtures("threads")
@DTYPES
def test_old_and_new_pass_have_the_same_bits(dtype: torch.dtype) -> None:
    """Also with a gradient buffer, an entropy, and rows that are clipped later."""
    hidden, weight, labels = problem(100, 300, dtype=dtype)
    rows = torch.arange(10, 90)
    options = {"row_index": rows, "temperature": 0.6}
    with torch.no_grad():
        old = token_log_probs(hidden, weight, labels[rows], **options)
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    buffer = torch.zeros(weight.shape)
    new = token_log_probs(*leaves, labels[rows], main_grad=buffer, **options)
    with_entropy, _ = token_log_probs(*leaves, labels[rows], return_entropy=True, **options)
    new[::2].sum().backward()
    assert torch.equal(new.detach(), old) and torch.equal(with_entropy.detach(), old)


def test_dw_is_the_same_in_every_call_of_the_same_rows() -> None:
    hidden, weight, labels = problem(100, 30, dtype=torch.bfloat16)
    found = []
    for _ in range(2):
        buffer = torch.zeros(weight.shape)
        leaf = weight.clone().requires_grad_()
        with many_blocks():
            token_log_probs(hidden, leaf, labels, main_grad=buffer).sum().backward()
        found.append(buffer)
    assert found[0].any() and torch.equal(*found)
