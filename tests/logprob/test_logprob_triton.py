"""The Triton implementation of the log-prob operator against float64.

Triton decides at its first import whether kernels are compiled or interpreted, and that may have
happened before this file is read. So the tests of the kernels run on a GPU here, and on a CPU in a
process of their own, which `test_in_the_interpreter` starts on this same file.
"""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.head_instructions import count, disassemble
from gapo_megatron.logprob import operator, self_check, triton_kernels
from gapo_megatron.logprob.tiles import MAXIMUM, SUM_EXP, TARGET
from gapo_megatron.logprob.triton_kernels import softmax_stats
from tests import logprob_setup
from tests.messages import mentions
from tests.triton_setup import (
    DEVICE,
    DTYPES,
    INTERPRETED,
    INVERSE_TEMPERATURE,
    KINDS,
    NUM_COLUMNS,
    NUM_ROWS,
    TILE,
    bound,
    compile_for_hopper,
    gradient,
    log_prob_and_entropy,
    logits,
    on_kernels,
    problem,
    reference_gradient,
    reference_stats,
    run_stats,
    upstream_gradients,
)
from tests.waiting import HANG_S


@pytest.mark.skipif(INTERPRETED, reason="is that process")
@pytest.mark.parametrize(
    "selected",
    [
        "statistics_agree and plain or gradient_agrees and plain or the_operator and peaked "
        "or self_check",
        pytest.param("", marks=pytest.mark.system),
    ],
    ids=["some", "every"],
)
def test_in_the_interpreter(selected: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        [*command, "-k", selected],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        # One thread: its products are smaller than what starting a second one costs.
        env={**os.environ, "TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"},
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels have no compiler")
@pytest.mark.parametrize("with_entropy", [False, pytest.param(True, marks=pytest.mark.system)])
@pytest.mark.parametrize("name", ["_stats_kernel", "_grad_kernel"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_compiles_for_hopper(
    dtype: str,
    name: str,
    with_entropy: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Needs no GPU. The interpreter accepts what the compiler does not."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(triton.knobs.nvidia, "dump_ptxas_log", True)
    compiled = compile_for_hopper(name, dtype, with_entropy=with_entropy)
    assert compiled.metadata.shared <= 227 * 1024  # what a block may have on compute capability 9
    ptx = compiled.asm["ptx"]
    # Hopper's matrix and copy units; float32 arithmetic that no fused product rounds differently.
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert not re.search(r"fma\.\w+\.f32", ptx)
    # Neither matrix instructions one after the other (C7515 and its like), nor values in memory for
    # want of registers.
    said = capsys.readouterr().out
    assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", said), said
    assert not re.search(r"\(C\d+\)", said), said
    # What few tiles need is behind branches, and nothing is rounded one by one: a thread has 128
    # numbers of a tile (benchmarks/RESULTS.md; without the branches 17.8 and 24.5, entropy 21.9 and
    # 30.4).
    _, least, _ = count(disassemble(compiled))
    per_number = {"_stats_kernel": (10.5, 13.6), "_grad_kernel": (17, 20.6)}[name][with_entropy]
    assert least.total() <= 128 * per_number, least
    assert not least["F2F"], least


@on_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_agree_with_float64(kind: str, dtype: torch.dtype) -> None:
    inputs = problem(kind=kind, dtype=dtype)
    stats = run_stats(*inputs)
    expected = reference_stats(*inputs)
    assert stats.shape == (4, NUM_ROWS)
    assert stats.dtype == torch.float32
    assert (stats[MAXIMUM] - expected[MAXIMUM]).abs().max() <= bound(kind)
    difference = log_prob_and_entropy(stats) - log_prob_and_entropy(expected)
    assert difference.abs().max() <= bound(kind)


@on_kernels
def test_labels_at_edges_of_tiles_and_shares_and_outside() -> None:
    starts = range(0, NUM_COLUMNS, TILE)
    edges = [*starts, *(start - 1 for start in starts[1:]), NUM_COLUMNS - 1]
    # 2**32 is column 0 in 32 bits. The columns after the last one are those its tile pads with.
    outside = [-1, NUM_COLUMNS, NUM_COLUMNS + 1, -NUM_COLUMNS, 2**32, -(2**32)]
    hidden, weight, _ = problem(len(edges + outside))
    columns = torch.tensor(edges + outside, device=DEVICE)
    target = run_stats(hidden, weight, columns)[TARGET]
    z = logits(hidden, weight) * INVERSE_TEMPERATURE
    for row, column in enumerate(edges):
        assert abs(target[row] - z[row, column]) <= 1e-5
    assert torch.equal(target[len(edges) :], torch.zeros(len(outside), device=DEVICE))


@on_kernels
@settings(max_examples=12)
@given(
    num_rows=st.integers(1, 40),
    num_columns=st.integers(1, 300),
    hidden_size=st.integers(1, 10),
    temperature=st.sampled_from([0.6, 1.0, 1.7]),
    with_entropy=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape_agrees_with_float64(
    num_rows: int,
    num_columns: int,
    hidden_size: int,
    temperature: float,
    with_entropy: bool,
    seed: int,
) -> None:
    inputs = problem(num_rows, num_columns, hidden_size=4 * hidden_size, seed=seed)
    options = {"inverse_temperature": 1 / temperature}
    stats = softmax_stats(*inputs, with_entropy=with_entropy, **options)
    expected = reference_stats(*inputs, **options)[: 3 + with_entropy]
    torch.testing.assert_close(stats.double(), expected, rtol=1e-5, atol=1e-5)
    upstream = upstream_gradients(num_rows, with_entropy=with_entropy)
    dz, lost = gradient(*inputs, stats, upstream, **options)
    expected_dz = reference_gradient(*inputs, upstream, **options)
    assert lost is None
    torch.testing.assert_close(dz.double(), expected_dz, rtol=1e-5, atol=1e-5)


@on_kernels
@pytest.mark.parametrize("shape", [(0, 40), (3, 0), (0, 0)], ids=str)
def test_no_rows_or_no_columns_are_empty_statistics(shape: tuple[int, int]) -> None:
    num_rows, num_columns = shape
    hidden = torch.randn(num_rows, 8, device=DEVICE)
    weight = torch.randn(num_columns, 8, device=DEVICE)
    columns = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)
    stats = run_stats(hidden, weight, columns)
    expected = torch.tensor([-torch.inf, 0, 0, 0], device=DEVICE)
    assert torch.equal(stats, expected[:, None].expand(4, num_rows))


@on_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_whatever_its_neighbours(dtype: torch.dtype) -> None:
    # Several blocks of rows, so that a row changes block and neighbours.
    total = 5 * (16 if INTERPRETED else 128) + 3
    hidden, weight, columns = problem(total, TILE * 8 + 5, dtype=dtype)
    if INTERPRETED:
        # Products are then BLAS's, which on some CPUs sums a row by its place in the block; with
        # these numbers every order of summation is exact, so what is left is the kernel's own.
        hidden, weight = (8 * hidden).round() / 8, (8 * weight).round() / 8
    upstream = upstream_gradients(total, with_entropy=True)

    def bits_of(rows: torch.Tensor, hidden: torch.Tensor = hidden) -> list[torch.Tensor]:
        stats = run_stats(hidden[rows], weight, columns[rows])
        dz, lost = gradient(hidden[rows], weight, columns[rows], stats, upstream[:, rows])
        return [*stats, dz] + ([] if lost is None else [lost])

    everything = bits_of(torch.arange(total))
    random = torch.Generator().manual_seed(0)
    for num_rows in (1, 5, 16, 40, total):
        rows = torch.randperm(total, generator=random)[:num_rows]
        for part, whole in zip(bits_of(rows), everything, strict=True):
            assert torch.equal(part, whole[rows])

    spoilt = hidden.clone()
    spoilt[1::2] = torch.nan
    for part, whole in zip(bits_of(torch.arange(total), spoilt), everything, strict=True):
        assert torch.equal(part[::2], whole[::2])


@on_kernels
@pytest.mark.parametrize("with_entropy", [False, True], ids=["log-prob", "entropy"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["plain", "peaked", "offset-200"])
def test_gradient_agrees_with_float64(kind: str, dtype: torch.dtype, with_entropy: bool) -> None:
    hidden, weight, columns = problem(kind=kind, dtype=dtype)
    stats = run_stats(hidden, weight, columns)
    upstream = upstream_gradients(NUM_ROWS, with_entropy=with_entropy)
    expected = reference_gradient(hidden, weight, columns, upstream)
    # Two tiles: the labels of either lie outside of the other one.
    for start, stop in itertools.pairwise([0, TILE * 3 + 7, NUM_COLUMNS]):
        dz, lost = gradient(hidden, weight[start:stop], columns - start, stats, upstream)
        assert dz.dtype == dtype
        assert dz.shape == (NUM_ROWS, stop - start)
        assert torch.equal(dz[::3], torch.zeros_like(dz[::3]))
        error = (dz - expected[:, start:stop]).abs()
        # Float32, of numbers up to 1 / 0.7 times some 4 (entropy: times 10), and one rounding.
        exact = 10 * bound(kind)
        rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
        underflow = torch.finfo(dtype).smallest_normal
        assert (error <= exact + underflow + rounding * expected[:, start:stop].abs()).all()
        if dtype == torch.float32:
            assert lost is None
            continue
        assert lost is not None
        taken = (expected[:, start:stop] - dz.double()).sum(1)
        assert (lost - taken).abs().max() <= exact


@on_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_both_passes_see_the_same_logits(kind: str) -> None:
    """At the largest logit exp(z - m) is 1 only if z and m have the same bits."""
    hidden, weight, _ = problem(kind=kind)
    elsewhere = torch.full((NUM_ROWS,), -1, device=DEVICE)
    stats = run_stats(hidden, weight, elsewhere)
    dz, _ = gradient(hidden, weight, elsewhere, stats, torch.ones(1, NUM_ROWS, device=DEVICE))
    largest_p = stats[SUM_EXP].reciprocal()
    assert torch.equal(-dz.amin(1), largest_p * INVERSE_TEMPERATURE)


@on_kernels
@pytest.mark.parametrize("with_entropy", [False, True], ids=["log-prob", "entropy"])
def test_rows_without_gradient_are_zero_whatever_they_hold(with_entropy: bool) -> None:
    hidden, weight, columns = problem(num_columns=TILE + 5, dtype=torch.float16)
    stats = run_stats(hidden, weight, columns)
    upstream = upstream_gradients(NUM_ROWS, with_entropy=with_entropy)
    expected = gradient(hidden, weight, columns, stats, upstream)
    for statistic, value in itertools.product([MAXIMUM, SUM_EXP], [0, torch.inf, -torch.inf]):
        stats[statistic, ::3] = value
        hidden[::3] = 0
        found = gradient(hidden, weight, columns, stats, upstream)
        for part, whole in zip(found, expected, strict=True):
            assert part is not None
            assert whole is not None
            assert torch.equal(part[::3], torch.zeros_like(part[::3]))
            assert torch.equal(part, whole)


@on_kernels
def test_hidden_states_and_values_by_row_may_be_strided() -> None:
    hidden, weight, columns = problem(num_columns=TILE + 5)
    stats = run_stats(hidden, weight, columns)
    upstream = upstream_gradients(NUM_ROWS, with_entropy=True)
    expected = gradient(hidden, weight, columns, stats, upstream)

    def strided(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(2, dim=-1)[..., ::2]

    hidden = hidden.T.contiguous().T
    assert torch.equal(run_stats(hidden, weight, strided(columns)), stats)
    found = gradient(hidden, weight, strided(columns), strided(stats), strided(upstream))
    assert torch.equal(found[0], expected[0])


@on_kernels
def test_groups_of_row_blocks_that_are_not_full() -> None:
    block = triton_kernels._tile(torch.empty(1, 4, device=DEVICE)).rows
    num_rows = (triton_kernels.ROW_BLOCKS_PER_GROUP + 1) * block + 3
    inputs = problem(num_rows, TILE + 4, hidden_size=4)
    stats = run_stats(*inputs)
    upstream = upstream_gradients(num_rows, with_entropy=False)
    dz, _ = gradient(*inputs, stats, upstream)
    assert (dz - reference_gradient(*inputs, upstream)).abs().max() <= 1e-5


@on_kernels
def test_logits_of_minus_infinity_take_no_part() -> None:
    hidden, weight, _ = problem()
    hidden[:, 0] = hidden[:, 0].abs() + 0.1
    impossible = torch.zeros(NUM_COLUMNS, dtype=torch.bool, device=DEVICE)
    impossible[: 3 * TILE] = True  # whole tiles at the start of a share
    impossible[4 * TILE + 1 : 6 * TILE : 2] = True
    weight[impossible] = 0
    weight[impossible, 0] = -torch.inf
    columns = (~impossible).nonzero()[:NUM_ROWS, 0]
    stats = run_stats(hidden, weight, columns)
    among_possible = torch.arange(len(columns), device=DEVICE)
    possible = reference_stats(hidden, weight[~impossible], among_possible)
    torch.testing.assert_close(stats.double(), possible, rtol=1e-5, atol=1e-5)
    dz, _ = gradient(hidden, weight, columns, stats, torch.ones(2, NUM_ROWS, device=DEVICE))
    assert dz.isfinite().all()
    assert not dz[:, impossible].any()

    nothing = run_stats(hidden, weight[: 3 * TILE], columns)
    assert torch.equal(nothing[MAXIMUM], torch.full_like(nothing[MAXIMUM], -torch.inf))
    assert not nothing[SUM_EXP:].any()


@on_kernels
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_bad_row_does_not_look_finite(value: float) -> None:
    hidden, weight, columns = problem()
    hidden[7, 3] = value
    assert not run_stats(hidden, weight, columns)[SUM_EXP, 7].isfinite()


@on_kernels
def test_rows_must_start_at_16_bytes() -> None:
    hidden, weight, columns = problem(40, 10, hidden_size=44)
    with pytest.raises(ValueError, match=mentions("hidden:", "16 bytes", "(40, 42)")):
        run_stats(hidden[:, 2:], weight[:, 2:], columns)
    with pytest.raises(ValueError, match=mentions("weight:", "16 bytes")):
        run_stats(hidden, weight.T.contiguous().T, columns)


@on_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["peaked", "offset200"])
def test_the_operator_on_these_kernels(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 16 bits: dz and the results are rounded. Without what rounding takes from the sums of dz, dX
    # would be off by several times as much.
    rounding = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}[dtype]
    monkeypatch.setattr(operator, "choose_implementation", lambda *_: triton_kernels)
    # Several blocks of rows and tiles of the vocabulary, whose edges are not the kernels'.
    monkeypatch.setattr(triton_kernels, "block_shape", lambda weight: (12, 3 * TILE + 8))
    hidden, weight, labels = problem(kind=kind, dtype=dtype)
    options = {"temperature": 0.7, "vocab_size": NUM_COLUMNS - 3}
    inputs = (hidden, weight, labels.clamp(max=NUM_COLUMNS - 4))
    found = logprob_setup.with_gradients(logprob_setup.both, *inputs, **options)
    expected = logprob_setup.with_gradients(
        logprob_setup.reference, *inputs, **options, dtype=torch.float64
    )
    for part, whole in zip(found, expected, strict=True):
        assert logprob_setup.relative(part, whole) <= max(rounding, bound(kind))


@on_kernels
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_self_check_finds_no_fault(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:  # whose blocks are smaller, and which takes its time
        for name, size in {"NUM_ROWS": 32, "NUM_COLUMNS": 176, "HIDDEN_SIZE": 32}.items():
            monkeypatch.setattr(self_check, name, size)
        monkeypatch.setattr(triton_kernels, "MAX_SPLITS", 2)  # three tiles each
    assert self_check.find_fault(triton_kernels, torch.device(DEVICE), dtype) == ""
