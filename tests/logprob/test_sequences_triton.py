"""The Triton kernels of `Sequences` beside torch; run where those of the tiles are."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gapo_megatron.logprob import Sequences, self_check, triton_sequences
from tests.triton_setup import DEVICE, INTERPRETED, on_kernels
from tests.waiting import HANG_S

# None, one, one less than a block, one more, several blocks.
LENGTHS = (5, 0, 1, triton_sequences.BLOCK - 1, triton_sequences.BLOCK + 1, 2500)


@pytest.mark.skipif(INTERPRETED, reason="is that process")
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels have no compiler")
@pytest.mark.parametrize("is_in_order", [True, False])
@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("name", ["_reduce_kernel", "_spread_kernel"])
def test_compiles_for_hopper(
    name: str,
    is_in_order: bool,
    is_aligned: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Needs no GPU. The interpreter accepts what the compiler does not.

    Triton compiles a kernel anew for pointers to multiples of 16 bytes.
    """
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    kernel = getattr(triton_sequences, name)
    types = {"offsets": "*i64", "order": "*i64", "width": "i32", "total": "*fp64", "grad": "*fp64"}
    constants = {"MEAN": is_in_order, "BLOCK": triton_sequences.BLOCK}
    constants |= {"order": None} if is_in_order else {"minus": None}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "*fp32")
        for argument in kernel.arg_names
    }
    pointers = [i for i, argument in enumerate(signature) if signature[argument][0] == "*"]
    hints = {(i,): [["tt.divisibility", 16]] for i in pointers} if is_aligned else {}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, hints),
        target=GPUTarget("cuda", 90, 32),
        options=triton_sequences.OPTIONS,
    )
    # Rows lie in the same lanes, and are added in the same order, in each variant.
    layouts = set(re.findall(r"sizePerThread = \[(\d+)\]", compiled.asm["ttgir"]))
    assert layouts == {"1"}
    ptx = compiled.asm["ptx"]
    # No order that depends on who comes first; a mean that is rounded as on the host.
    assert not re.search(r"\b(atom|red)\.", ptx)
    assert ("div.rn.f64" in ptx) == is_in_order
    assert ("add.rn.f64" in ptx or "add.f64" in ptx) == (name == "_reduce_kernel")


def sequences(lengths: tuple[int, ...], *, mixed: bool = False) -> tuple[Sequences, Sequences]:
    """As the kernels get them, and for torch on the CPU."""
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    if mixed:
        ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))]
    plain = Sequences.of(ids, len(lengths))
    order = plain.order.to(DEVICE) if mixed and plain.order is not None else None
    there = Sequences(ids.to(DEVICE), plain.offsets.to(DEVICE), order, implementation="triton")
    return there, plain


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@on_kernels
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("mixed", [True, False])
def test_log_ratio_and_gradient_are_torchs(mixed: bool, mean: bool) -> None:
    there, plain = sequences(LENGTHS, mixed=mixed)
    new, old = random(2, sum(LENGTHS))
    upstream = random(len(LENGTHS)).double()
    results = []
    for given in (there, plain):
        device = given.ids.device
        leaf = new.to(device).clone().requires_grad_()
        found = given.log_ratio(leaf, old.to(device), mean=mean)
        found.backward(upstream.to(device))
        results.append((found.detach().cpu(), leaf.grad.cpu()))
    (found, gradient), (expected, expected_gradient) = results
    # Sums of 2500 numbers of order one; another order of additions.
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=0)
    assert torch.equal(gradient, expected_gradient)  # nothing is summed


@on_kernels
def test_a_sequence_keeps_its_bits_whatever_its_neighbours() -> None:
    # Of 53 bits each, so that another order of additions shows.
    values = torch.rand(2, sum(LENGTHS), dtype=torch.float64, generator=torch.Generator())
    new, old = values.log().to(DEVICE)
    together = sequences(LENGTHS)[0].log_ratio(new, old)
    begin = 0
    for i, length in enumerate(LENGTHS):
        rows = slice(begin, begin + length)
        if length:
            alone, _ = sequences((length,))
            assert torch.equal(alone.log_ratio(new[rows], old[rows]), together[i : i + 1])
        begin += length
    assert torch.equal(sequences(LENGTHS)[0].log_ratio(new, new), torch.zeros_like(together))


@on_kernels
def test_float64_and_several_columns() -> None:
    there, plain = sequences((3, 0, 1500), mixed=True)
    values = random(1503, 5).double() + torch.tensor([0.0, 1e8, 0.0, 0.0, -1e8])
    found = there.sum(values.to(DEVICE)).cpu()
    torch.testing.assert_close(found, plain.sum(values), rtol=1e-12, atol=1e-11)
    with_float32 = there.sum(torch.tensor([1e8, 1.0, -1e8]).repeat(501).to(DEVICE))
    assert with_float32.sum().item() == 501


@on_kernels
def test_the_self_check_finds_no_fault() -> None:
    assert self_check.find_reduction_fault("triton", torch.device(DEVICE)) == ""
