"""LoRA on SmolLM2-135M-Instruct: how far vLLM is from the trainer, and what a step costs.

    python benchmarks/adapter.py            (needs the model and the task of studies/language)
    python benchmarks/adapter.py --parts distances -- model.hf_dir=MODEL data.train_path=FILE

`train`: GAPO in fp32 on the task of configs/demo_language.toml; the factors after 0, 1, 10 and 100
updates are kept in OUTPUT/factors_N.pt. In fp32 because a CPU without 16-bit units multiplies five
times as slowly in bf16.

`distances`: trainer and vLLM in bf16 with those factors. At every state vLLM samples the sequences
once, and scores them with the factors beside its weights, then with merged weights, rounded to bf16
as the weight sync sends them. D is a sequence's mean difference of log-probs, in nats: what shifts
its ratio. "Exact", "rounded": fp32 in transformers, with unrounded merged weights or with these.

`costs`: a process that trains all weights and one that trains factors, in bf16, in turns; the first
of 1 + `--repetitions` is dropped. Peak memory is the largest resident memory of the process in an
update, less that before the model was built. A sync is timed without the check of log-probs.
The figures are written to OUTPUT, too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gapo_megatron import checkpoint
from gapo_megatron.checkpoint import State
from gapo_megatron.config import AdapterConfig, Config, load_config
from gapo_megatron.learn.plan import plan_scoring
from gapo_megatron.learn.score import score
from gapo_megatron.learn.step import learn
from gapo_megatron.learn.update import update
from gapo_megatron.policy import Policy, initialize
from gapo_megatron.policy.low_rank import merge
from gapo_megatron.rollout.adapter_sync import Sending, update_adapter
from gapo_megatron.rollout.engine import Needs
from gapo_megatron.rollout.generate import generate
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.rollout.vllm import RolloutEngine
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.run import process_group
from gapo_megatron.run.inputs import check_inputs
from gapo_megatron.run.run import Run
from gapo_megatron.types import Prompt
from gapo_tools.evaluation.statistics import mean_interval
from gapo_tools.planner.deep_dry_run import allocated_bytes

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs/demo_language.toml"
LORA = ("adapter.kind=lora", "adapter.rank=16", "adapter.alpha=32")
QUIET = ("data.eval_path=", "evaluation.every_steps=0", "metrics.rounding_every_steps=0")
TRAINING = (
    "run.num_steps=1000",  # ends after the last state
    "batch.rollout_prompts=8",
    "batch.minibatch_prompts=1",
    "batch.rollouts_per_prompt=4",
    "rollout.max_response_tokens=16",
    "rollout.cpu_kv_cache_gib=1",
    f"rollout.engine={ROOT}/benchmarks/adapter.py:merged_engine",
    "optimizer.learning_rate=2e-4",
    "optimizer.warmup_steps=0",
)
BF16 = ("model.precision=bf16", "rollout.verify_bound=1.0", "rollout.cpu_kv_cache_gib=1")
SEQUENCES, TOKENS = 2, 64  # of an update in `costs`
PAIRS = {  # rows of the table: log-probs, less log-probs
    "vLLM with factors - trainer": ("factors", "trainer"),
    "vLLM merged - trainer": ("merged", "trainer"),
    "trainer - exact": ("trainer", "exact"),
    "rounded weights - exact": ("rounded", "exact"),
    "the update: exact - base": ("exact", "exact, base"),
}
OWNER = SimpleNamespace(name="benchmark", require_ownership=lambda: None)
MIB = 2**20


def read_config(overrides: Sequence[str], *settings: str) -> Config:
    """The config with these settings and, last, the user's."""
    return load_config(CONFIG, [*QUIET, *settings, *overrides])


def train(arguments: argparse.Namespace) -> None:
    """Train factors with GAPO, and keep them after each number of updates."""
    todo = [*arguments.updates]

    def keep() -> bool:
        """Called by `learn` before every mini-batch; nothing stops it."""
        if todo and run.policy.num_updates == todo[0]:
            path = arguments.output / f"factors_{todo.pop(0)}.pt"
            torch.save(factors_module(run.policy).state_dict(), path)
            print(f"{path}: {time.monotonic() - start:.0f} s", flush=True)
        return False

    with tempfile.TemporaryDirectory() as folder:
        settings = (*LORA, *TRAINING, f"run.output_dir={folder}")
        config = read_config(arguments.overrides, *settings)
        run, start = Run.start(config), time.monotonic()
        with run:
            for step in run.steps():
                batch = run.make_batch(run.collect(step))
                progress = run.state.open_step.progress
                of_step = run.policy, batch, config.objective, config.rollout, run.stopwatch
                learned = learn(*of_step, progress=progress, must_stop=keep)
                if not todo:
                    break
                run.log(step, batch, learned, run.sync(step, batch))


def merged_engine(config: Config, hf_config: PretrainedConfig, **where: Any) -> RolloutEngine:
    """An engine for merged weights: right in fp32, and a CPU samples slowly with factors."""
    without = config.model_copy(update={"adapter": AdapterConfig()})
    return RolloutEngine(without, hf_config, **where)


def factors_module(policy: Policy) -> torch.nn.Module:
    """All factors of a policy of one stage."""
    return policy.stages[0].get_submodule("adapter")


def build_policy(config: Config) -> tuple[Policy, process_group.World]:
    """A policy with the model's weights, and this process's group of one rank."""
    world = process_group.start(config.parallel.timeout_s)
    policy = Policy.build(config, initialize(config.parallel), world.device)
    policy.load_initial_weights()
    return policy, world


def build_engine(policy: Policy, config: Config, world: process_group.World) -> RolloutEngine:
    """A vLLM engine without weights."""
    return RolloutEngine(config, policy.hf_config, device=world.device, gloo_group=world.gloo_group)


def send(policy: Policy, engine: RolloutEngine, needs: Needs) -> tuple[float, float, float | None]:
    """Send what `needs` says, as `rollout.sync` does: MiB, seconds, rounding of merged weights."""
    num_bytes, start = [0], time.perf_counter()

    def counted(items: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        for item in items:
            num_bytes[0] += sum(one.nbytes for one in item if isinstance(one, Tensor))
            yield item

    engine.wake()
    sending = Sending(policy, needs)
    if sending.brings_weights:
        with sending.weights() as weights:
            engine.update_weights(counted(weights), policy_version=0)
    if sending.brings_factors:
        factors = counted(sending.factors())
        update_adapter(engine, factors, scale=sending.scale, policy_version=0)
    return num_bytes[0] / MIB, time.perf_counter() - start, sending.rounding


def sample(engine: RolloutEngine, prompts: list[Prompt], settings: SamplingSettings) -> Rollouts:
    """A response to every prompt."""
    groups = generate(engine, prompts, settings)
    tokens = [np.array(prompt.token_ids, dtype=np.int32) for prompt in prompts]
    return Rollouts.of(tokens, [group[0].token_ids for group in groups])


def distances(arguments: argparse.Namespace) -> None:
    """Compare both kinds of sync with the trainer at every state."""
    tokens = f"rollout.max_response_tokens={arguments.tokens}"
    config = read_config(arguments.overrides, *LORA, *BF16, tokens)
    prompts = check_inputs(config).problems[: arguments.sequences]
    policy, world = build_policy(config)
    engine = build_engine(policy, config, world)
    model = AutoModelForCausalLM.from_pretrained(
        config.model.hf_dir, dtype=torch.float32, trust_remote_code=False
    )
    eps_low = config.objective.resolve().eps_low
    print(f"Units of eps_low = {eps_low:g}; [95 % of the mean, over sequences]\n")
    print("| updates | | mean \\|D\\|, nats | of eps_low | rms D | of eps_low | a token's |")
    print("|" + "---|" * 7)
    for n in arguments.updates:
        factors_module(policy).load_state_dict(torch.load(arguments.output / f"factors_{n}.pt"))
        send(policy, engine, "base")
        rollouts = sample(engine, prompts, SamplingSettings(1, arguments.tokens, seed=0, step=n))
        found, rounding = log_probs_of(policy, engine, model, rollouts)
        kept = {"merge_rounding": rounding, "eps_low": eps_low, "log_probs": found}
        (arguments.output / f"distances_{n}.json").write_text(json.dumps(kept))
        for name, (ours, theirs) in PAIRS.items():
            print(f"| {n} | {name} | {cells(found[ours], found[theirs], eps_low)} |")
        sides = [np.abs(means(found[side], found["trainer"])) for side in ("merged", "factors")]
        more = mean_interval((sides[0] - sides[1]).tolist())
        print(
            f"\nafter {n} updates: merge rounding {rounding:.3g}; of the exact update arrive "
            f"{arrived(found, 'trainer'):.2f} in the trainer, {arrived(found, 'rounded'):.2f} in "
            f"rounded weights; mean |D|, merged less factors {more.mean:.2e} "
            f"[{more.low:.2e}, {more.high:.2e}]; {rollouts.num_sampled} tokens\n",
            flush=True,
        )


def log_probs_of(
    policy: Policy, engine: RolloutEngine, model: PreTrainedModel, rollouts: Rollouts
) -> tuple[dict[str, list[list[float]]], float | None]:
    """Log-probs of the responses by way, and the merge rounding; leaves merged weights in vLLM."""
    (plan,) = plan_scoring(rollouts, max_tokens_per_microbatch=1024, data_parallel_size=1)

    def trainer() -> list[np.ndarray]:
        by_row = score(policy, rollouts, plan, temperature=1.0)
        return [by_row[i].numpy() for i in range(len(rollouts))]

    found = {"factors": engine.score(rollouts), "trainer": trainer()}
    *_, rounding = send(policy, engine, "merged")
    found["merged"] = engine.score(rollouts)
    with policy.reference_weights():
        found["trainer, base"] = trainer()
        base = dict(policy.iterate_hf_weights(torch.float32))
    found["exact, base"] = exact_log_probs(model, base, rollouts)
    with Sending(policy, "merged").weights() as weights:
        rounded = {name: weight.float() for name, weight in weights}
    found["rounded"] = exact_log_probs(model, rounded, rollouts)
    for module, a, b in policy.adapter.whole_factors(policy.stages):
        base[f"{module}.weight"] = merge(base[f"{module}.weight"], a, b, scale=policy.adapter.scale)
    found["exact"] = exact_log_probs(model, base, rollouts)
    return {way: [one.tolist() for one in arrays] for way, arrays in found.items()}, rounding


@torch.no_grad()
def exact_log_probs(
    model: PreTrainedModel, weights: dict[str, Tensor], rollouts: Rollouts
) -> list[np.ndarray]:
    """Log-probs of every response in fp32, by transformers with these weights."""
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    found = []
    for i in range(len(rollouts)):
        prompt, response = rollouts.prompt_ids[i], rollouts.response_ids[i]
        ids = torch.from_numpy(np.concatenate([prompt, response])).long()
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])
        found.append(log_probs[:, 0].numpy())
    return found


def arrived(found: dict[str, list[list[float]]], way: str) -> float:
    """Slope of the update's differences of log-probs in this way against the exact ones."""
    all_of = {name: np.concatenate(one) for name, one in found.items()}
    exact = all_of["exact"] - all_of["exact, base"]
    moved = all_of[way] - all_of["trainer, base" if way == "trainer" else "exact, base"]
    return float(moved @ exact / max(exact @ exact, 1e-30))


def means(ours: list[list[float]], theirs: list[list[float]]) -> np.ndarray:
    """D of every sequence."""
    return np.array([np.mean(np.subtract(*pair)) for pair in zip(ours, theirs, strict=True)])


def cells(ours: list[list[float]], theirs: list[list[float]], eps_low: float) -> str:
    """Cells of a row of the table: mean |D|, rms of D, mean |difference| of a token."""
    d = means(ours, theirs)
    found, rms = mean_interval(np.abs(d).tolist()), float(np.sqrt((d**2).mean()))
    per_token = float(np.abs(np.concatenate(ours) - np.concatenate(theirs)).mean())
    mean = f"{found.mean:.2e} [{found.low:.1e}, {found.high:.1e}] | {found.mean / eps_low:.2f}"
    return f"{mean} | {rms:.2e} | {rms / eps_low:.2f} | {per_token:.2e}"


class Side:
    """A policy of all weights or of factors, in a process of its own."""

    def __init__(self, config: Config) -> None:
        self.before = resident_bytes("VmRSS")
        self.config = config
        self.policy, self.world = build_policy(config)
        ids = np.random.default_rng(0).integers(100, 40000, (SEQUENCES, TOKENS), dtype=np.int32)
        sequences = Rollouts.of(ids[:, :1], ids[:, 1:])
        self.batch = self.policy.pack(sequences, range(SEQUENCES))
        self.engine: RolloutEngine | None = None

    def update(self) -> dict[str, float]:
        """An optimizer step on one micro-batch."""
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what is resident now
        start = time.process_time()
        update(self.policy, [self.batch], lambda scored: (-scored.log_probs.mean(), {}))
        seconds = time.process_time() - start
        weights, gradients, optimizer = allocated_bytes(self.policy)
        return {
            "update, CPU s": seconds,
            "update, peak MiB": (resident_bytes("VmHWM") - self.before) / MIB,
            "weights, MiB": weights / MIB,
            "gradients, MiB": gradients / MIB,
            "optimizer, MiB": optimizer / MIB,
        }

    def save(self) -> dict[str, float]:
        """A checkpoint, with its digests."""
        self.policy.make_room()
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            of_run = {"policy": self.policy, "config": self.config, "attempt": OWNER}
            written = checkpoint.save(folder, State(step=1), **of_run)
            seconds = time.perf_counter() - start
            num_bytes = sum(one.stat().st_size for one in written.iterdir())
        return {"checkpoint, s": seconds, "checkpoint, MiB": num_bytes / MIB}

    def sync(self) -> dict[str, float]:
        """Weight syncs: merged weights, the base and then factors, factors alone."""
        if self.engine is None:
            self.policy.make_room()
            self.engine = build_engine(self.policy, self.config, self.world)
        found = {}
        # Without an adapter each of them is a sync of all weights.
        for needs in cast(tuple[Needs, ...], ("merged", "base", "factors")):
            mib, seconds, _ = send(self.policy, self.engine, needs)
            found |= {f"sync ({needs}), s": seconds, f"sync ({needs}), MiB": mib}
        return found

    def sample(self) -> dict[str, float]:
        """Generation, of prompts and responses of 16 tokens."""
        prompts = [Prompt(f"{i}", tuple(range(100 * i, 100 * i + 16)), "") for i in range(1, 9)]
        start = time.process_time()
        rollouts = sample(self.engine, prompts, SamplingSettings(1, 16, seed=0))
        seconds = time.process_time() - start
        return {"sampling, CPU s of a token": seconds / rollouts.num_sampled}


def resident_bytes(name: str) -> int:
    """A line of this process's status: VmRSS (resident memory) or VmHWM (its peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def serve(connection: Connection, config: Config) -> None:
    """Call the methods of a `Side` that the other end names, until it names none."""
    side = Side(config)
    while name := connection.recv():
        connection.send(getattr(side, name)())


def costs(arguments: argparse.Namespace) -> None:
    """Measure both sides in turns, and print the medians."""
    ends = {}
    for name, settings in (("all weights", ()), ("LoRA", LORA)):
        ends[name], other = SPAWN.Pipe()
        config = read_config(arguments.overrides, *settings, *BF16)
        SPAWN.Process(target=serve, args=(other, config), daemon=False).start()
        other.close()  # an end of the process then ends the wait for it
    found: dict[str, dict[str, list[float]]] = {name: {} for name in ends}
    for method in ("update", "save", "sync", "sample"):
        for repetition in range(1 + arguments.repetitions):
            for name, end in ends.items():
                end.send(method)
                for key, value in end.recv().items():
                    if repetition:
                        found[name].setdefault(key, []).append(value)
    for end in ends.values():
        end.send("")
    (arguments.output / "costs.json").write_text(json.dumps(found, indent=1))
    sides = [
        {key: statistics.median(values) for key, values in one.items()} for one in found.values()
    ]
    print(f"bf16, {SEQUENCES} sequences of {TOKENS} tokens; medians of {arguments.repetitions}\n")
    print("| | all weights | LoRA | of all weights |\n|---|---|---|---|")
    for key, of_all in sides[0].items():
        of_lora = sides[1][key]
        print(f"| {key} | {of_all:.4g} | {of_lora:.4g} | {of_lora / of_all:.1%} |")


def main() -> None:
    """Run every part in a process of its own: Megatron-core and vLLM keep global state."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--output", type=Path, default=Path("runs/adapter"), help="a folder")
    parser.add_argument("--updates", type=int, nargs="+", default=[0, 1, 10, 100])
    parser.add_argument("--sequences", type=int, default=24, help="of `distances`, at each state")
    parser.add_argument("--tokens", type=int, default=16, help="longest response of `distances`")
    parser.add_argument("--repetitions", type=int, default=3, help="of `costs`")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of the config")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for part in arguments.parts:
        print(f"== {part}", flush=True)
        process = SPAWN.Process(target=PARTS[part], args=(arguments,))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)


PARTS = {"train": train, "distances": distances, "costs": costs}
SPAWN = multiprocessing.get_context("spawn")

if __name__ == "__main__":
    main()
