"""The training loop: one process per GPU, all running `run`, in the order of its data.

`gapo_megatron.train` reads the command line and refuses what it can before this file is imported:
torch, transformers, Megatron-core and vLLM come with it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from gapo_megatron import checkpoint, rewards
from gapo_megatron.batching import plan, sequence_lengths
from gapo_megatron.checkpoint import OpenStep
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import CONFIG_NAME, VERIFIED_SEQUENCES, Config
from gapo_megatron.config.roles import flat
from gapo_megatron.data.schema import read_prompts
from gapo_megatron.data.source import PromptSource
from gapo_megatron.data.tokenizer import load_tokenizer
from gapo_megatron.evaluate.evaluate import evaluate
from gapo_megatron.hf.manifest import list_steps
from gapo_megatron.hf.weights import write_hf
from gapo_megatron.io.files import write_atomically
from gapo_megatron.io.metric_files import check_metrics
from gapo_megatron.io.run_folder import checkpoints_dir, has_finished, is_finished, mark_finished
from gapo_megatron.io.toml_tree import to_toml
from gapo_megatron.learn.carry import carry
from gapo_megatron.learn.noise_floor import watch_noise_floor
from gapo_megatron.learn.step import learn
from gapo_megatron.objective import make_batch
from gapo_megatron.objective.diagnostics import CorrelationWindow, count_by_correct
from gapo_megatron.policy import Policy, initialize
from gapo_megatron.policy.load import check_megatron_dir
from gapo_megatron.policy.model import read_hf_config
from gapo_megatron.rollout.rollouter import check_problems, sample
from gapo_megatron.rollout.sync import first_sequences, prompts_as_sequences, sync
from gapo_megatron.rollout.vllm import RolloutEngine, check_engine
from gapo_megatron.run import processes as environment
from gapo_megatron.run.attempt import Attempt
from gapo_megatron.run.memory import StepMemory
from gapo_megatron.run.metrics import MetricsWriter
from gapo_megatron.run.placement import is_first, process_age_s
from gapo_megatron.types import OpenGroup, Prompt

logger = logging.getLogger(__name__)


def run(config: Config, *, keep_weights: bool) -> None:
    """Do what `gapo_megatron.train.train` says, once it has checked what needs no torch.

    Collectives: creates the process group; every rank runs every stage, in this order.
    """
    startup = Stopwatch()
    startup.seconds["imports"] = process_age_s()
    run_dir = Path(config.run.output_dir)
    num_steps, every_steps = config.run.num_steps, config.evaluation.every_steps
    hf_config = read_hf_config(config.model.hf_dir)
    if config.model.megatron_dir:
        check_megatron_dir(config, hf_config)
    if is_first():
        checkpoint.check_resume(run_dir, hf_config, config)
    branch_point = checkpoint.check_branch(config, hf_config)
    tokenizer = load_tokenizer(config.model.hf_dir, facts=hf_config)
    has_begun = branch_point is not None or bool(list_steps(checkpoints_dir(run_dir)))
    problems, held_out = _read_problems(config, tokenizer, has_begun=has_begun)
    source = PromptSource(problems, seed=config.run.seed)
    if branch_point is not None:
        source.load_state_dict(branch_point.trainer_state()["source"])  # refuses other problems
    environment.seed_everything(config.run.seed)
    with startup("process_group"):
        world = environment.start(
            config.parallel.timeout_s,
            alike={"program": "train", "run": str(run_dir.absolute()), **flat(config)},
            cpu_kv_cache_gib=config.rollout.cpu_kv_cache_gib,
        )
        attempt = Attempt.begin(
            run_dir,
            hang_timeout_s=config.run.hang_timeout_s,
            stop_margin_s=config.run.stop_margin_s,
        )
    startup.on_enter = lambda part: attempt.enter(f"startup: {part}")
    check_engine(config, hf_config, world.device, world_size=world.world_size)
    if attempt.agree(world.rank == 0 and is_finished(run_dir, num_steps=num_steps)):
        logger.info("all %d steps are done: %s", num_steps, run_dir / "hf")
        return attempt.end("finished")
    if branch_point is not None:
        with startup("branch"):
            checkpoint.begin_branch(branch_point, config, attempt)

    num_workers = config.reward.num_workers or min(environment.share_of_cores(), 8)
    pool = rewards.start_pool(config.reward, num_workers=num_workers)
    with startup("model"):
        groups = initialize(config.parallel)
        policy = Policy.build(config, groups, world.device)
        policy.load_initial_weights(on_bytes=lambda _: attempt.alive())
    window = CorrelationWindow()
    method = config.objective.resolve()
    with startup("checkpoint"):
        resumed = checkpoint.load_latest(
            run_dir, policy=policy, config=config, on_bytes=lambda _: attempt.alive()
        )
    if world.rank == 0:  # not before: of a run that is finished, or refused, it must stay
        write_atomically(run_dir / CONFIG_NAME, to_toml(config))
        checkpoint.record_branch(run_dir, resumed.branch if resumed else None)
    first_step = resumed.step if resumed else 0
    if world.rank == 0:
        check_metrics(run_dir, resume_step=first_step)
    if resumed:
        source.load_state_dict(resumed.trainer_state["source"])
        if not resumed.changes_objective:  # its steps are those of one objective
            window.load_state_dict(resumed.trainer_state["window"])
    with startup("vllm"):
        policy.make_room()  # vLLM looks at its start whether the memory it may have is free
        policy.make_room_of_weights()
        engine = RolloutEngine(config, hf_config, device=world.device)
    with startup("sync"):
        probe = prompts_as_sequences(problems, VERIFIED_SEQUENCES)
        sync(policy, engine, probe, policy_version=first_step)
    pool.wait_until_ready()

    writer = MetricsWriter(run_dir, config=config, resume_step=first_step, enabled=world.rank == 0)
    writer.log_startup(first_step, startup.seconds, world_size=world.world_size)
    step, finished = first_step, False
    stopwatch = Stopwatch(lambda stage: attempt.enter(f"step {step}: {stage}"))
    stopwatch.recent = attempt.stage_seconds()
    memory = StepMemory(world.device)
    opened, saved = None, None
    open_groups: list[OpenGroup] = []
    if resumed:
        opened, open_groups = resumed.open_step, resumed.open_groups
        saved = (resumed.step, resumed.num_open_updates)
    if opened:  # a step that a stop has cut in two goes on where it was
        if opened.evaluated:
            writer.log(first_step, opened.evaluated)
        engine.sleep()
    first_sampled = first_step if opened is None else first_step + 1

    def save(step: int) -> None:
        if not keep_weights:
            return
        with stopwatch("checkpoint"):
            checkpoint.save(
                run_dir,
                step=step,
                policy=policy,
                trainer_state={"source": source_state, "window": window.state_dict()},
                config=config,
                attempt=attempt,
                branch=resumed.branch if resumed else None,
                open_step=opened,
                open_groups=open_groups,
            )
        attempt.keep_stage_seconds(stopwatch.recent)

    for step in range(first_step, num_steps + 1):
        source_state = source.state_dict()
        if opened is None:
            evaluates = held_out and (step == num_steps or step % every_steps == 0)
            ahead = ["evaluate"] if evaluates else []
            if step < num_steps:
                num_rounds = 1 + config.batch.dynamic_sampling_rounds
                ahead += [*["rollout", "reward"] * num_rounds, "carry"]
            if attempt.must_stop(stopwatch.expect(*ahead, "checkpoint")):
                break
            evaluated = {}
            if evaluates:
                with stopwatch("evaluate"):
                    outcome = evaluate(
                        engine,
                        held_out,
                        pool=pool,
                        tokenizer=tokenizer,
                        config=config,
                        step=step,
                        output_dir=run_dir / "evaluations" if world.rank == 0 else None,
                        should_abandon=attempt.patience(stopwatch.expect("evaluate")),
                    )
                if outcome is None:
                    break
                evaluated = outcome
                writer.log(step, evaluated)
            if step == num_steps:
                finished = True
                break

            sampled = sample(
                engine,
                source,
                pool,
                tokenizer,
                config,
                open_groups=open_groups,
                attempt=attempt,
                stopwatch=stopwatch,
                step=step,
            )
            if sampled is None:
                break
            source_state = source.state_dict()
            with stopwatch("sleep"):
                engine.sleep()
            memory.note("after_sleep")
            if open_groups := sampled.open_groups:
                with stopwatch("carry"):
                    open_groups = carry(
                        policy,
                        open_groups,
                        config,
                        policy_version=step,
                        gloo_group=engine.gloo_group,
                    )
            batch, metrics = make_batch(sampled.groups, method), sampled.metrics
            metrics |= count_by_correct(batch, group_size=config.batch.rollouts_per_prompt)
            metrics |= watch_noise_floor(
                policy, batch, config, stopwatch, step=step, first_sampled=first_sampled
            )
            opened = OpenStep(batch, metrics, evaluated)
        # From here on a stop keeps the rollouts.
        batch = opened.batch
        with stopwatch("plan"):
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
        learned = learn(
            policy,
            batch,
            packing,
            config,
            stopwatch,
            progress=opened.progress,
            must_stop=lambda: attempt.must_stop(
                stopwatch.expect("old_log_probs", "update", "checkpoint")
            ),
        )
        if learned is None:
            break
        memory.note("update_peak")
        with stopwatch("sync"):
            probe = first_sequences(batch, VERIFIED_SEQUENCES)
            check = sync(policy, engine, probe, policy_version=step + 1)
        memory.note("after_wake")
        stopwatch.notes |= memory.lap(engine.gloo_group)

        metrics = opened.metrics | learned | window.add(learned)
        metrics["sync/max_abs_log_prob_diff"] = check.max_abs_diff
        # Before the checkpoint: a kill between the two repeats the step, its line is replaced.
        num_tokens = int(batch.num_response_tokens.sum())
        writer.log(step, metrics, stopwatch.lap(num_tokens=num_tokens))
        opened = None
        done = step + 1
        if done == num_steps or config.checkpoint.is_due(done):
            save(done)
            saved = (done, None)

    writer.close()
    pool.close()
    if not finished:
        if saved != (step, opened and opened.progress.num_updates):
            save(step)
        return attempt.end("stopped")
    if not keep_weights:
        return attempt.end("finished")
    attempt.enter("export")
    engine.sleep()  # weights that were offloaded need its memory
    if world.rank == 0:
        attempt.require_ownership()
    write_hf(
        policy.iterate_hf_weights(),
        source_dir=config.model.hf_dir,
        output_dir=run_dir / "hf",
        made_by="train",
        or_unmarked=has_finished(run_dir),  # by a version that did not mark it
        write=world.rank == 0,
    )
    if world.rank == 0:
        mark_finished(run_dir, num_steps=num_steps)
    attempt.end("finished")


def _read_problems(
    config: Config, tokenizer: PreTrainedTokenizerBase, *, has_begun: bool
) -> tuple[list[Prompt], list[Prompt]]:
    """Training and held-out problems; none held out when the run does not evaluate.

    A checkpoint to go on from (`has_begun`) has its place among all problems of its file.
    """
    data = config.data
    limits: dict[str, Any] = {
        "tokenizer": tokenizer,
        "max_prompt_tokens": data.max_prompt_tokens,
        "kind": config.reward.kind,
        "chat_template": data.chat_template,
        "keep_unreadable": has_begun,
    }
    problems = read_prompts(data.train_path, **limits)
    check_problems(problems, config)
    held_out = read_prompts(data.eval_path, **limits) if config.evaluation.every_steps else []
    return problems, held_out
