"""Which code serves which device: decided in one place, without a GPU at hand."""

from __future__ import annotations

import errno
import logging
import re
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from triton.compiler.errors import CompilationError

from gapo_megatron.logprob import implementation, tiles, triton_kernels
from gapo_megatron.logprob.implementation import _choose, choose_implementation, choose_together
from gapo_megatron.logprob.self_check import find_fault, find_reduction_fault
from tests.dist import run_distributed
from tests.messages import mentions

HOPPER, AMPERE = (9, 0), (8, 0)
CPU = torch.device("cpu")


def chosen(*arguments: Any) -> Any:
    """The module of what `_choose` says."""
    return implementation._load(_choose(*arguments))


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "name", "expected"),
    [
        ("cpu", torch.bfloat16, None, "auto", tiles),
        ("cuda", torch.bfloat16, HOPPER, "auto", triton_kernels),
        ("cuda", torch.float16, HOPPER, "auto", triton_kernels),
        ("cuda", torch.bfloat16, HOPPER, "torch", tiles),
        ("cuda", torch.bfloat16, HOPPER, "triton", triton_kernels),
        ("cuda", torch.float32, HOPPER, "auto", tiles),
        ("cuda", torch.float64, HOPPER, "auto", tiles),
        ("cuda", torch.bfloat16, AMPERE, "auto", tiles),
        ("cuda", torch.float16, AMPERE, "auto", tiles),
        ("cuda", torch.bfloat16, (12, 0), "auto", tiles),
        ("cuda", torch.bfloat16, None, "auto", tiles),  # not NVIDIA
    ],
)
def test_code_by_device(
    device: str,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    name: implementation.Name,
    expected: object,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(implementation, "find_fault", lambda *_: "")
    monkeypatch.setattr(implementation, "find_reduction_fault", lambda *_: "")
    _choose.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert chosen(device, dtype, capability, name) is expected
    word = "triton" if expected is triton_kernels else "torch"
    (record,) = caplog.records
    assert re.search(mentions(dtype, device, word), record.getMessage())


@pytest.mark.parametrize("capability", [None, AMPERE])
def test_kernels_are_refused_where_they_do_not_serve(capability: tuple[int, int] | None) -> None:
    with pytest.raises(ValueError, match=mentions("triton", "compute capability 9")):
        _choose("cuda", torch.bfloat16, capability, "triton")
    with pytest.raises(ValueError, match=mentions("triton", torch.float32, "cpu")):
        choose_implementation(torch.device("cpu"), torch.float32, "triton")


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """`auto` as on a Hopper GPU; "code" is what it finds for Triton's kernels, on the CPU here."""
    found: dict[str, Any] = {"code": tiles}
    load = implementation._load
    monkeypatch.setattr(
        implementation, "_load", lambda name: found["code"] if name == "triton" else load(name)
    )
    monkeypatch.setattr(
        implementation, "find_fault", lambda code, _, dtype: find_fault(code, CPU, dtype)
    )
    monkeypatch.setattr(
        implementation, "find_reduction_fault", lambda *_: find_reduction_fault("torch", CPU)
    )
    _choose.cache_clear()
    return found


def wrong(name: str, change: Callable[[Any], Any]) -> Any:
    """An implementation with one function that is made wrong."""
    functions = {"softmax_stats": tiles.softmax_stats, "grad_logits": tiles.grad_logits}
    right = functions[name]
    changed = {name: lambda *args, **options: change(right(*args, **options))}
    return SimpleNamespace(**(functions | changed))


def test_auto_takes_kernels_that_agree_with_float64(
    on_a_gpu: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    kernels = on_a_gpu["code"] = wrong("softmax_stats", lambda stats: stats)
    with caplog.at_level(logging.INFO):
        assert chosen("cuda", torch.bfloat16, HOPPER, "auto") is kernels
    assert re.search(mentions("triton", "float64"), caplog.records[-1].getMessage())


@pytest.mark.parametrize(
    ("name", "change", "what"),
    [
        ("softmax_stats", lambda stats: stats * 1.001, "log-prob"),
        ("softmax_stats", lambda stats: stats.bfloat16().float(), "log-prob"),
        ("softmax_stats", lambda stats: torch.cat([stats[:3], 1.01 * stats[3:]]), "entropy"),
        ("softmax_stats", lambda stats: stats * torch.nan, "log-prob"),
        ("grad_logits", lambda found: (found[0].roll(1, 1), found[1]), "dz"),
        ("grad_logits", lambda found: (found[0], 0 * found[1]), "row sums"),
        ("grad_logits", lambda found: (found[0] + 0.1 * torch.rand([]), found[1]), "bits"),
    ],
)
def test_auto_leaves_kernels_that_are_wrong(
    name: str,
    change: Callable[[Any], Any],
    what: str,
    on_a_gpu: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    on_a_gpu["code"] = wrong(name, change)
    assert chosen("cuda", torch.bfloat16, HOPPER, "auto") is tiles
    (warning,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert what in warning.getMessage()


@pytest.mark.parametrize("where", ["temperature 1", "another temperature", "tiles without labels"])
def test_auto_leaves_kernels_that_are_wrong_on_one_of_their_ways(
    where: str, on_a_gpu: dict[str, Any]
) -> None:
    """Branches of the Triton kernels: the check takes both sides."""

    def grad_logits(
        hidden: torch.Tensor, weight: torch.Tensor, columns: torch.Tensor, **options: Any
    ) -> Any:
        dz, lost = tiles.grad_logits(hidden, weight, columns, **options)
        if where == "tiles without labels":
            tile = slice(256, 384), slice(1536, 1792)
            has_label = ((columns >= 1536) & (columns < 1792))[tile[0]].any()
            if not has_label and options["grad_log_probs"][tile[0]].all():
                dz[tile] *= 2
        elif (options["inverse_temperature"] == 1) == (where == "temperature 1"):
            dz *= 2
        return dz, lost

    on_a_gpu["code"] = SimpleNamespace(softmax_stats=tiles.softmax_stats, grad_logits=grad_logits)
    assert chosen("cuda", torch.bfloat16, HOPPER, "auto") is tiles


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("no C compiler"),
        CompilationError("", None),
        subprocess.CalledProcessError(1, "gcc"),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
)
def test_auto_leaves_kernels_that_do_not_compile(
    error: Exception, on_a_gpu: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: Any) -> Any:
        raise error

    on_a_gpu["code"] = wrong("softmax_stats", fails)
    assert chosen("cuda", torch.bfloat16, HOPPER, "auto") is tiles
    assert type(error).__name__ in caplog.text


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), torch.AcceleratorError("lost")])
def test_what_is_wrong_with_the_device_is_not_the_kernels_fault(
    error: Exception, on_a_gpu: dict[str, Any]
) -> None:
    def fails(_: Any) -> Any:
        raise error

    on_a_gpu["code"] = wrong("softmax_stats", fails)
    with pytest.raises(type(error), match=str(error)):
        _choose("cuda", torch.bfloat16, HOPPER, "auto")


def choose_where_one_may_fail(failing: int | None) -> tuple[str, list[str]]:
    """What this rank takes, and what it warns of, if the kernels are wrong on rank `failing`."""
    fault = "off by a mile" if dist.get_rank() == failing else ""
    records: list[str] = []
    with (
        patch.object(implementation, "_capability", lambda _: HOPPER),
        patch.object(implementation, "find_fault", lambda *_: fault),
        patch.object(implementation, "find_reduction_fault", lambda *_: ""),
        patch.object(implementation.logger, "warning", lambda *words: records.append(str(words))),
    ):
        return choose_together(CPU, torch.bfloat16, "auto"), records


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_ranks_take_the_same_code(failing: int | None) -> None:
    ranks = run_distributed(choose_where_one_may_fail, 2, failing)
    assert [code for code, _ in ranks] == ["triton" if failing is None else "torch"] * 2
    for rank, (_, warnings) in enumerate(ranks):
        word = "mile" if rank == failing else f"{failing}"
        assert [word in warning for warning in warnings] == [True] * (failing is not None)
