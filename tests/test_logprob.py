"""The operator against float64 on the same inputs, and what it must not do."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gapo_megatron.errors import DivergenceError
from gapo_megatron.logprob import segment_mean, sequence_log_ratio, tiles, token_log_probs

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

# Absolute error of a log-prob and of an entropy, relative L2 error of dX and dW. bfloat16 inputs
# are exact in float32, so the first two are errors of float32 sums alone. The gradient of the
# logits is rounded to bfloat16, and so are the results (each 1.7e-3 of the norm).
BOUNDS = {
    torch.bfloat16: (5e-5, 1e-4, 4e-3, 4e-3),
    torch.float32: (1e-5, 1e-5, 1e-5, 1e-5),
    torch.float64: (1e-12, 1e-12, 1e-12, 1e-12),
}


def problem(
    num_rows: int,
    num_columns: int,
    *,
    kind: str = "plain",
    dtype: torch.dtype = torch.float32,
    hidden_size: int = 64,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, output layer and labels; `kind` shapes the logits."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, hidden_size, generator=random)
    weight = torch.randn(num_columns, hidden_size, generator=random) / hidden_size**0.5
    labels = torch.randint(num_columns, (num_rows,), generator=random)
    if kind == "peaked":  # largest logits about 25, labels anywhere between certain and impossible
        hidden = weight[labels] * 13 + 3 * hidden
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


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles, the last of each kind smaller, at sizes that take no time."""
    monkeypatch.setattr(tiles, "_tile_shape", lambda weight: (48, 40))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("kind", ["plain", "peaked", "offset200", "offset-200"])
def test_values_and_gradients_agree_with_float64(
    kind: str, dtype: torch.dtype, device: str
) -> None:
    # 5003 columns: three tiles on a CPU, none of them whole; 700 rows: two blocks.
    inputs = problem(700, 5003, kind=kind, dtype=dtype, device=device)
    ours = with_gradients(both, *inputs, temperature=0.7)
    expected = with_gradients(reference, *inputs, temperature=0.7, dtype=torch.float64)
    log_prob, entropy, grad_hidden, grad_weight = BOUNDS[dtype]
    if dtype == torch.float32 and kind.startswith("offset"):
        log_prob = entropy = 5e-5  # logits of 200 / 0.7 have a last bit of 3e-5
    assert [t.dtype for t in ours] == [torch.promote_types(dtype, torch.float32)] * 2 + [dtype] * 2
    assert (ours[0] - expected[0]).abs().max() <= log_prob
    assert (ours[1] - expected[1]).abs().max() <= entropy
    assert relative(ours[2], expected[2]) <= grad_hidden
    assert relative(ours[3], expected[3]) <= grad_weight


@given(
    num_rows=st.integers(1, 100),
    num_columns=st.integers(2, 130),
    padding=st.integers(0, 50),
    temperature=st.sampled_from([0.6, 1.0, 1.7]),
    seed=st.integers(0, 99),
)
def test_any_shape_agrees_with_float64(
    num_rows: int, num_columns: int, padding: int, temperature: float, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_tile_shape", lambda weight: (48, 40))
        hidden, weight, labels = problem(
            num_rows, num_columns + padding, dtype=torch.float64, hidden_size=8, seed=seed
        )
        options = {"temperature": temperature, "vocab_size": num_columns}
        inputs = (hidden, weight, labels % num_columns)
        ours = with_gradients(both, *inputs, **options)
        expected = with_gradients(reference, *inputs, **options)
    for value, right in zip(ours, expected, strict=True):
        # float64 throughout; sums of up to 100 x 130 terms of order 1.
        assert torch.allclose(value, right, rtol=1e-10, atol=1e-11)


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


@pytest.mark.usefixtures("small_tiles")
def test_gradients_agree_with_finite_differences() -> None:
    hidden, weight, labels = problem(5, 90, dtype=torch.float64, hidden_size=3)
    leaves = (hidden.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(
        lambda h, w: both(h, w, labels, temperature=0.8, vocab_size=85), leaves
    )


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


@pytest.mark.parametrize("which", [0, 1])
def test_only_the_gradient_that_is_needed_is_computed(which: int) -> None:
    hidden, weight, labels = problem(20, 30)
    whole = with_gradients(both, hidden, weight, labels)[2 + which]
    leaves = [hidden, weight]
    leaves[which].requires_grad_()
    gradient = torch.randn(20, generator=torch.Generator().manual_seed(1))
    gradient[::3] = 0
    token_log_probs(*leaves, labels).backward(gradient)
    assert leaves[1 - which].grad is None
    assert leaves[which].grad is not None and leaves[which].grad.shape == whole.shape


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

    def recording(x: torch.Tensor, w: torch.Tensor, inverse_temperature: float) -> torch.Tensor:
        shapes.append((len(x), len(w)))
        return compute(x, w, inverse_temperature)

    monkeypatch.setattr(tiles, "_logits", recording)
    yield shapes


def test_rows_without_gradient_are_skipped(recorded_tiles: list[tuple[int, int]]) -> None:
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
        assert sum(x for x, _ in recorded_tiles) == len(rows) + len(kept)  # forward + backward
    (all_hidden, all_weight), (kept_hidden, kept_weight) = grads
    assert torch.equal(all_weight, kept_weight)
    assert torch.equal(all_hidden[kept], kept_hidden)
    assert all_hidden.count_nonzero() == kept_hidden.count_nonzero()


def test_without_any_gradient_the_backward_computes_nothing(
    recorded_tiles: list[tuple[int, int]],
) -> None:
    hidden, weight, labels = problem(20, 50)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    (token_log_probs(*leaves, labels) * 0.0).sum().backward()
    assert len(recorded_tiles) == 1  # the forward's
    assert leaves[0].grad is not None and not leaves[0].grad.any()
    assert leaves[1].grad is not None and not leaves[1].grad.any()


def test_logits_exist_one_tile_at_a_time(recorded_tiles: list[tuple[int, int]]) -> None:
    with_gradients(both, *problem(3000, 9000, hidden_size=4))
    assert len(recorded_tiles) > 10
    assert max(x * w for x, w in recorded_tiles) <= 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_rows(dtype: torch.dtype) -> None:
    inputs = problem(0, 30, dtype=dtype)
    log_probs, entropy, grad_hidden, grad_weight = with_gradients(both, *inputs)
    assert log_probs.shape == entropy.shape == (0,)
    assert grad_hidden.shape == (0, 64)
    assert grad_weight.shape == (30, 64) and not grad_weight.any()


def test_inputs_are_left_as_they_were() -> None:
    inputs = problem(50, 70)
    before = [t.clone() for t in inputs]
    leaves = [t.requires_grad_() for t in inputs[:2]]
    upstream = torch.randn(50)
    upstream_before = upstream.clone()
    log_probs, entropy = both(*leaves, inputs[2], temperature=0.5)
    kept = log_probs.detach().clone(), entropy.detach().clone()
    torch.autograd.backward([log_probs, entropy], [upstream, upstream])
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert torch.equal(upstream, upstream_before)
    assert torch.equal(log_probs, kept[0]) and torch.equal(entropy, kept[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_columns", [50, 2049, 5000])
def test_a_row_keeps_its_bits_whatever_its_neighbours(num_columns: int, dtype: torch.dtype) -> None:
    hidden, weight, labels = problem(600, num_columns, dtype=dtype)
    whole = token_log_probs(hidden, weight, labels)
    random = torch.Generator().manual_seed(2)
    for size in (1, 2, 3, 5, 15, 17, 100, 511, 599):
        rows = torch.randperm(600, generator=random)[:size]
        assert torch.equal(token_log_probs(hidden[rows], weight, labels[rows]), whole[rows])


def test_a_gradient_of_hidden_keeps_its_bits_whatever_its_neighbours() -> None:
    inputs = problem(200, 300)
    hidden, weight, labels = inputs
    upstream = torch.randn(200, generator=torch.Generator().manual_seed(3))
    grads = []
    for rows in (slice(None), slice(7, 9)):
        leaf = hidden[rows].clone().requires_grad_()
        token_log_probs(leaf, weight, labels[rows]).backward(upstream[rows])
        grads.append(leaf.grad)
    assert torch.equal(grads[0][7:9], grads[1])


def test_with_and_without_autograd_the_bits_are_the_same() -> None:
    hidden, weight, labels = problem(100, 300, dtype=torch.bfloat16)
    with torch.no_grad():
        old = token_log_probs(hidden, weight, labels, temperature=0.6)
    new = token_log_probs(hidden.requires_grad_(), weight, labels, temperature=0.6)
    assert torch.equal((new.double() - old.double()).exp(), torch.ones(100, dtype=torch.float64))


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(4)}, r"hidden \(4,\)"),
        ({"hidden": torch.zeros(4, 8, dtype=torch.float16)}, r"hidden .*float16"),
        ({"weight": torch.zeros(6, 9)}, r"weight \(6, 9\).*\[V_local, 8\]"),
        ({"weight": torch.zeros(6, 8, dtype=torch.bfloat16)}, r"weight .*bfloat16.*float32"),
        ({"hidden": torch.zeros(4, 0), "weight": torch.zeros(6, 0)}, r"hidden \(4, 0\).*H > 0"),
        ({"weight": torch.zeros(0, 8)}, r"weight has no row"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"labels \(3\).*row \(4\)"),
        ({"labels": torch.zeros(4, 1, dtype=torch.int64)}, r"labels \(4, 1\)"),
        ({"row_index": torch.arange(3)}, r"row_index \(3,\).*\[4\]"),
        ({"row_index": torch.arange(4).int()}, r"row_index .*int32"),
        ({"row_index": torch.tensor([0, 2, 1, 3])}, r"row_index\[2\] \(1\) must be above"),
        ({"row_index": torch.tensor([0, 1, 1, 3])}, r"row_index\[2\] \(1\) must be above"),
        ({"row_index": torch.tensor([0, 1, 2, 4])}, r"row_index\[3\] \(4\).*0\.\.3"),
        ({"row_index": torch.tensor([-1, 1, 2, 3])}, r"row_index\[0\] \(-1\)"),
        ({"main_grad": torch.zeros(6, 8).bfloat16()}, r"main_grad .*bfloat16 .*float32"),
        ({"main_grad": torch.zeros(5, 8)}, r"main_grad \(5, 8\).*\(6, 8\)"),
        ({"implementation": "triton"}, r"implementation \('triton'\) needs bfloat16 .*cpu"),
        ({"labels": torch.zeros(4, dtype=torch.int32)}, r"labels .*int32"),
        ({"labels": torch.tensor([0, 1, 6, 2])}, r"labels\[2\] \(6\) must be in 0\.\.5"),
        ({"labels": torch.tensor([0, -100, 1, 2])}, r"labels\[1\] \(-100\)"),
        ({"labels": torch.tensor([0, 1, 2, 5]), "vocab_size": 5}, r"labels\[3\] \(5\).*0\.\.4"),
        ({"temperature": 0.0}, r"temperature \(0\.0\)"),
        ({"temperature": float("nan")}, r"temperature \(nan\)"),
        ({"vocab_start": 6}, r"vocab_start \(6\)"),
        ({"vocab_size": 7}, r"vocab_size \(7\) must be in 1\.\.6"),
        ({"vocab_size": 0}, r"vocab_size \(0\)"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    arguments = {
        "hidden": torch.zeros(4, 8),
        "weight": torch.zeros(6, 8),
        "labels": torch.zeros(4, dtype=torch.int64),
    } | change
    with pytest.raises(ValueError, match=message):
        token_log_probs(**arguments)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("return_entropy", [False, True])
def test_values_that_are_not_finite_are_named(value: float, return_entropy: bool) -> None:
    hidden, weight, labels = problem(9, 12)
    bad_hidden, bad_weight = hidden.clone(), weight.clone()
    bad_hidden[5, 3] = value
    bad_weight[7, 3] = value
    with pytest.raises(DivergenceError, match=r"row 5 .*hidden\[5\] is not finite"):
        token_log_probs(bad_hidden, weight, labels, return_entropy=return_entropy)
    with pytest.raises(DivergenceError, match="weight row of token 7 is not finite"):
        token_log_probs(hidden, bad_weight, labels, return_entropy=return_entropy)
    with pytest.raises(DivergenceError, match="overflow"):
        token_log_probs(hidden * 1e30, weight * 1e30, labels, return_entropy=return_entropy)


def test_sequence_log_ratio_is_the_mean_over_the_sequence() -> None:
    hidden, weight, labels = problem(900, 3000, kind="peaked", dtype=torch.bfloat16)
    sequence_ids = torch.tensor([0] * 300 + [2] * 599 + [3])  # sequence 1 has no tokens
    counts = torch.tensor([300, 0, 599, 1])
    moved = (hidden.float() + 0.01).bfloat16()
    old = token_log_probs(moved, weight, labels).requires_grad_()
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    log_ratio, log_probs = sequence_log_ratio(
        *leaves,
        labels,
        old,
        sequence_ids=sequence_ids,
        num_sequences=4,
        num_response_tokens=counts,
    )
    with torch.no_grad():
        difference = reference(hidden, weight, labels)[0] - reference(moved, weight, labels)[0]
    expected = [difference[:300].mean(), 0.0, difference[300:899].mean(), difference[899]]
    assert not log_probs.requires_grad
    # The bound the clip widths need (1e-5): errors of a token average out over a sequence.
    means = log_ratio.detach()
    assert means.tolist()[:3] == pytest.approx([float(d) for d in expected[:3]], abs=1e-5)
    assert float(means[3]) == pytest.approx(float(expected[3]), abs=5e-5)  # a single token
    log_ratio[0].backward()
    assert hidden.grad is not None and old.grad is None
    assert hidden.grad[:300].any() and not hidden.grad[300:].any()


def test_sequence_log_ratio_at_equal_weights_is_exactly_zero() -> None:
    hidden, weight, labels = problem(40, 90, dtype=torch.bfloat16)
    log_ratio, _ = sequence_log_ratio(
        hidden,
        weight,
        labels,
        token_log_probs(hidden, weight, labels),
        sequence_ids=torch.arange(40) % 3,
        num_sequences=3,
        num_response_tokens=torch.tensor([14, 13, 13]),
    )
    assert torch.equal(log_ratio, torch.zeros(3, dtype=torch.float64))


def test_sequence_log_ratio_names_bad_old_log_probs() -> None:
    hidden, weight, labels = problem(4, 9)
    ids = torch.zeros(4, dtype=torch.int64)
    options = {
        "sequence_ids": ids,
        "num_sequences": 1,
        "num_response_tokens": torch.tensor([4]),
    }
    old = torch.zeros(4)
    with pytest.raises(ValueError, match=r"old_log_probs \(3,\)"):
        sequence_log_ratio(hidden, weight, labels, old[:3], **options)
    old[2] = -torch.inf
    with pytest.raises(DivergenceError, match=r"old_log_probs\[2\]"):
        sequence_log_ratio(hidden, weight, labels, old, **options)


def test_segment_mean_by_hand() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 10.0], requires_grad=True)
    ids, counts = torch.tensor([0, 2, 0, 2]), torch.tensor([2, 0, 4])
    means = segment_mean(values, ids, 3, counts)
    assert means.dtype == torch.float64
    assert means.tolist() == [2.0, 0.0, 3.0]
    means.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0.25, 0.5, 0.25]
