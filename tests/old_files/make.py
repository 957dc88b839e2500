"""Write what a user of this version leaves behind: python make.py CHECKOUT OUTPUT

A tiny model that solves about half of a toy task, and a run of it with over-sampling and partial
rollouts that was stopped within step 3, after one of its two updates. checkpoints/step_00000002 is
between steps, with open groups; step_00000003_1 has an open step, open groups, and an evaluation
before it. Then a copy is resumed to the end by the same version: expected/ has its metrics.
"""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

CONFIG = """\
# Paths are relative: run in the folder of this file.
[run]
output_dir = "run"
num_steps = 5
[model]
hf_dir = "base"
precision = "fp32"
[data]
train_path = "task/train.jsonl"
eval_path = "task/eval.jsonl"
max_prompt_tokens = 4
[batch]
rollout_prompts = 8
minibatch_prompts = 4
rollouts_per_prompt = 4
oversampling = 1.5
partial_rollouts = true
max_tokens_per_microbatch = 128
[rollout]
max_response_tokens = 24
enforce_eager = true
verify_bound = 1e-4
[reward]
kind = "exact"
num_workers = 1
[objective]
method = "gapo"
eps_low = 0.003
eps_high_max = 0.005
[optimizer]
learning_rate = 1e-3
[checkpoint]
every_steps = 2
[evaluation]
every_steps = 3
samples_per_prompt = 2
[metrics]
tensorboard = false
[supervised]
initial_hf_dir = "init"
train_path = "task/supervised.jsonl"
num_steps = 150
batch_sequences = 32
learning_rate = 1e-2
"""


def write_task(folder):
    """`a=` is answered by up to ten ones, each with a separator, then a: lengths differ."""
    draw = random.Random(0)
    folder.mkdir()
    for split, number in (("train", 64), ("eval", 8)):
        rows = [(f"{split}-{n}", draw.choice("23")) for n in range(number)]
        lines = [{"id": i, "prompt": f"{a}=", "answer": a, "level": f"level_{a}"} for i, a in rows]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts = []
    for _ in range(150 * 32):
        digit = draw.choice("23")
        texts.append((f"{digit}=", "1>" * draw.randrange(11) + draw.choice((digit, "2", "3"))))
    rows = ({"prompt": prompt, "response": response} for prompt, response in texts)
    (folder / "supervised.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [prompt + response for prompt, response in texts]


def write_model(folder, texts):
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from gapo_megatron.data import arithmetic

    tokenizer = arithmetic.write_tokenizer(texts, folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,  # 32 per head, the least that vLLM serves on a CPU
        max_position_embeddings=32,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def run(checkout, folder, module, *arguments, **environment):
    command = [sys.executable, "-m", module, "config.toml", *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)} | environment
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def digests(folder):
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    return {
        name: hashlib.sha256(t.numpy().tobytes()).hexdigest() for name, t in sorted(tensors.items())
    }


def main():
    checkout, output = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    sys.path.insert(0, str(checkout))
    output.mkdir(parents=True)
    (output / "config.toml").write_text(CONFIG)
    write_model(output / "init", write_task(output / "task"))
    run(checkout, output, "gapo_megatron.sft")
    shutil.rmtree(output / "init")
    for name in ("tokenizer.model", ".gapo_megatron.json"):  # large; of this machine
        (output / "base" / name).unlink()
    (output / "task/supervised.jsonl").unlink()
    (output / "run").mkdir()
    (output / "run/OWNER").write_text(
        "7.0\n"
    )  # else host and process are in names of the checkpoint
    stop = {"STAGE": "step 3: update", "SIGNAL": "SIGUSR1", "GAPO_ATTEMPT": "7.0"}
    said = run(checkout, output, "tests.signalled", **stop)
    assert "stopped (signal SIGUSR1)" in said, said[-2000:]
    names = sorted(path.name for path in (output / "run/checkpoints").iterdir())
    assert names == ["step_00000002", "step_00000003_1"], names
    for path in ("OWNER", "timings.jsonl", "stage_seconds.json"):  # of this machine
        (output / "run" / path).unlink(missing_ok=True)

    resumed = output / "expected"
    shutil.copytree(output / "run", resumed / "run")
    said = run(checkout, output, "gapo_megatron.train", "run.output_dir=expected/run")
    assert "resumed from" in said and "step_00000003_1" in said, said[-2000:]
    shutil.copy(resumed / "run/metrics.jsonl", resumed / "metrics.jsonl")
    (resumed / "weights.json").write_text(json.dumps(digests(resumed / "run/hf"), indent=1) + "\n")
    # The other checkpoint leads to the same end.
    shutil.rmtree(resumed / "two", ignore_errors=True)
    shutil.copytree(output / "run", resumed / "two")
    shutil.rmtree(resumed / "two/checkpoints/step_00000003_1")
    said = run(checkout, output, "gapo_megatron.train", "run.output_dir=expected/two")
    assert "resumed from" in said and "step_00000002" in said, said[-2000:]
    undisturbed = run(checkout, output, "gapo_megatron.train", "run.output_dir=expected/whole")
    assert "resumed from" not in undisturbed
    for other in ("whole", "two"):
        for name in ("metrics.jsonl", "hf/model.safetensors"):
            assert (resumed / other / name).read_bytes() == (resumed / "run" / name).read_bytes(), (
                name
            )
    for name in ("run", "whole", "two"):
        shutil.rmtree(resumed / name)


main()
