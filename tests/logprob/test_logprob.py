"""The operator against float64 on the same inputs, and what it must not do."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gapo_megatron.logprob import Sequences, tiles, token_log_probs
from tests.logprob_setup import (
    BOUNDS,
    EDGE_CASES,
    KINDS,
    Case,
    both,
    cases,
    many_blocks,
    problem,
    reference,
    relative,
    with_gradients,
)

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles, the last of each kind smaller, at sizes that take no time."""
    monkeypatch.setattr(tiles, "_tile_shape", lambda weight: (48, 40))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_agree_with_float64(
    kind: str, dtype: torch.dtype, device: str
) -> None:
    # 5003 columns: three tiles on a CPU, none of them whole; 700 rows: two tiles.
    inputs = problem(700, 5003, kind=kind, dtype=dtype, device=device)
    ours = with_gradients(both, *inputs, temperature=0.7)
    expected = with_gradients(reference, *inputs, temperature=0.7, dtype=torch.float64)
    log_prob, entropy, grad_hidden, grad_weight = BOUNDS[dtype]
    if dtype == torch.float32 and kind.startswith("offset"):
        log_prob = entropy = 5e-5  # logits of 200 / 0.7 have a last bit of 3e-5
    if dtype == torch.float32 and kind == "peaked":
        log_prob = 3e-5  # logits up to 80 have a last bit of 8e-6, and two of them are subtracted
    assert [t.dtype for t in ours] == [torch.promote_types(dtype, torch.float32)] * 2 + [dtype] * 2
    assert (ours[0] - expected[0]).abs().max() <= log_prob
    assert (ours[1] - expected[1]).abs().max() <= entropy
    assert relative(ours[2], expected[2]) <= grad_hidden
    assert relative(ours[3], expected[3]) <= grad_weight


@pytest.mark.parametrize("case", EDGE_CASES, ids=lambda case: case.positions or "nothing")
def test_edges_agree_with_float64(case: Case) -> None:
    with many_blocks():
        case.check()


@given(case=cases())
def test_any_case_agrees_with_float64(case: Case) -> None:
    with many_blocks():
        case.check()


@pytest.mark.usefixtures("small_tiles")
def test_a_common_offset_costs_nothing_beyond_the_logits_own_rounding() -> None:
    random = torch.Generator().manual_seed(0)
    # Multiples of 1/4, and of 1/16 in the logits: exact in float32 even beside 4096.
    hidden, weight = (torch.randint(-8, 9, (n, 8), generator=random) / 4 for n in (50, 100))
    labels = torch.arange(50)
    for offset in (-4096.0, 4096.0):
        hidden[:, 0], weight[:, 0] = 0.0, 0.0
        plain = both(hidden, weight, labels)
        hidden[:, 0], weight[:, 0] = 1.0, offset
        for value, expected in zip(both(hidden, weight, labels), plain, strict=True):
            assert torch.equal(value, expected)


@pytest.mark.parametrize("output", [0, 1])
def test_a_gradient_may_arrive_for_one_output_only(output: int) -> None:
    inputs = problem(20, 30, dtype=torch.float64)
    grads = []
    for function in (both, reference):
        leaves = [t.clone().requires_grad_() for t in inputs[:2]]
        # .sum() sends an expanded gradient: one element, stride 0.
        function(*leaves, inputs[2])[output].sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for ours, expected in zip(*grads, strict=True):
        assert torch.allclose(ours, expected, rtol=1e-10, atol=1e-11)


def test_padded_columns_take_no_part() -> None:
    hidden, weight, labels = problem(20, 40)
    weight[33:] = torch.nan
    labels %= 33
    ours = with_gradients(both, hidden, weight, labels, vocab_size=33)
    cut = with_gradients(both, hidden, weight[:33], labels)
    assert all(torch.equal(a, b) for a, b in zip(ours[:3], cut[:3], strict=True))
    assert torch.equal(ours[3][:33], cut[3])
    assert not ours[3][33:].any()


@pytest.fixture
def recorded_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Shapes of all logits computed."""
    shapes: list[tuple[int, int]] = []
    compute = tiles._logits

    def recording(x: torch.Tensor, w: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        shapes.append((len(x), len(w)))
        return compute(x, w, *args, **options)

    monkeypatch.setattr(tiles, "_logits", recording)
    yield shapes


def test_rows_without_gradient_are_skipped(
    recorded_tiles: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "KEPT_BYTES", 0)
    hidden, weight, labels = problem(320, 50, dtype=torch.float64)
    kept = torch.arange(0, 320, 10)  # 32 rows
    grads = []
    for rows in (torch.arange(320), kept):
        leaves = hidden[rows].requires_grad_(), weight.clone().requires_grad_()
        recorded_tiles.clear()
        upstream = torch.zeros(320, dtype=torch.float64)
        upstream[kept] = 1.0
        token_log_probs(*leaves, labels[rows]).backward(upstream[rows])
        grads.append((leaves[0].grad, leaves[1].grad))
        forward = math.ceil(len(rows) / tiles.CPU_ROWS) * [(tiles.CPU_ROWS, 50)]
        assert recorded_tiles == [*forward, (len(kept), 50)]
    (all_hidden, all_weight), (kept_hidden, kept_weight) = grads
    assert torch.equal(all_weight, kept_weight)
    assert torch.equal(all_hidden[kept], kept_hidden)
    assert all_hidden.count_nonzero() == kept_hidden.count_nonzero()


def test_logits_exist_one_tile_at_a_time(recorded_tiles: list[tuple[int, int]]) -> None:
    with_gradients(both, *problem(3000, 9000, hidden_size=4))
    assert len(recorded_tiles) > 10
    assert max(x * w for x, w in recorded_tiles) <= 2**20


@given(
    edges=st.lists(st.integers(0, 60), min_size=1, max_size=4).map(sorted),
    seed=st.integers(0, 50),
)
def test_statistics_of_any_shards_merge_to_the_whole(edges: list[int], seed: int) -> None:
    hidden, weight, labels = problem(7, 60, dtype=torch.float64, hidden_size=8, seed=seed)
    labels[:4] = torch.tensor([0, 59, edges[0] % 60, (edges[0] - 1) % 60])
    options = {"inverse_temperature": 1.0, "with_entropy": True}
    whole = tiles.softmax_stats(hidden, weight, labels, **options)
    bounds = [0, *edges, 60]  # repeated edges make empty shards
    merged = None
    for start, stop in itertools.pairwise(bounds):
        stats = tiles.softmax_stats(hidden, weight[start:stop], labels - start, **options)
        merged = stats if merged is None else tiles.merge_stats(merged, stats)
    assert merged is not None and merged.isfinite().all()
    assert torch.allclose(merged, whole, rtol=1e-12, atol=1e-12)


def test_the_log_ratio_of_a_sequence_is_as_exact_as_its_clip_is_narrow() -> None:
    hidden, weight, labels = problem(900, 3000, kind="peaked", dtype=torch.bfloat16)
    sequence_ids = torch.tensor([0] * 300 + [2] * 599 + [3])  # sequence 1 has no tokens
    moved = (hidden.float() + 0.01).bfloat16()
    log_probs = token_log_probs(hidden, weight, labels)
    old = token_log_probs(moved, weight, labels)
    assert isinstance(log_probs, torch.Tensor) and isinstance(old, torch.Tensor)
    means = Sequences.of(sequence_ids, 4).log_ratio(log_probs, old)
    difference = reference(hidden, weight, labels)[0] - reference(moved, weight, labels)[0]
    expected = [difference[:300].mean(), 0.0, difference[300:899].mean(), difference[899]]
    # The bound the clip widths need (1e-5): errors of a token average out over a sequence.
    assert means.tolist()[:3] == pytest.approx([float(d) for d in expected[:3]], abs=1e-5)
    assert float(means[3]) == pytest.approx(float(expected[3]), abs=5e-5)  # a single token
