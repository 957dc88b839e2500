"""Time per rollout batch against TRL's GRPOTrainer: same model, batch, tokens and updates.

    python benchmarks/rollout_batch.py             0.8 M parameters, 32 prompts x 8 x 32 tokens
    python benchmarks/rollout_batch.py --large     25 M parameters, 8 prompts x 8 x up to 512 tokens

One rollout batch is generation, reward, four updates, and here the weight sync as well (TRL
samples from the model it trains). Both run fp32 on all cores, in processes of their own, in turns;
the first batches of each are left out. Medians are printed for the whole and for its parts. The
random model hardly ever draws EOS, so that responses have full length.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
GROUP_SIZE, NUM_MINIBATCHES = 8, 4
PROMPT_TOKENS = 8
Seconds = dict[str, float]


@dataclass(frozen=True)
class Setting:
    """What both sides run."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    num_prompts: int
    max_response_tokens: int
    num_batches: int
    warmup: int


SMALL = Setting(128, 4, 512, 32, 32, num_batches=8, warmup=3)
LARGE = Setting(512, 8, 512, 8, 512, num_batches=1, warmup=1)


def main() -> None:
    """Run both sides in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--large", action="store_true", help="25 M parameters, 512-token responses")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--side", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    setting = LARGE if arguments.large else SMALL
    if arguments.side:
        run = {"ours": run_ours, "trl": run_trl}[arguments.side]
        print("RESULT " + json.dumps(run(setting, arguments.folder)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_parameters = write_model(setting, folder)
        print(json.dumps(asdict(setting) | {"parameters": num_parameters}))
        batches: dict[str, list[Seconds]] = {"ours": [], "trl": []}
        for _ in range(arguments.rounds):
            for side, found in batches.items():
                found += measure(side, arguments, folder)
                print(side, *(f"{one['whole']:.2f}" for one in found), flush=True)
    for side, found in batches.items():
        print(side, {name: median(found, name) for name in found[0]})
    ours, trl = (median(found, "whole") for found in batches.values())
    print(f"ratio {ours / trl:.2f}")


def median(batches: list[Seconds], name: str) -> float:
    """Median of a part's seconds."""
    return round(statistics.median(one[name] for one in batches), 3)


def measure(side: str, arguments: argparse.Namespace, folder: Path) -> list[Seconds]:
    """Seconds of each rollout batch of one process, whole and by part."""
    command = [sys.executable, __file__, "--side", side, "--folder", str(folder)]
    command += ["--large"] if arguments.large else []
    environment = os.environ | {
        "OMP_NUM_THREADS": str(arguments.threads),
        "PYTHONPATH": str(REPOSITORY),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            values: list[Seconds] = json.loads(line.removeprefix("RESULT "))
            return values
    raise SystemExit(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def write_model(setting: Setting, folder: Path) -> int:
    """A random Qwen2 with a tokenizer of numbered words; returns the number of parameters."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = {f"w{i}": i for i in range(setting.vocab_size - 2)}
    words |= {"<pad>": setting.vocab_size - 2, "<eos>": setting.vocab_size - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="w0"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=setting.vocab_size,
            hidden_size=setting.hidden_size,
            intermediate_size=3 * setting.hidden_size,
            num_hidden_layers=setting.num_layers,
            num_attention_heads=setting.hidden_size // 32,
            num_key_value_heads=setting.hidden_size // 64,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            eos_token_id=setting.vocab_size - 1,
            pad_token_id=setting.vocab_size - 2,
        )
    )
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def prompt_ids(setting: Setting, number: int) -> list[int]:
    """Prompt `number`: eight different words."""
    return [(17 * number + 31 * i) % (setting.vocab_size - 2) for i in range(PROMPT_TOKENS)]


def is_correct(response_ids: list[int]) -> bool:
    """A verdict a random model earns half of the time, so that most groups are mixed."""
    return sum(response_ids) % 2 == 0


def run_ours(setting: Setting, folder: Path) -> list[Seconds]:
    """The stages of `train.py`, without evaluation, checkpoints and files."""
    from gapo_megatron.clock import Stopwatch
    from gapo_megatron.config import parse_config
    from gapo_megatron.formats.weights import read_hf
    from gapo_megatron.learn.plan import plan_step
    from gapo_megatron.learn.step import learn
    from gapo_megatron.objective import make_batch
    from gapo_megatron.policy import Policy, initialize
    from gapo_megatron.rollout.generate import generate
    from gapo_megatron.rollout.requests import SamplingSettings
    from gapo_megatron.rollout.sync import first_sequences, prompts_as_sequences, sync
    from gapo_megatron.rollout.table import to_rollouts
    from gapo_megatron.rollout.vllm import RolloutEngine
    from gapo_megatron.run import process_group
    from gapo_megatron.types import Outcome, Prompt, Verdict

    longest = PROMPT_TOKENS + setting.max_response_tokens
    config = parse_config(
        {
            "run": {"output_dir": str(folder / "run"), "num_steps": 1},
            "model": {"hf_dir": str(folder), "precision": "fp32"},
            "data": {"train_path": "none", "max_prompt_tokens": PROMPT_TOKENS},
            "batch": {
                "rollout_prompts": setting.num_prompts,
                "minibatch_prompts": setting.num_prompts // NUM_MINIBATCHES,
                "rollouts_per_prompt": GROUP_SIZE,
                "max_tokens_per_microbatch": max(4096, longest),
            },
            "rollout": {
                "max_response_tokens": setting.max_response_tokens,
                "enforce_eager": True,  # compiled is no faster at these sizes
            },
            "reward": {"kind": "exact"},
            "objective": {"method": "gspo", "eps_low": 3e-3, "eps_high_max": 3e-3},
        },
        source="benchmark",
    )
    world = process_group.start(600.0)
    policy = Policy.build(config, initialize(config.parallel), world.device)
    policy.load_hf_weights(read_hf(folder))
    engine = RolloutEngine(config, policy.hf_config, device=world.device)
    prompts = [
        Prompt(id=str(i), token_ids=tuple(prompt_ids(setting, i)), answer="")
        for i in range(setting.num_prompts)
    ]
    sync(policy, engine, prompts_as_sequences(prompts, 4), policy_version=0)
    batches = []
    for step in range(setting.warmup + setting.num_batches):
        stopwatch, start = Stopwatch(), time.perf_counter()
        with stopwatch("generation"):
            settings = SamplingSettings(GROUP_SIZE, setting.max_response_tokens, seed=0, step=step)
            groups = generate(engine, prompts, settings)
            assert groups is not None
            engine.sleep()
        verdicts = [
            [
                Verdict(Outcome.CORRECT if is_correct(one.token_ids.tolist()) else Outcome.WRONG)
                for one in group
            ]
            for group in groups
        ]
        batch = make_batch(to_rollouts(groups, verdicts), config.objective.resolve())
        plan = plan_step(batch, config.batch, needs_every_sequence=False, data_parallel_size=1)
        batch = replace(batch, plan=plan)
        learn(policy, batch, config.objective, config.rollout, stopwatch)
        with stopwatch("sync"):
            sync(policy, engine, first_sequences(batch, 4), policy_version=step + 1)
        batches.append({"whole": time.perf_counter() - start} | stopwatch.seconds)
    return batches[setting.warmup :]


def run_trl(setting: Setting, folder: Path) -> list[Seconds]:
    """GRPOTrainer with a sequence-level ratio, generation by transformers."""
    from datasets import Dataset
    from transformers import AutoTokenizer, Qwen2ForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    per_update = setting.num_prompts * GROUP_SIZE // NUM_MINIBATCHES
    # A large model's update does not fit one padded pass any better than ours does one packed pass.
    per_pass = per_update if setting.max_response_tokens <= 64 else per_update // 2
    texts = [" ".join(f"w{i}" for i in prompt_ids(setting, n)) for n in range(setting.num_prompts)]
    marks: list[float] = []
    generation: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % NUM_MINIBATCHES == 0:
                marks.append(time.perf_counter())

    class Timed(GRPOTrainer):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            generated = super()._generate(*args, **kwargs)
            generation.append(time.perf_counter() - start)
            return generated

    trainer = Timed(
        model=Qwen2ForCausalLM.from_pretrained(folder, trust_remote_code=False),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            beta=0.0,
            importance_sampling_level="sequence",
            epsilon=3e-3,
            loss_type="dapo",
            scale_rewards="none",
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            num_generations=GROUP_SIZE,
            per_device_train_batch_size=per_pass,
            gradient_accumulation_steps=per_update // per_pass,
            generation_batch_size=setting.num_prompts * GROUP_SIZE,
            max_completion_length=setting.max_response_tokens,
            temperature=1.0,
            shuffle_dataset=False,
            max_steps=NUM_MINIBATCHES * (setting.warmup + setting.num_batches),
        ),
        reward_funcs=lambda completion_ids, **_: [float(is_correct(c)) for c in completion_ids],
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
        callbacks=[Clock()],
    )
    start = time.perf_counter()
    trainer.train()
    ends = [start, *marks]
    whole = [after - before for before, after in itertools.pairwise(ends)]
    batches = [{"whole": a, "generation": b} for a, b in zip(whole, generation, strict=True)]
    return batches[setting.warmup :]


if __name__ == "__main__":
    main()
