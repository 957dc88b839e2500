"""Part: Transformer Engine's, apex's and torch's optimizer beside each other."""

from __future__ import annotations

import gc
import time

import torch
from torch import Tensor

from gapo_megatron.errors import ConfigError
from gapo_megatron.policy import Policy
from gapo_megatron.policy.optimizer import choose_implementation
from tests.gpu.report import Report
from tests.gpu.setting import Setting
from tests.gpu.training import run_update

_NUM_UPDATES = 4


def optimizers(setting: Setting, report: Report) -> None:
    """The same clipped updates with each that is here, from the same weights, on the same rows.

    In fp32 no layer is Transformer Engine's, and apex's products add the weight gradients.
    """
    for precision in dict.fromkeys((setting.precision, "fp32")):
        steps: dict[str, list[Tensor]] = {}
        for name in ("torch", "transformer_engine", "apex"):
            try:
                steps[name] = _run(setting, report, precision, name)
            except ConfigError as error:
                report.figure(f"{precision}, {name}: not compared", str(error))
        whole = _norm(steps["torch"])
        for name, ours in steps.items():
            off = _norm([a - b for a, b in zip(ours, steps["torch"], strict=True)]) / whole
            # AdamW divides by the gradient's size: where it is rounding alone, so is the step.
            what = f"{precision}, {name}: step beside torch's"
            report.claim(what, off, "within 0.1", holds=off < 0.1)


def _run(setting: Setting, report: Report, precision: str, name: str) -> list[Tensor]:
    """Updates with an implementation; how far they moved the weights."""
    config = setting.config(
        model={"precision": precision},
        optimizer={"implementation": name, "learning_rate": 1e-5, "clip_grad": 1e-3},
    )
    choose_implementation(config.optimizer, setting.device)
    policy = setting.policy(config)
    length = setting.tokens(1024)
    packed = [setting.rows_of(policy, num_tokens=2 * length, length=length)]
    before = _weights(policy)
    start = time.perf_counter()
    norms = [run_update(policy, packed) for _ in range(_NUM_UPDATES)]
    report.figure(
        f"{precision}, {name}: seconds an update", (time.perf_counter() - start) / _NUM_UPDATES, "s"
    )
    clipped = min(norms) > config.optimizer.clip_grad
    what = f"{precision}, {name}: smallest norm"
    report.claim(what, min(norms), "above the clip, 1e-3", holds=clipped)
    steps = [b - a for a, b in zip(before, _weights(policy), strict=True)]
    del policy, packed
    gc.collect()  # wrappers and hooks hold each other
    return steps


def _weights(policy: Policy) -> list[Tensor]:
    """Master weights, on the host."""
    return [
        one.detach().to("cpu", torch.float32, copy=True)
        for group in policy.optimizer.param_groups
        for one in group["params"]
    ]


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([one.norm() for one in tensors]).norm())
