"""Parts: what an update computes."""

from __future__ import annotations

import dataclasses
import gc
import math
import random
import time
from collections.abc import Sequence

from torch import Tensor

from gapo_megatron.batching import unpack
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import Config
from gapo_megatron.learn.plan import plan_step
from gapo_megatron.learn.score import log_probs
from gapo_megatron.learn.step import learn
from gapo_megatron.learn.update import update
from gapo_megatron.policy import Policy
from gapo_megatron.policy.loss_scale import INITIAL
from gapo_megatron.rollouts import Batch
from gapo_megatron.run.supervised import _supervised_step
from gapo_megatron.types import Microbatch, Plan
from tests.gpu.report import Report
from tests.gpu.setting import MeanLogProb, Setting

_TWO_MINIBATCHES = {"rollout_prompts": 4, "minibatch_prompts": 2}


def equal_bits(setting: Setting, report: Report) -> None:
    """Log-probs of the old pass are those of the update, bit for bit, however they are packed."""
    config = setting.config()
    policy = setting.policy(config)
    batch = setting.batch(config, num_prompts=2)
    order = list(range(len(batch)))
    random.Random(0).shuffle(order)
    packings = {
        "one sequence each": [[i] for i in order],
        "two together": [order[i : i + 2] for i in range(0, len(order), 2)],
        "all together": [order] if setting.tiny else [order[:4], order[4:8], order[8:]],
        "with an empty one": [order[:1], [], *([i] for i in order[1:])],
    }
    by_packing = {}
    for name, indices in packings.items():
        packed = [policy.pack(batch, one) for one in indices]
        old = log_probs(policy, packed)
        loss = MeanLogProb(sum(len(one.labels) for one in packed))
        by_packing[name] = unpack(batch, indices, old)
        # So small a step that the weights stay where they are: packings can be compared.
        result = update(policy, packed, loss, learning_rate=0.0)
        pairs = zip(old, loss.seen, strict=True)
        differing = sum(int((a != b).sum()) for a, b in pairs if a is not None)
        report.claim(f"{name}: rows that differ", differing, "none", holds=differing == 0)
        report.claim(
            f"{name}: gradient norm",
            result.grad_norm,
            "finite, not 0",
            holds=math.isfinite(result.grad_norm) and result.grad_norm > 0,
        )
    first = by_packing["one sequence each"]
    for name, values in by_packing.items():
        largest = max(float((values[i] - first[i]).abs().max()) for i in first)
        report.figure(f"{name}: largest difference from one sequence each", largest)


def nothing_to_score(setting: Setting, report: Report) -> None:
    """An empty micro-batch beside others changes nothing, by a sequence and a token method."""
    configs = {
        method: setting.config(
            objective={"method": method, "entropy_coef": 0.001},
            batch={"rollout_prompts": 2, "minibatch_prompts": 2},
        )
        for method in ("gapo", "grpo")
    }
    policy = setting.policy(configs["gapo"])
    weights = _copies(policy)
    for method, config in configs.items():
        batch = setting.batch(config, num_prompts=2)
        whole = _plan(policy, batch, config)
        with_empty = dataclasses.replace(
            whole,
            minibatches=tuple(
                dataclasses.replace(
                    one, microbatches=tuple((*rank, ()) for rank in one.microbatches)
                )
                for one in whole.minibatches
            ),
        )
        metrics = []
        for packing in (whole, with_empty):
            policy.load_hf_weights(weights)
            planned = dataclasses.replace(batch, plan=packing)
            metrics.append(_learn(policy, planned, config, Stopwatch()))
        without, with_one = (found["optim/grad_norm"] for found in metrics)
        report.claim(
            f"{method}: gradient norm with and without",
            with_one,
            f"equals {without:.6g} to 1e-3",
            holds=abs(with_one - without) <= 1e-3 * without,
        )
        bad = [name for name, value in metrics[1].items() if not math.isfinite(value)]
        report.claim(f"{method}: metrics not finite", bad, "none", holds=not bad)


def ten_sft_steps(setting: Setting, report: Report) -> None:
    """Supervised steps on the same few sequences: the loss falls."""
    config = setting.config()
    policy = setting.policy(config)
    batch = setting.batch(config, num_prompts=1)
    losses = []
    start = time.perf_counter()
    for _ in range(10):
        losses.append(
            _supervised_step(
                policy,
                batch,
                max_tokens_per_microbatch=config.batch.max_tokens_per_microbatch,
                learning_rate=1e-3 if setting.tiny else 1e-5,
            )
        )
    seconds = time.perf_counter() - start
    falls = losses[-1] < losses[0]
    report.claim("loss, last", losses[-1], f"below the first, {losses[0]:.4g}", holds=falls)
    report.figure("seconds a step, ten", seconds / 10, "s")


def ten_learn_steps(setting: Setting, report: Report) -> None:
    """GAPO with two mini-batches a step, on random responses and verdicts."""
    config = setting.config(optimizer={"learning_rate": 1e-6}, batch=_TWO_MINIBATCHES)
    policy = setting.policy(config)
    stopwatch, metrics = Stopwatch(), {}
    num_tokens = 0
    start = time.perf_counter()
    for step in range(10):
        batch = setting.batch(config, num_prompts=4, seed=step)
        packing = _plan(policy, batch, config)
        planned = dataclasses.replace(batch, plan=packing)
        metrics = _learn(policy, planned, config, stopwatch)
        num_tokens += packing.num_tokens_computed
        policy.make_room()
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        report.claim(f"step {step}: metrics not finite", bad, "none", holds=not bad)
    seconds = time.perf_counter() - start
    updates = policy.num_updates
    report.claim("updates", updates, "20", holds=updates == 20)
    report.figure("tokens/s, learning alone", num_tokens / seconds, "tokens/s")
    for name in ("optim/grad_norm", "skip/backward_token_share"):
        report.figure(f"{name}, last step", metrics[name])


def fp16(setting: Setting, report: Report) -> None:
    """Log-probs in fp16 and in bf16 beside those in fp32, at the same weights; updates in fp16."""
    weights: Sequence[tuple[str, Tensor]] = []
    found: dict[str, Tensor] = {}
    length = setting.tokens(1024)
    for precision in ("bf16", "fp32", "fp16"):
        policy = setting.policy(setting.config(model={"precision": precision}))
        weights = weights or _copies(policy)  # of bf16: the others hold them as they are
        policy.load_hf_weights(weights)
        packed = [setting.rows_of(policy, num_tokens=2 * length, length=length)]
        (values,) = log_probs(policy, packed)
        assert values is not None  # one stage
        found[precision] = values.double().cpu()
        if precision != "fp16":
            del policy, packed, values
            gc.collect()  # wrappers and hooks hold each other
    off = {one: float((found[one] - found["fp32"]).abs().mean()) for one in ("bf16", "fp16")}
    report.figure("bf16: mean difference from fp32", off["bf16"])
    # On a GPU fp32 multiplies in fp32; what differs there is what 16 bits round.
    nearer = 2 * off["fp16"] < off["bf16"]
    report.claim("fp16: mean difference from fp32", off["fp16"], "half of bf16's", holds=nearer)
    norms = [run_update(policy, packed) for _ in range(4)]
    finite = all(math.isfinite(norm) and norm > 0 for norm in norms)
    report.claim("gradient norms", norms[-1], "finite, not 0", holds=finite)
    scale = policy.loss_scale
    assert scale is not None
    settled = 1 < scale.value == INITIAL / 2**scale.num_overflows
    report.claim("loss scale", scale.value, f"above 1, at most {INITIAL:g}", holds=settled)
    report.figure("passes repeated", scale.num_overflows)


def rounding(setting: Setting, report: Report) -> None:
    """A step's log-ratios in bf16, fp16 and fp32, beside those without rounding."""
    weights: Sequence[tuple[str, Tensor]] = []
    rms = {}
    for precision in ("bf16", "fp16", "fp32"):
        config = setting.config(
            model={"precision": precision},
            optimizer={"learning_rate": 1e-6},
            batch=_TWO_MINIBATCHES,
        )
        policy = setting.policy(config)
        weights = weights or _copies(policy)  # of bf16: the others hold them as they are
        policy.load_hf_weights(weights)
        batch = setting.batch(config, num_prompts=4)
        batch = dataclasses.replace(batch, plan=_plan(policy, batch, config))
        stopwatch = Stopwatch()
        metrics = _learn(policy, batch, config, stopwatch, measures_rounding=True)
        for name in ("ratio_signal", "ratio_rounding", "ratio_correlation"):
            report.figure(f"{precision}: {name}", metrics.get(f"numerics/{name}", math.nan))
        report.figure(f"{precision}: measured in", stopwatch.seconds["rounding"], "s")
        rms[precision] = metrics["numerics/ratio_rounding"]
        del policy
        gc.collect()  # wrappers and hooks hold each other
    nearer = 2 * rms["fp16"] < rms["bf16"]
    report.claim("fp16: rounding of log-ratios", rms["fp16"], "half of bf16's", holds=nearer)
    nearer = 10 * rms["fp32"] < rms["fp16"]
    report.claim("fp32: rounding of log-ratios", rms["fp32"], "a tenth of fp16's", holds=nearer)


def _learn(
    policy: Policy, batch: Batch, config: Config, stopwatch: Stopwatch, **options: bool
) -> dict[str, float]:
    return learn(policy, batch, config.objective, config.rollout, stopwatch, **options) or {}


def _plan(policy: Policy, batch: Batch, config: Config) -> Plan:
    return plan_step(
        batch,
        config.batch,
        needs_every_sequence=config.objective.needs_every_sequence,
        data_parallel_size=policy.groups.dp_size,
    )


def _copies(policy: Policy) -> Sequence[tuple[str, Tensor]]:
    return [(name, weight.cpu().clone()) for name, weight in policy.iterate_hf_weights()]


def run_update(policy: Policy, packed: Sequence[Microbatch]) -> float:
    """An update on all rows; the gradient's norm, which waits for the device."""
    num_rows = sum(len(one.labels) for one in packed)
    return update(policy, packed, MeanLogProb(num_rows)).grad_norm
