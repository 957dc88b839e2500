"""Attention by the fused kernel, as far as no GPU can tell: what it is handed, and what comes back.

`tests/distributed` compares the CPU's path with transformers; on a GPU the last tests here run too.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gapo_megatron.policy import sequences
from gapo_megatron.policy.attention import PackedAttention, _Rotate
from gapo_megatron.policy.rotary import Rotary
from gapo_megatron.policy.sequences import PackedSequences, pack_sequences

NUM_HEADS, NUM_GROUPS, HEAD_DIM = 4, 2, 16
ALONE: Any = SimpleNamespace(size=lambda: 1)
# Lengths: several of every kind; one sequence and padding of one token; no sequence (padding only).
PACKINGS = [(5, 1, 17, 3, 16), (9, 1), (1,)]
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Kernels:
    """Stand-ins of torch's two, which go back from the output and its log-sum-exp; their calls."""

    def __init__(self) -> None:
        self.forward_calls: list[tuple[Any, ...]] = []
        self.backward_calls: list[tuple[Any, ...]] = []
        self.was_deterministic: list[bool] = []

    def scores(
        self, query: Tensor, key: Tensor, bounds: Tensor, scale: float, **window: int
    ) -> Tensor:
        """[N, T, T], of pairs that do not attend minus infinity."""
        assert window in ({}, {"window_size_left": window.get("window_size_left"), **ONLY_LEFT})
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        numbers = torch.arange(len(query))
        starts = torch.bucketize(numbers, bounds[1:], right=True)
        age = numbers[:, None] - numbers
        sees = (starts[:, None] == starts) & (age >= 0)
        sees &= age <= window.get("window_size_left", len(query))
        scores = torch.einsum("tnd,snd->nts", query, key) * scale
        return scores.masked_fill(~sees, -torch.inf)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, scale: float, **window: int
    ) -> Any:
        self.forward_calls.append(args)
        scores = self.scores(query, key, args[0], scale, **window)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        output = torch.einsum("nts,snd->tnd", scores.softmax(-1), value)
        return output, scores.logsumexp(-1), torch.zeros(2), torch.zeros(()), torch.zeros(0)

    def backward(self, grad: Tensor, *args: Any, scale: float, **window: int) -> tuple[Tensor, ...]:
        self.backward_calls.append(args)
        self.was_deterministic.append(torch.are_deterministic_algorithms_enabled())
        query, key, value, output, log_sums, bounds = args[:6]
        repeats = query.shape[1] // key.shape[1]
        shares = (self.scores(query, key, bounds, scale, **window) - log_sums[..., None]).exp()
        of_values = torch.einsum("nts,tnd->snd", shares, grad)
        of_shares = torch.einsum("tnd,snd->nts", grad, value.repeat_interleave(repeats, dim=1))
        lost = (grad * output).sum(-1).T[..., None]
        of_scores = shares * (of_shares - lost) * scale
        of_queries = torch.einsum("nts,snd->tnd", of_scores, key.repeat_interleave(repeats, dim=1))
        of_keys = torch.einsum("nts,tnd->snd", of_scores, query)
        grouped = (x.unflatten(1, (-1, repeats)).sum(2) for x in (of_keys, of_values))
        return of_queries, *grouped


ONLY_LEFT = {"window_size_right": 0}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """As on a GPU in bf16, but in float32."""
    found = Kernels()
    monkeypatch.setattr(sequences, "has_fused_kernel", lambda *_: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", found.forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", found.backward)
    return found


@pytest.mark.parametrize("lengths", PACKINGS, ids=str)
def test_sinks_are_those_of_a_plain_softmax(
    lengths: tuple[int, ...], kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the fused kernel, which has none, and by padded attention: outputs and gradients."""
    given = inputs(sum(lengths))
    attention = layer(sinks=torch.tensor([-1.0, 0.0, 0.5, 3.0]))
    sinks = attention.softmax_offset
    assert sinks is not None
    results = []
    for is_fused in (True, False):
        monkeypatch.setattr(sequences, "has_fused_kernel", lambda *_, fused=is_fused: fused)
        packed = layout(lengths)
        assert (packed.slots is None) == is_fused
        output = attention(*given, None, packed_seq_params=packed)
        weights = torch.linspace(-1, 1, output.numel()).view_as(output)
        results.append([output, *torch.autograd.grad((output * weights).sum(), [*given, sinks])])
    query, key = (_Rotate.apply(x, packed.cos, packed.sin) for x in given[:2])
    bounds = torch.tensor([0, *itertools.accumulate(lengths)])
    scores = kernels.scores(query, key, bounds, HEAD_DIM**-0.5)
    with_sink = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], dim=-1)
    value = given[2].repeat_interleave(NUM_HEADS // NUM_GROUPS, dim=1)
    plain = torch.einsum("nts,snd->tnd", with_sink.softmax(-1)[..., :-1], value).flatten(1)
    expected = [plain, *torch.autograd.grad((plain * weights).sum(), [*given, sinks])]
    for found in results:
        for part, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(part, whole, rtol=1e-5, atol=2e-6)


def layer(window: int = 0, sinks: Tensor | None = None) -> PackedAttention:
    """The second of two layers, of which it alone has a window."""
    config = SimpleNamespace(
        kv_channels=HEAD_DIM,
        window_size=(window - 1, 0) if window else None,
        window_attn_skip_freq=[0, 1],
        softmax_type="vanilla" if sinks is None else "learnable",
        num_attention_heads=NUM_HEADS,
        tensor_model_parallel_size=1,
        params_dtype=torch.float32,
    )
    assert PackedAttention(config, layer_number=1).window == 0
    made = PackedAttention(config, layer_number=2)
    if sinks is not None:
        made.load_state_dict({"softmax_offset": sinks})
    return made


def layout(lengths: tuple[int, ...], device: str = "cpu", **options: Any) -> PackedSequences:
    bounds = [0, *itertools.accumulate(lengths)]
    positions = [position for length in lengths for position in range(length)]
    settings = {"dtype": torch.float32, "cp_group": ALONE} | options
    frequencies = 0.1 ** torch.arange(HEAD_DIM // 2, device=device)
    return pack_sequences(
        torch.tensor(bounds, dtype=torch.int32, device=device),
        max_seqlen=max(lengths),
        position_ids=torch.tensor([positions], device=device),
        rotary=Rotary(frequencies, dtype=settings["dtype"]),
        **settings,
    )


def inputs(num_tokens: int, **options: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (NUM_HEADS, NUM_GROUPS, NUM_GROUPS)
    made = [torch.randn(num_tokens, n, HEAD_DIM, generator=generator) for n in heads]
    return [x.to(**options).requires_grad_() for x in made]


def attend(packed: PackedSequences, given: list[Tensor], window: int = 0) -> list[Tensor]:
    """Output, and the gradients of query, key and value."""
    output = layer(window)(*given, None, packed_seq_params=packed)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output).to(output)
    return [output, *torch.autograd.grad((output * weights).sum(), given)]


@pytest.mark.parametrize("lengths", PACKINGS, ids=str)
def test_the_fused_kernel_is_handed_the_sequences(
    lengths: tuple[int, ...], kernels: Kernels
) -> None:
    packed = layout(lengths)
    assert packed.slots is None and packed.buckets == ()
    given = inputs(sum(lengths))
    found = attend(packed, given)
    ((*bounds, longest, longest_key, dropout, is_causal, debug),) = kernels.forward_calls
    for one in bounds:
        assert one.dtype == torch.int32 and one.tolist() == [0, *itertools.accumulate(lengths)]
    # With 1, torch's C++ lays heads out as positions and splits the keys.
    assert longest == longest_key == max(*lengths, 2)
    assert (dropout, is_causal, debug) == (0.0, True, False)
    (backward,) = kernels.backward_calls
    assert backward[7:11] == (longest, longest, 0.0, True)
    assert [x.shape for x in backward[5:7]] == [bounds[0].shape] * 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequences, "has_fused_kernel", lambda *_: False)
        expected = attend(layout(lengths), given)
    for part, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [1, 4, 16, 17])
@pytest.mark.parametrize("lengths", PACKINGS, ids=str)
def test_a_window_hides_older_keys(lengths: tuple[int, ...], window: int, kernels: Kernels) -> None:
    """Padded attention, the fused kernel, and a plain softmax, one query at a time."""
    given = inputs(sum(lengths))
    fused = attend(layout(lengths, window=window), given, window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequences, "has_fused_kernel", lambda *_: False)
        packed = layout(lengths, window=window)
        padded = attend(packed, given, window)
        assert [mask is None for mask in packed.window_masks] == [
            longest <= window for _, longest in packed.buckets
        ]
        if max(lengths) > window:
            assert not torch.allclose(padded[0], attend(packed, given)[0])
    for part, whole in zip(fused, padded, strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-5, atol=1e-6)
    query, key, value = (x.detach() for x in given)
    query, key = (_Rotate.apply(x, packed.cos, packed.sin) for x in (query, key))
    start = 0
    for length in lengths:
        for i in range(start, start + length):
            seen = slice(max(start, i - window + 1), i + 1)
            k, v = (x[seen].repeat_interleave(NUM_HEADS // NUM_GROUPS, dim=1) for x in (key, value))
            shares = (torch.einsum("nd,tnd->nt", query[i], k) * HEAD_DIM**-0.5).softmax(-1)
            expected = torch.einsum("nt,tnd->nd", shares, v).flatten()
            torch.testing.assert_close(padded[0][i], expected, rtol=1e-5, atol=1e-5)
        start += length


def test_the_rest_of_a_head_is_not_rotated() -> None:
    x = inputs(5)[0]
    size = HEAD_DIM // 2
    angles = torch.outer(torch.arange(5.0), 0.1 ** torch.arange(size // 2))[:, None]
    cos = torch.cat([angles.cos()] * 2, dim=-1)
    sin = torch.cat([-angles.sin(), angles.sin()], dim=-1)
    output = _Rotate.apply(x, cos, sin)
    assert torch.equal(output[..., size:], x[..., size:])
    assert torch.equal(output[..., :size], _Rotate.apply(x[..., :size], cos, sin))
    (back,) = torch.autograd.grad(output.square().sum() / 2, x)
    torch.testing.assert_close(back, x)  # a rotation: its adjoint is its inverse


@pytest.mark.parametrize("before", [(False, False), (True, True)], ids=str)
def test_the_backward_pass_is_deterministic_and_leaves_the_flag(
    before: tuple[bool, bool], kernels: Kernels
) -> None:
    enabled, warns = before
    torch.use_deterministic_algorithms(enabled, warn_only=warns)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    try:
        attend(layout((3, 2)), inputs(5))
        assert kernels.was_deterministic == [True]
        assert torch.are_deterministic_algorithms_enabled() == enabled
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warns
        assert torch.utils.deterministic.fill_uninitialized_memory == fills
    finally:
        torch.use_deterministic_algorithms(False)


def test_torch_takes_these_arguments_and_nothing_is_read_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sequences, "has_fused_kernel", lambda *_: True)
    # On this device whatever asks for a value fails.
    packed = layout((4, 3), device="meta", dtype=torch.bfloat16)
    given = inputs(7, device="meta", dtype=torch.bfloat16)
    output, *gradients = attend(packed, given)
    assert (output.shape, output.dtype) == ((7, NUM_HEADS * HEAD_DIM), torch.bfloat16)
    assert [x.shape for x in gradients] == [x.shape for x in given]


@pytest.mark.parametrize(
    ("device", "dtype", "is_fused"),
    [
        ("cuda", torch.bfloat16, True),
        ("cuda", torch.float32, False),
        ("cpu", torch.bfloat16, False),
    ],
)
def test_where_the_fused_kernel_serves(device: str, dtype: torch.dtype, is_fused: bool) -> None:
    assert sequences.has_fused_kernel(torch.device(device), dtype) == is_fused


def test_fp32_on_a_gpu_gets_a_head_of_keys_for_each_of_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda *args, **kw: seen.append((args, kw)) or real(*args, **kw),
    )
    for device in ("cuda", "cpu"):
        with FakeTensorMode():
            heads = (NUM_HEADS, NUM_GROUPS, NUM_GROUPS)
            q, k, v = (torch.empty(2, n, 5, HEAD_DIM, device=device) for n in heads)
            output = layer()._attend(q, k, v, is_causal=True)
        assert output.shape == q.shape
    ((on_cuda, cuda_options), (on_cpu, cpu_options)) = seen
    assert [x.shape[1] for x in on_cuda] == [NUM_HEADS] * 3 and not cuda_options["enable_gqa"]
    assert [x.shape[1] for x in on_cpu] == [NUM_HEADS, NUM_GROUPS, NUM_GROUPS]
    assert cpu_options["enable_gqa"]


@pytest.mark.parametrize("lengths", [*PACKINGS, (700, 1, 64, 129, 2048)], ids=str)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_on_a_gpu_bits_repeat_and_values_agree(lengths: tuple[int, ...], device: str) -> None:
    packed = layout(lengths, device, dtype=torch.bfloat16)
    given = inputs(sum(lengths), device=device, dtype=torch.bfloat16)
    first, again = attend(packed, given), attend(packed, given)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    # Sequence by sequence the same forward bits: a row does not depend on what it is packed with.
    start = 0
    for length in lengths:
        rows = slice(start, start := start + length)
        alone = layer()(
            *(x[rows] for x in given),
            None,
            packed_seq_params=layout((length,), device, dtype=torch.bfloat16),
        )
        assert torch.equal(alone, first[0][rows])
    exact = attend(layout(lengths), [x.detach().cpu().float().requires_grad_() for x in given])
    for part, whole in zip(first, exact, strict=True):
        # bf16 keeps 8 bits of inputs, probabilities and results.
        assert (part.cpu().float() - whole).norm() <= 2e-2 * whole.norm()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_on_a_gpu_fp32_agrees(device: str) -> None:
    lengths = PACKINGS[0]
    found = attend(layout(lengths, device), inputs(sum(lengths), device=device))
    exact = attend(layout(lengths), inputs(sum(lengths)))
    for part, whole in zip(found, exact, strict=True):
        assert (part.cpu() - whole).norm() <= 1e-3 * whole.norm()  # TF32 of the second product
