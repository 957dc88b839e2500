"""The host never waits for the device within a pass: as often at four micro-batches as at two."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gapo_megatron.clock import Stopwatch
from gapo_megatron.compat import cpu
from gapo_megatron.exchange import GroupChannel
from gapo_megatron.learn import step as learn_module
from gapo_megatron.learn.checks.carry import carry
from gapo_megatron.learn.plan import DataParallelRanks
from gapo_megatron.learn.score import log_probs
from gapo_megatron.learn.step import learn
from gapo_megatron.learn.update import UpdateResult, update
from gapo_megatron.models.tables import geometry_of
from gapo_megatron.policy import destroy
from gapo_megatron.rollouts import Batch, Rollouts
from gapo_megatron.types import Minibatch, Plan
from tests.dist import run_distributed
from tests.distributed import conversion_setup
from tests.distributed.policy_setup import (
    CP,
    EP,
    PP,
    SP,
    TP,
    VPP,
    WeightedLoss,
    load_policy,
    make_batch,
    make_config,
    save_model,
)
from tests.synchronisations import Waits, counted_waits, ours

LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "sequence": {TP: 2, SP: True},
    "context": {CP: 2},
    "pipeline": {PP: 2},
    "virtual stages": {PP: 2, VPP: 2},
    "experts": {EP: 2},
}
QUICK = ("sequence", "pipeline")
OBJECTIVES: dict[str, dict[str, Any]] = {
    "gapo": {},
    "token ratio": {"method": "dapo"},
    "bounded weight": {"method": "cispo"},
    "all terms": {"kl_coef": 0.1, "entropy_coef": 0.1, "importance_weight_max": 2.0},
}
FEW, MANY = 2, 4
"""Micro-batches of each data parallel rank and mini-batch."""
NUM_SEQUENCES, GROUP_SIZE = 20, 4

Counts = dict[tuple[str, int], Waits]
"""Counts of a stage with this number of micro-batches."""


def batch_with_advantages() -> Batch:
    index = torch.arange(NUM_SEQUENCES)
    correct = index % 2
    batch = make_batch(NUM_SEQUENCES, vocab_size=conversion_setup.VOCAB_SIZE)
    return replace(
        batch.changed(sample=index % GROUP_SIZE),
        advantages=correct.double() - 0.5,
        num_correct=torch.full((NUM_SEQUENCES,), 2),
        group_size=torch.full((NUM_SEQUENCES,), GROUP_SIZE),
    )


def plan_of(batch: Batch, *, num_minibatches: int, num_microbatches: int, dp_size: int) -> Plan:
    """The last micro-batch of the last rank is empty."""
    minibatches = []
    for share in np.array_split(np.arange(len(batch)), num_minibatches):
        parts = [tuple(part.tolist()) for part in np.array_split(share, num_microbatches * dp_size)]
        parts[-2:] = [parts[-2] + parts[-1], ()]
        ranks = [
            tuple(parts[i * num_microbatches : (i + 1) * num_microbatches]) for i in range(dp_size)
        ]
        num_tokens = int(batch.num_sampled_tokens[share].sum())
        minibatches.append(Minibatch(tuple(ranks), num_tokens, len(share)))
    return Plan(tuple(minibatches))


@contextmanager
def counted_updates() -> Iterator[list[Waits]]:
    """Synchronisations of each update of `learn`."""
    counts: list[Waits] = []

    def counted(*args: Any, **options: Any) -> UpdateResult:
        with counted_waits() as waits:
            result = update(*args, **options)
        counts.append(waits)
        return result

    with patch.object(learn_module, "update", counted):
        yield counts


def count(folder: Path, **sections: dict[str, Any]) -> Counts:
    """Every stage that runs micro-batches, on this rank."""
    config = make_config(folder, **{"optimizer": {"learning_rate": 1e-3}, **sections})
    policy = load_policy(config)
    batch = batch_with_advantages()

    def learn_once(planned: Batch) -> None:
        learn(policy, planned, config.objective, config.rollout, Stopwatch())

    counts: Counts = {}
    for number in (FEW, MANY):
        planned = functools.partial(
            plan_of, batch, num_microbatches=number, dp_size=policy.groups.dp_size
        )
        one, two = planned(num_minibatches=1), planned(num_minibatches=2)
        mine = one.minibatches[0].microbatches[policy.groups.dp_rank]
        # Packing is the host's: what it reads is its own, which a CPU cannot tell.
        packed = {
            indices: policy.pack(batch, indices)
            for minibatch in (*one.minibatches, *two.minibatches)
            for indices in minibatch.microbatches[policy.groups.dp_rank]
        }
        with patch.object(policy, "pack", lambda _, indices, packed=packed: packed[indices]):
            with counted_waits() as counts["log_probs", number]:
                log_probs(policy, [packed[indices] for indices in mine])
            with counted_waits() as counts["learn", number], counted_updates() as updates:
                learn_once(replace(batch, plan=one))
            (counts["update", number],) = updates
            # The first moves the weights, so that the second may find clipped sequences.
            with counted_updates() as updates:
                learn_once(replace(batch, plan=two))
            _, counts["second update", number] = updates
    destroy()
    return counts


def count_layouts(folder: Path, experts: Path, layouts: Sequence[str]) -> dict[str, Counts]:
    return {
        layout: count(experts if layout == "experts" else folder, parallel=LAYOUTS[layout])
        for layout in layouts
    }


def count_objectives(folder: Path) -> dict[str, Counts]:
    return {name: count(folder, objective=settings) for name, settings in OBJECTIVES.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    save_model(path, "qwen2_untied", num_layers=4)
    return path


def per_microbatch(counts: Counts, stage: str) -> Waits:
    """Synchronisations of a stage that grow with the number of micro-batches."""
    few, many = counts[stage, FEW], counts[stage, MANY]
    assert not few - many  # nothing is waited for less often
    return many - few


def check(counts: Counts, *, where: str, asks: bool) -> None:
    for stage in ("log_probs", "learn", "update"):
        assert per_microbatch(counts, stage) == Counter(), (where, stage)
    # Once for each micro-batch, and nothing else, where the clip may have left nothing to learn.
    more = per_microbatch(counts, "second update")
    assert sum(more.values()) == (MANY - FEW if asks else 0), (where, more)
    assert all("update.py" in call for call in more), (where, more)


@pytest.mark.parametrize(
    "layouts",
    [QUICK, pytest.param([*LAYOUTS.keys() - set(QUICK)], marks=pytest.mark.system)],
    ids=["quick", "others"],
)
def test_no_layout_waits_for_a_micro_batch(
    folder: Path, tmp_path: Path, layouts: Sequence[str]
) -> None:
    if "experts" in layouts:
        conversion_setup.save_model(tmp_path, "qwen3_moe")
    for rank, found in enumerate(run_distributed(count_layouts, 2, folder, tmp_path, layouts)):
        for layout, counts in found.items():
            is_last_stage = rank == 1 or not layout.startswith(("pipeline", "virtual"))
            if layout == "experts":  # Megatron-core asks each layer how many tokens go where
                counts = {stage: ours(waits) for stage, waits in counts.items()}
            check(counts, where=f"{layout}, rank {rank}", asks=is_last_stage)


def test_no_objective_waits_for_a_micro_batch(folder: Path) -> None:
    (objectives,) = run_distributed(count_objectives, 1, folder)
    for name, counts in objectives.items():
        check(counts, where=name, asks=name in ("gapo", "token ratio"))
        # Ours, once an update: whether all was finite, and what the loss reported.
        assert sorted(ours(counts["update", MANY]).values()) == [1, 1], name


def count_architectures(folder: Path) -> dict[str, Waits]:
    """Synchronisations of each architecture's updates that grow with their micro-batches."""
    more = {}
    for name in conversion_setup.ARCHITECTURES:
        conversion_setup.save_model(folder / name, name, num_hidden_layers=2)
        policy = load_policy(make_config(folder / name))
        batch = make_batch(2 * MANY, vocab_size=conversion_setup.VOCAB_SIZE)
        packed = [policy.pack(batch, (i, i + MANY)) for i in range(MANY)]
        counts = []
        for number in (FEW, MANY):
            with counted_waits() as waits:
                update(policy, packed[:number], WeightedLoss(batch, packed))
            counts.append(waits)
        more[name] = counts[1] - counts[0]
        destroy()
    return more


def test_no_architecture_waits_for_a_micro_batch(tmp_path: Path) -> None:
    """Forward and backward passes: of all parts, Megatron-core's experts alone wait."""
    (more,) = run_distributed(count_architectures, 1, tmp_path)
    assert set(more) == set(conversion_setup.ARCHITECTURES)
    of_experts = re.compile(r"megatron/(token_dispatcher|moe_utils|experts|router)\.py")
    for name, waits in more.items():
        assert [call for call in waits if not of_experts.search(call)] == [], name
        assert bool(waits) == bool(geometry_of(conversion_setup.hf_config(name)).num_experts), name


def count_carry(folder: Path) -> list[Waits]:
    random = np.random.default_rng(0)
    config = make_config(
        folder,
        data={"max_prompt_tokens": 2},
        rollout={"max_response_tokens": 20},
        batch={"max_tokens_per_microbatch": 24},
    )
    policy = load_policy(config)
    counts = []
    for number in (FEW, MANY):  # each response fills a micro-batch
        responses = [random.integers(0, 90, 20).astype(np.int32) for _ in range(number)]
        log_probs = [np.zeros(20, np.float32)] * number
        opened = Rollouts.of([np.array([1, 2], np.int32)] * number, responses, log_probs)
        channel = GroupChannel(dist.group.WORLD)
        with counted_waits() as waits:
            carry(
                policy,
                opened,
                max_tokens_per_microbatch=config.batch.max_tokens_per_microbatch,
                ranks=DataParallelRanks((0,), (0,)),
                channel=channel,
            )
        counts.append(waits)
    destroy()
    return counts


def test_carrying_waits_once(folder: Path) -> None:
    ((few, many),) = run_distributed(count_carry, 1, folder)
    assert few["cpu at gapo_megatron/device.py:to_host"] == 1
    # `plan` looks at lengths, on the host.
    assert {call for call in many - few if "plan.py" not in call} == set()


WAITS = {
    "x.sum().item()": 1,
    "x.tolist()": 1,
    "x.to(device='cpu')": 1,
    "torch.tensor([1, 2], device='cpu')": 1,
    "x[x > 0]": 1,
    "x.repeat_interleave(torch.tensor([1, 2, 3]))": 1,
    "torch.equal(x, x)": 1,
    "torch.autograd.grad(Reads.apply(y), y)": 1,
    "cuda.cuda.synchronize()": 1,
    "x.to('cpu', non_blocking=True)": 0,
    "x[x > 0] = 0": 0,
    "x.repeat_interleave(2)": 0,
}


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        exec(compile("grad.sum().item()", "gapo_megatron/example.py", "exec"))
        return grad


@pytest.mark.parametrize("call", WAITS)
def test_the_count_sees_what_would_wait(call: str) -> None:
    names = {
        "torch": torch,
        "cuda": cpu._TORCH,
        "x": torch.tensor([1.0, 2.0, 3.0]),
        "y": torch.ones((), requires_grad=True),
        "Reads": Reads,
    }
    with counted_waits() as waits:
        exec(compile(call, "gapo_megatron/example.py", "exec"), names)
    assert sum(waits.values()) == WAITS[call], waits
