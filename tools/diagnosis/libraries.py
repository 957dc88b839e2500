"""Section `libraries`: libraries with kernels, and whether they load on this machine.

The checks of Transformer Engine, flash-attn and NCCL were NOT YET RUN ON A GPU.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from gapo_megatron.compat import apex
from gapo_megatron.launch.node_checks import CommandError
from gapo_tools.diagnosis.ask import Answer
from gapo_tools.diagnosis.finding import Finding, Status, judge
from gapo_tools.diagnosis.machine import num_gpus
from gapo_tools.diagnosis.program import distributions

Ask = Callable[[str], Answer]

PIP = f"{sys.executable} -m pip"
SETUP = "tools/setup_gpu_env.sh"
"""Creates the environment of requirements/gpu.txt."""
TORCH = """\
import json, time; start = time.time(); import torch
cuda = torch.version.cuda
with open("/proc/self/maps") as maps:
    nccl = sorted({line.split()[-1] for line in maps if "/libnccl.so" in line})
print(json.dumps({
    "version": torch.__version__, "cuda": cuda, "seconds": round(time.time() - start, 1),
    "num_gpus": torch.cuda.device_count(), "cudnn": torch.backends.cudnn.version(),
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None, "nccl_paths": nccl,
}))
"""
# torch first, as in the trainer: only torch finds NCCL in a virtual environment.
TRANSFORMER_ENGINE = """\
import json, torch, transformer_engine, transformer_engine.pytorch, transformer_engine_torch
print(json.dumps({"version": transformer_engine.__version__,
                  "path": transformer_engine_torch.__file__}))
"""
APEX = """\
import json; from gapo_megatron.compat import apex; print(json.dumps({"why_not": apex.why_not()}))
"""
FLASH_ATTENTION = {"flash-attn": "flash_attn", "flash-attn-3": "flash_attn_interface"}
"""Distributions, and the module of each that Transformer Engine imports."""
FLASHINFER_KERNELS = ("flashinfer-cubin", "flashinfer-jit-cache")
"""Distributions with FlashInfer's compiled kernels, of the same version as FlashInfer."""


def look_at_libraries(torch: Answer, ask: Ask, env: Mapping[str, str]) -> Iterator[Finding]:
    """Check torch, Transformer Engine, apex, flash-attn, Triton, FlashInfer and NCCL.

    Args:
        torch: the answer to `TORCH`.
        ask: runs code in a separate interpreter.
        env: environment of this process.
    """
    here = distributions()
    yield judge_torch(torch, num_gpus=num_gpus(env))
    facts = {} if isinstance(torch, CommandError) else torch
    yield look_at_transformer_engine(here, facts, ask)
    yield look_at_apex(ask)
    yield look_at_flash_attention(here, ask)
    yield look_at_triton(facts, ask)
    if facts.get("cuda"):
        yield look_at_compiler(facts, env)
        if "flashinfer-python" in here:
            yield judge_flashinfer({name: one.version for name, one in here.items()})
        packaged = next((one for name, one in here.items() if name.startswith("nvidia-nccl")), None)
        yield judge_nccl(facts, packaged)


def judge_torch(answer: Answer, *, num_gpus: int) -> Finding:
    """Finding on torch: its build, and whether it sees the GPUs.

    Args:
        answer: the answer to `TORCH`.
        num_gpus: number of GPUs that the driver shows.
    """
    if isinstance(answer, CommandError):
        return Finding("libraries", "import torch", "fail", str(answer), "reinstall torch")
    cuda, seen = answer["cuda"], answer["num_gpus"]
    build = f"CUDA {cuda}, cuDNN {answer['cudnn']}, sees {seen} GPUs" if cuda else "CPUs"
    detail = f"{answer['version']}, built for {build}; import took {answer['seconds']} s"
    good = seen > 0 or num_gpus == 0
    advice = "the driver is too old for this torch" if cuda else "this torch cannot use the GPUs"
    bad: Status = "fail" if cuda else "warn"
    return judge("libraries", "import torch", good, detail, advice, bad=bad)


def look_at_transformer_engine(
    here: Mapping[str, metadata.Distribution], torch: Mapping[str, Any], ask: Ask
) -> Finding:
    """Whether Transformer Engine's compiled part loads with this torch.

    Args:
        here: installed distributions.
        torch: the answer to `TORCH`; empty if torch does not load.
        ask: runs code in a separate interpreter.
    """
    name = "import transformer_engine"
    cuda = torch.get("cuda")
    if importlib.util.find_spec("transformer_engine") is None:
        if not cuda:
            return Finding("libraries", name, "ok", "not installed; it needs a GPU")
        advice = f"{SETUP} installs it: faster layers, attention and optimizer, and fp8"
        return Finding("libraries", name, "warn", "not installed", advice)
    # With a GPU the trainer relies on an installed Transformer Engine.
    bad: Status = "fail" if torch.get("num_gpus") else "warn"
    built_for = [core.removeprefix("transformer-engine-cu") for core in here if "engine-cu" in core]
    major = (cuda or "").partition(".")[0]
    if cuda and built_for and major not in built_for:
        detail = f"built for CUDA {', '.join(built_for)}, but torch for CUDA {cuda}"
        advice = f"{PIP} uninstall transformer-engine-cu{built_for[0]}; then {SETUP}"
        return Finding("libraries", name, bad, detail, advice)
    answer = ask(TRANSFORMER_ENGINE)
    if isinstance(answer, CommandError):
        advice = f"compile it for the installed torch, as {SETUP} does, or uninstall it"
        return Finding("libraries", name, bad, str(answer), advice)
    return Finding("libraries", name, "ok", f"{answer['version']} ({answer['path']})")


def look_at_apex(ask: Ask) -> Finding:
    """Whether apex is NVIDIA's, not the unrelated package of that name, and has all its parts."""
    if not apex.is_installed():
        detail = "not installed, not needed: Transformer Engine's kernels come first"
        return Finding("libraries", "apex", "ok", detail)
    advice = f"{SETUP} --apex builds NVIDIA's; without it: {PIP} uninstall apex"
    if apex.other_package():  # never imported: that would run its code
        return Finding("libraries", "apex", "warn", apex.why_not(), advice)
    answer = ask(APEX)
    reason = str(answer) if isinstance(answer, CommandError) else answer["why_not"]
    whole = f"NVIDIA's, version {apex.version() or 'unknown'}, with all parts"
    return judge("libraries", "apex", not reason, reason or whole, advice, bad="warn")


def look_at_flash_attention(here: Mapping[str, metadata.Distribution], ask: Ask) -> Finding:
    """Whether flash-attn 2 and 3, which Transformer Engine may use, load if installed."""
    found = {package: module for package, module in FLASH_ATTENTION.items() if package in here}
    if not found:
        detail = "not installed, not needed: Transformer Engine uses cuDNN's, vLLM its own"
        return Finding("libraries", "flash-attn", "ok", detail)
    answers = {name: ask(f"import {module}; print('{{}}')") for name, module in found.items()}
    broken = [name for name, answer in answers.items() if isinstance(answer, CommandError)]
    detail = ", ".join(f"{name} {here[name].version}" for name in found)
    detail += "".join(f"; {name}: {answers[name]}" for name in broken)
    advice = f"Transformer Engine imports it: {PIP} uninstall {' '.join(broken)}; it is not needed"
    return judge("libraries", "flash-attn", not broken, detail, advice, bad="warn")


def look_at_triton(torch: Mapping[str, Any], ask: Ask) -> Finding:
    """Whether Triton loads; on a GPU it compiles the log-prob kernels, and kernels of vLLM."""
    if importlib.util.find_spec("triton") is None:
        detail = "not installed"
        advice = "pip installs it together with a torch for CUDA"
        return judge("libraries", "import triton", not torch.get("cuda"), detail, advice)
    answer = ask("import json, triton; print(json.dumps({'version': triton.__version__}))")
    if isinstance(answer, CommandError):
        bad: Status = "fail" if torch.get("num_gpus") else "warn"
        advice = "reinstall the triton version that this torch requires"
        return Finding("libraries", "import triton", bad, str(answer), advice)
    return Finding("libraries", "import triton", "ok", str(answer["version"]))


def look_at_compiler(torch: Mapping[str, Any], env: Mapping[str, str]) -> Finding:
    """Whether there are a C compiler and Python's headers, which Triton needs on every node."""
    compilers = [env["CC"]] if env.get("CC") else ["gcc", "clang"]
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    detail = f"{compiler or f'no {compilers[0]}'}, {'' if header.is_file() else 'no '}{header}"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    advice = (
        f"install gcc and Python's headers (python{version}-dev) on every node; Triton needs it"
    )
    bad: Status = "fail" if torch["num_gpus"] else "warn"
    good = compiler is not None and header.is_file()
    return judge("libraries", "C compiler", good, detail, advice, bad=bad)


def judge_flashinfer(versions: Mapping[str, str]) -> Finding:
    """Whether FlashInfer's compiled kernels are installed; otherwise vLLM compiles them at start.

    Args:
        versions: installed versions by normalised name, including FlashInfer's.
    """
    wanted = versions["flashinfer-python"]
    found = {name: versions.get(name, "not installed") for name in FLASHINFER_KERNELS}
    good = all(version.partition("+")[0] == wanted for version in found.values())
    detail = f"{wanted}; " + ", ".join(f"{name} {version}" for name, version in found.items())
    advice = f"{sys.executable} -m flashinfer download-kernels (vLLM's own command needs a GPU)"
    return judge("libraries", "flashinfer", good, detail, advice, bad="warn")


def judge_nccl(torch: Mapping[str, Any], packaged: metadata.Distribution | None) -> Finding:
    """Whether torch has loaded the NCCL that is installed for it, and no other.

    Args:
        torch: the answer to `TORCH`, for a build with CUDA.
        packaged: the installed distribution of NCCL, if there is one.
    """
    loaded, paths = torch["nccl"], torch["nccl_paths"]
    detail = f"{loaded} ({', '.join(paths) or 'part of torch'})"
    advice = "another NCCL is found first: check LD_PRELOAD and LD_LIBRARY_PATH"
    if len(paths) > 1:
        return Finding("libraries", "nccl", "warn", f"two versions are loaded: {detail}", advice)
    same = packaged is None or packaged.version.startswith(loaded)
    if not same and packaged is not None:
        detail += f"; {packaged.metadata['Name']} {packaged.version} is installed"
    return judge("libraries", "nccl", same, detail, advice, bad="warn")
