"""Section `kernels`: the kernels that training uses on this machine.

One process builds a tiny policy as the trainer does, updates it once, and reports its parts;
another imports the rollout engine. On a GPU: NOT YET RUN.
"""

from __future__ import annotations

from collections.abc import Iterator

from gapo_megatron.launch.node_checks import CommandError
from gapo_tools.diagnosis.ask import Answer, probe_code
from gapo_tools.diagnosis.finding import Finding, Status, judge

_LOGIN_NODE = "torch is built for CUDA but sees no GPU: run the check on a compute node"


def policy_code(*, implementation: str = "auto", **model: str) -> str:
    """Python code that reports on the policy with this optimizer and these settings of `model`."""
    return probe_code(f"policy({implementation!r}, **{model!r})")


def rollout_code(*, precision: str) -> str:
    """Python code that reports on the rollout engine in this precision."""
    return probe_code(f"rollout({precision!r})")


def judge_policy(answer: Answer, *, precision: str, torch: Answer) -> Iterator[Finding]:
    """Findings on the parts of the policy.

    Args:
        answer: the answer to `policy_code`.
        precision: precision of the policy.
        torch: the answer to `libraries.TORCH`.
    """
    bad, advice = _when_it_fails(torch)
    if isinstance(answer, CommandError):
        yield Finding("kernels", "one update", bad, str(answer), advice)
        return
    on_gpu = answer["device"] == "cuda"
    where = answer["gpu"] if on_gpu else "the CPU (for tests and demos)"
    yield Finding("kernels", "one update", "ok", f"updated a tiny model in {precision} on {where}")
    fused = answer["transformer_engine"] or precision == "fp32" or not on_gpu
    advice = "Transformer Engine's are faster: tools/setup_gpu_env.sh installs it"
    yield judge("kernels", "layers", fused, answer["layers"], advice, bad="warn")
    attention = ": ".join(filter(None, (answer["attention"], answer["attention_backend"])))
    good = not answer["attention_backend"].startswith("Unfused")
    advice = "its memory is quadratic in length; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 says why"
    yield judge("kernels", "attention", good, attention, advice, bad="warn")
    yield Finding("kernels", "norm", "ok", answer["norm"])
    yield Finding("kernels", "optimizer", "ok", answer["optimizer"])
    yield Finding("kernels", "log-probs", "ok", answer["log_probs"])
    recipes = [recipe for recipe, reason in answer["fp8"].items() if not reason]
    detail = ", ".join(recipes) or f"not available: {next(iter(answer['fp8'].values()))}"
    yield Finding("kernels", "fp8", "ok", detail)
    yield Finding("kernels", "collectives", "ok", answer["collectives"])


def judge_rollout(answer: Answer, *, torch: Answer) -> Finding:
    """Finding on vLLM, and whether it runs on the trainer's kind of device.

    Args:
        answer: the answer to `rollout_code`.
        torch: the answer to `libraries.TORCH`.
    """
    bad, advice = _when_it_fails(torch)
    if isinstance(answer, CommandError):
        return Finding("kernels", "rollout", bad, str(answer), advice)
    detail = f"{answer['package']} {answer['version']} on {answer['device'] or 'no device'}"
    detail += f", attention {answer['attention']}" if answer["attention"] else ""
    trainer = "cpu" if isinstance(torch, CommandError) or not torch["num_gpus"] else "cuda"
    if bad == "fail":  # otherwise the advice is to use a compute node
        lock = "gpu.txt" if trainer == "cuda" else "cpu.txt"
        advice = f"the trainer runs on {trainer}: install the vLLM of requirements/{lock}"
    return judge("kernels", "rollout", answer["device"] == trainer, detail, advice, bad=bad)


def _when_it_fails(torch: Answer) -> tuple[Status, str]:
    if not isinstance(torch, CommandError) and torch["cuda"] and not torch["num_gpus"]:
        return "warn", _LOGIN_NODE
    return "fail", "training would stop with this error: repair the libraries above, or the config"
