"""Train with GAPO: `python -m gapo_megatron.train CONFIG.toml [section.key=value ...] [--dry-run]`.

One process per GPU, all running this file. `train` is the whole run, in the order of its data.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from gapo_megatron import checkpoint, launch, rewards
from gapo_megatron.batching import plan, sequence_lengths
from gapo_megatron.config import Config, load_config
from gapo_megatron.convert import read_hf, write_hf
from gapo_megatron.data import PromptSource, load_tokenizer, read_prompts
from gapo_megatron.dry_run import print_dry_run
from gapo_megatron.errors import ConfigError
from gapo_megatron.evaluate import evaluate
from gapo_megatron.learn import learn
from gapo_megatron.metrics import MetricsWriter, Stopwatch, check_sinks
from gapo_megatron.noise_floor import watch_noise_floor
from gapo_megatron.objective import make_batch
from gapo_megatron.objective.diagnostics import count_by_correct
from gapo_megatron.policy import Policy, initialize
from gapo_megatron.policy.model import read_hf_config
from gapo_megatron.rollout import RolloutEngine, check_engine
from gapo_megatron.types import Group, Prompt
from gapo_megatron.weight_sync import first_sequences, prompts_as_sequences, sync


def train(config: Config) -> None:
    """Run `config` to its last step, from the newest whole checkpoint of its output folder if any.

    Collectives: creates the process group; every rank runs every stage, in this order.

    Raises:
        GapoError: what a user can get wrong is checked before any model is built.
    """
    run_dir = Path(config.run.output_dir)
    checkpoint.check_writable(run_dir)
    check_sinks(config.metrics)
    rewards.check_kind(config.reward.kind)
    if (run_dir / "hf").resolve() == Path(config.model.hf_dir).resolve():
        raise ConfigError(
            f"model.hf_dir ({config.model.hf_dir}) must not be run.output_dir/hf: the trained "
            "model is written there"
        )
    hf_config = read_hf_config(config.model.hf_dir)
    checkpoint.check_model(run_dir, hf_config)
    tokenizer = load_tokenizer(config.model.hf_dir)
    problems, held_out = _read_problems(config, tokenizer)
    launch.seed_everything(config.run.seed)
    world = launch.start(
        config.parallel.timeout_s, cpu_kv_cache_gib=config.rollout.cpu_kv_cache_gib
    )
    check_engine(config, hf_config, world.device, world_size=world.world_size)

    groups = initialize(config.parallel)
    policy = Policy.build(config, groups, world.device)
    policy.load_hf_weights(read_hf(config.model.hf_dir))
    source = PromptSource(problems, seed=config.run.seed)
    method = config.objective.resolve()
    resumed = checkpoint.load_latest(run_dir, policy=policy, config=config)
    first_step = 0
    if resumed:
        first_step = resumed.step
        source.load_state_dict(resumed.trainer_state["source"])
    engine = RolloutEngine(config, hf_config, device=world.device)
    probe = prompts_as_sequences(problems, config.rollout.verify_sequences)
    sync(policy, engine, probe, policy_version=first_step)

    writer = MetricsWriter(run_dir, config=config, resume_step=first_step, enabled=world.rank == 0)
    stopwatch = Stopwatch()
    for step in range(first_step, config.run.num_steps + 1):
        is_last = step == config.run.num_steps
        if held_out and (is_last or step % config.evaluation.every_steps == 0):
            with stopwatch("evaluate"):
                evaluated = evaluate(
                    engine,
                    held_out,
                    tokenizer=tokenizer,
                    config=config,
                    step=step,
                    output_dir=run_dir / "evaluations" if world.rank == 0 else None,
                )
            writer.log(step, evaluated)
        if is_last:
            break

        with stopwatch("rollout"):
            prompts = engine.share(source.next_batch(config.batch.rollout_prompts))
            rollouts = engine.generate(
                prompts,
                num_samples=config.batch.rollouts_per_prompt,
                seed=config.run.seed,
                step=step,
                max_response_tokens=config.rollout.max_response_tokens,
                temperature=config.rollout.temperature,
                top_p=config.rollout.top_p,
                progress=True,
            )
        with stopwatch("reward"):
            verdicts = rewards.score(config.reward.kind, prompts, rollouts, tokenizer=tokenizer)
            judged = engine.gather(
                [Group(*one) for one in zip(prompts, rollouts, verdicts, strict=True)]
            )
        with stopwatch("plan"):
            batch = make_batch(judged, method)
            packing = plan(
                sequence_lengths(batch),
                batch.advantages,
                num_response_tokens=batch.num_response_tokens,
                valid=batch.valid,
                num_minibatches=config.batch.num_minibatches,
                max_tokens_per_microbatch=config.batch.max_tokens_per_microbatch,
                data_parallel_size=groups.dp_size,
                keep_zero_advantage=config.objective.needs_every_sequence,
            )
        with stopwatch("sleep"):
            engine.sleep()
        noise = watch_noise_floor(
            policy, batch, config, stopwatch, step=step, first_step=first_step
        )
        learned = learn(policy, batch, packing, config, stopwatch)
        with stopwatch("sync"):
            probe = first_sequences(batch, config.rollout.verify_sequences)
            check = sync(policy, engine, probe, policy_version=step + 1)

        counted = count_by_correct(batch, group_size=config.batch.rollouts_per_prompt)
        metrics = _rollout_metrics(judged) | counted | learned | noise
        metrics["sync/max_abs_log_prob_diff"] = check.max_abs_diff
        # Before the checkpoint: a kill between the two repeats the step, its line is replaced.
        num_tokens = int(batch.num_response_tokens.sum())
        writer.log(step, metrics, stopwatch.lap(num_tokens=num_tokens))
        done, every = step + 1, config.checkpoint.every_steps
        if done == config.run.num_steps or (every and done % every == 0):
            with stopwatch("checkpoint"):
                checkpoint.save(
                    run_dir,
                    step=done,
                    policy=policy,
                    trainer_state={"source": source.state_dict()},
                    config=config,
                    keep_last=config.checkpoint.keep_last,
                )

    writer.close()
    write_hf(
        policy.iterate_hf_weights(),
        source_dir=config.model.hf_dir,
        output_dir=run_dir / "hf",
        write=world.rank == 0,
    )


def _read_problems(
    config: Config, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Prompt], list[Prompt]]:
    """Training and held-out problems; none held out when the run does not evaluate."""
    data = config.data
    limits: dict[str, Any] = {
        "tokenizer": tokenizer,
        "max_prompt_tokens": data.max_prompt_tokens,
        "chat_template": data.chat_template,
    }
    problems = read_prompts(data.train_path, min_prompts=config.batch.rollout_prompts, **limits)
    held_out = read_prompts(data.eval_path, **limits) if config.evaluation.every_steps else []
    return problems, held_out


def _rollout_metrics(groups: list[Group]) -> dict[str, float]:
    rewards_known = [r for group in groups for r in group.rewards if r == r]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        "reward/mean": sum(rewards_known) / max(len(rewards_known), 1),
        "rollout/response_length/mean": sum(len(r.token_ids) for r in rollouts) / len(rollouts),
        "rollout/truncated": sum(r.truncated for r in rollouts) / len(rollouts),
    }


def main() -> None:
    """Parse the command line and train; see `launch.fail_fast` for exit codes."""
    parser = argparse.ArgumentParser(
        prog="python -m gapo_megatron.train", description=__doc__.split("\n\n")[1]
    )
    parser.add_argument("config", help="TOML file; see configs/")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="settings that replace those of the file, e.g. objective.method=gspo run.seed=1",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved config and its arithmetic, build nothing, and exit",
    )
    arguments = parser.parse_args()
    with launch.fail_fast():
        config = load_config(arguments.config, arguments.overrides)
        if arguments.dry_run:
            print_dry_run(config, world_size=launch.world_size())
        else:
            train(config)


if __name__ == "__main__":
    main()
