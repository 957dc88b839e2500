"""Time per rollout batch against TRL's GRPOTrainer: same model, batch, tokens and updates.

    python benchmarks/rollout_batch.py                  0.8 M parameters, 32 prompts x 8 x 32 tokens
    python benchmarks/rollout_batch.py --large          25 M parameters, 8 x 8 x 512 tokens
    python benchmarks/rollout_batch.py --model FOLDER   a published chat model, 8 x 8 x up to 96

One rollout batch is generation, reward, two or four updates, and here the weight sync as well (TRL
samples from the model it trains). Both run fp32 on all cores, in processes of their own, in turns;
the first batches of random models are left out. Medians are printed for the whole and for its
parts, in seconds and in CPU seconds of all threads, which vary less on a machine that others use.

Random models hardly ever draw EOS, so that responses have full length; a published one ends where
it likes, so that the two sides do not sample equally many tokens (printed). With `--unequal` the
lengths are drawn instead (lognormal, a third of the limit on average), and both sides sample
exactly these: ours by the limit of each request, TRL's by an end token that is forced there and
nowhere else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from gapo_megatron.clock import Stopwatch  # noqa: E402

GROUP_SIZE = 8
PROMPT_TOKENS = 8
QUESTIONS = (
    "Why does the moon have phases?",
    "Write a short story about a fox who is afraid of the dark.",
    "How do I cook rice?",
    "Explain what a prime number is to a child.",
    "What should I see on one day in Rome?",
    "Give me three tips for learning a language.",
    "Describe how a bicycle stays upright.",
    "What is the difference between weather and climate?",
)
Seconds = dict[str, float]


@dataclass(frozen=True)
class Setting:
    """What both sides run."""

    num_prompts: int
    max_response_tokens: int
    num_minibatches: int
    num_batches: int
    warmup: int
    sequences_per_pass: int
    """TRL's; what fits one padded pass fits one packed pass of ours."""
    tokens_per_microbatch: int
    is_unequal: bool = False
    hidden_size: int = 0
    """Of a random model; 0: a published one."""
    num_layers: int = 0
    vocab_size: int = 0


SMALL = Setting(
    32,
    32,
    num_minibatches=4,
    num_batches=8,
    warmup=3,
    sequences_per_pass=64,
    tokens_per_microbatch=4096,
    hidden_size=128,
    num_layers=4,
    vocab_size=512,
)
LARGE = Setting(
    8,
    512,
    num_minibatches=4,
    num_batches=1,
    warmup=1,
    sequences_per_pass=8,
    tokens_per_microbatch=4096,
    hidden_size=512,
    num_layers=8,
    vocab_size=512,
)
PUBLISHED = Setting(
    8,
    96,
    num_minibatches=2,
    num_batches=1,
    warmup=0,
    sequences_per_pass=16,
    tokens_per_microbatch=2048,
)


class Clock(Stopwatch):
    """Also counts CPU seconds of all threads of the process, as stages `cpu/<stage>`."""

    @contextlib.contextmanager
    def __call__(self, stage: str, *, is_part: bool = False) -> Iterator[None]:
        start = process_time()
        with super().__call__(stage, is_part=is_part):
            yield
        name = f"cpu/{stage}"
        self.seconds[name] = self.seconds.get(name, 0.0) + process_time() - start


def main() -> None:
    """Run both sides in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--large", action="store_true", help="25 M parameters, 512-token responses")
    parser.add_argument("--model", type=Path, help="Hugging Face folder of a chat model")
    parser.add_argument("--unequal", action="store_true", help="responses of drawn lengths")
    parser.add_argument("--batches", type=int, help="batches of each turn that count")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", choices=["ours", "trl"], help="one side alone")
    parser.add_argument("--side", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    setting = PUBLISHED if arguments.model else LARGE if arguments.large else SMALL
    setting = replace(
        setting,
        is_unequal=arguments.unequal,
        num_batches=arguments.batches or setting.num_batches,
    )
    if arguments.side:
        run = {"ours": run_ours, "trl": run_trl}[arguments.side]
        model = arguments.model or arguments.folder
        print("RESULT " + json.dumps(run(setting, model, arguments.folder)))
        return
    sides = [arguments.only] if arguments.only else ["ours", "trl"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.model is None:
            write_model(setting, folder)
        print(json.dumps(asdict(setting)))
        batches: dict[str, list[Seconds]] = {side: [] for side in sides}
        for _ in range(arguments.rounds):
            for side, found in batches.items():
                found += measure(side, arguments, folder)
                shown = (f"{one['whole']:.2f} s ({one['cpu/whole']:.2f} CPU)" for one in found)
                print(side, *shown, flush=True)
    if setting.is_unequal:
        counts = {side: [one["tokens"] for one in found] for side, found in batches.items()}
        if len({*map(tuple, counts.values())}) > 1:
            raise SystemExit(f"the sides sampled other numbers of tokens: {counts}")
    show(batches)


def show(batches: dict[str, list[Seconds]]) -> None:
    """Medians of the parts, and ratios of the wholes."""
    for side, found in batches.items():
        print(side, f"tokens {median(found, 'tokens'):.0f}")
        for name in found[0]:
            if f"cpu/{name}" in found[0]:
                print(f"  {name:15} {median(found, name):8.3f} s")
                print(f"  {'':15} {median(found, 'cpu/' + name):8.3f} CPU s")
    if len(batches) == 2:
        for name in ("whole", "cpu/whole"):
            ours, trl = (median(found, name) for found in batches.values())
            print(f"ratio of {name}: {ours / trl:.2f}")


def median(batches: list[Seconds], name: str) -> float:
    """Median of a part's seconds."""
    return statistics.median(one[name] for one in batches)


def measure(side: str, arguments: argparse.Namespace, folder: Path) -> list[Seconds]:
    """Seconds of each rollout batch of one process, whole and by part."""
    command = [sys.executable, __file__, "--side", side, "--folder", str(folder)]
    command += ["--large"] if arguments.large else []
    command += ["--unequal"] if arguments.unequal else []
    command += ["--model", str(arguments.model)] if arguments.model else []
    command += ["--batches", str(arguments.batches)] if arguments.batches else []
    environment = os.environ | {
        "OMP_NUM_THREADS": str(arguments.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            values: list[Seconds] = json.loads(line.removeprefix("RESULT "))
            return values
    raise SystemExit(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def write_model(setting: Setting, folder: Path) -> None:
    """A random Qwen2 with a tokenizer of numbered words."""
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


def prompt_texts(setting: Setting, tokenizer: Any) -> list[str]:
    """Prompts of eight different words, or questions in the model's chat template."""
    if not setting.vocab_size:
        turns = [[{"role": "user", "content": one}] for one in QUESTIONS[: setting.num_prompts]]
        options = {"tokenize": False, "add_generation_prompt": True}
        return [tokenizer.apply_chat_template(one, **options) for one in turns]
    numbers = [
        [(17 * n + 31 * i) % (setting.vocab_size - 2) for i in range(PROMPT_TOKENS)]
        for n in range(setting.num_prompts)
    ]
    return [" ".join(f"w{i}" for i in one) for one in numbers]


def read_tokenizer(folder: Path) -> Any:
    """That of the folder as it is; `AutoTokenizer` takes Qwen2's own for a random Qwen2."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)


def prompt_ids(setting: Setting, tokenizer: Any) -> list[list[int]]:
    """Token ids of the prompts."""
    return [tokenizer(text)["input_ids"] for text in prompt_texts(setting, tokenizer)]


def drawn_lengths(setting: Setting, step: int) -> np.ndarray:
    """[num_prompts * GROUP_SIZE] int64 lengths of the responses of a batch, with `--unequal`."""
    drawn = np.random.default_rng([20, step]).lognormal(
        math.log(setting.max_response_tokens / 4), 0.8, setting.num_prompts * GROUP_SIZE
    )
    return drawn.round().astype(int).clip(1, setting.max_response_tokens)


def is_correct(response_ids: list[int]) -> bool:
    """A verdict earned half of the time, so that most groups are mixed."""
    return sum(response_ids) % 2 == 0


def run_ours(setting: Setting, model_dir: Path, folder: Path) -> list[Seconds]:
    """The stages of `train.py`, without evaluation, checkpoints and files."""
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

    prompts = [
        Prompt(id=str(i), token_ids=tuple(ids), answer="")
        for i, ids in enumerate(prompt_ids(setting, read_tokenizer(model_dir)))
    ]
    config = parse_config(
        {
            "run": {"output_dir": str(folder / "run"), "num_steps": 1},
            "model": {"hf_dir": str(model_dir), "precision": "fp32"},
            "data": {
                "train_path": "none",
                "max_prompt_tokens": max(len(one.token_ids) for one in prompts),
            },
            "batch": {
                "rollout_prompts": setting.num_prompts,
                "minibatch_prompts": setting.num_prompts // setting.num_minibatches,
                "rollouts_per_prompt": GROUP_SIZE,
                "max_tokens_per_microbatch": setting.tokens_per_microbatch,
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
    policy.load_hf_weights(read_hf(model_dir))
    engine = RolloutEngine(config, policy.hf_config, device=world.device)
    lengths: dict[str, int] = {}
    if setting.is_unequal:
        engine.eos_token_ids, add = [], engine.add
        # Set on the object: the engine itself has one limit for all responses.
        vars(engine)["add"] = lambda one: add(replace(one, max_tokens=lengths[one.name]))
    sync(policy, engine, prompts_as_sequences(prompts, 4), policy_version=0)
    batches = []
    for step in range(setting.warmup + setting.num_batches):
        clock = Clock()
        for i, length in enumerate(drawn_lengths(setting, step)):
            lengths[f"{i // GROUP_SIZE}/{i % GROUP_SIZE}"] = int(length)
        with clock("whole"):
            with clock("generation"):
                settings = SamplingSettings(
                    GROUP_SIZE, setting.max_response_tokens, seed=0, step=step
                )
                groups = generate(engine, prompts, settings)
                assert groups is not None
                engine.sleep()
            verdicts = [
                [
                    Verdict(
                        Outcome.CORRECT if is_correct(one.token_ids.tolist()) else Outcome.WRONG
                    )
                    for one in group
                ]
                for group in groups
            ]
            batch = make_batch(to_rollouts(groups, verdicts), config.objective.resolve())
            plan = plan_step(batch, config.batch, needs_every_sequence=False, data_parallel_size=1)
            batch = replace(batch, plan=plan)
            learn(policy, batch, config.objective, config.rollout, clock)
            with clock("sync"):
                sync(policy, engine, first_sequences(batch, 4), policy_version=step + 1)
        tokens = float(sum(len(one.token_ids) for group in groups for one in group))
        batches.append(clock.seconds | {"tokens": tokens})
    return batches[setting.warmup :]


def run_trl(setting: Setting, model_dir: Path, folder: Path) -> list[Seconds]:
    """GRPOTrainer with a sequence-level ratio, generation by transformers."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    per_update = setting.num_prompts * GROUP_SIZE // setting.num_minibatches
    tokenizer = read_tokenizer(model_dir)
    expected = [one for one in prompt_ids(setting, tokenizer) for _ in range(GROUP_SIZE)]
    clock = Clock()
    whole = contextlib.ExitStack()
    batches: list[Seconds] = []

    class AtEnds(TrainerCallback):
        """Counts the batches."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % setting.num_minibatches == 0:
                whole.close()
                batches.append(clock.seconds)
                clock.seconds = {}
                whole.enter_context(clock("whole"))

    class Timed(GRPOTrainer):
        """Counts what a batch consists of; what remains of the whole is the updates."""

        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            with clock("generation"):
                generated = super()._generate(*args, **kwargs)
            assert generated[0] == expected, "other prompts than ours"
            clock.seconds["tokens"] = float(sum(map(len, generated[1])))
            return generated

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            stage = "forward" if torch.is_grad_enabled() else "old_log_probs"
            with clock(stage):
                return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    class EndsAt:
        """Forces the end token at the drawn lengths, and nowhere else."""

        def __init__(self, prompt_tokens: int) -> None:
            self.prompt_tokens = prompt_tokens
            self.lengths = torch.from_numpy(drawn_lengths(setting, len(batches)))

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            ends = self.lengths == input_ids.shape[1] - self.prompt_tokens + 1
            end = tokenizer.eos_token_id
            kept = scores[ends, end]
            scores[:, end] = -math.inf
            scores[ends] = -math.inf
            scores[ends, end] = kept
            return scores

    model = AutoModelForCausalLM.from_pretrained(
        model_dir, trust_remote_code=False, dtype=torch.float32
    )
    if setting.is_unequal:
        generate = model.generate
        model.generate = lambda **given: generate(
            **given, logits_processor=[EndsAt(given["input_ids"].shape[1])]
        )
    trainer = Timed(
        model=model,
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
            per_device_train_batch_size=setting.sequences_per_pass,
            gradient_accumulation_steps=per_update // setting.sequences_per_pass,
            generation_batch_size=setting.num_prompts * GROUP_SIZE,
            max_completion_length=setting.max_response_tokens,
            temperature=1.0,
            shuffle_dataset=False,
            max_steps=setting.num_minibatches * (setting.warmup + setting.num_batches),
        ),
        reward_funcs=lambda completion_ids, **_: [float(is_correct(c)) for c in completion_ids],
        train_dataset=Dataset.from_dict({"prompt": prompt_texts(setting, tokenizer)}),
        processing_class=tokenizer,
        callbacks=[AtEnds()],
    )
    whole.enter_context(clock("whole"))
    trainer.train()
    for one in batches:
        for kind in ("", "cpu/"):
            apart = one[f"{kind}generation"] + one.get(f"{kind}old_log_probs", 0.0)
            one[f"{kind}update"] = one[f"{kind}whole"] - apart
    return batches[setting.warmup :]


if __name__ == "__main__":
    main()
