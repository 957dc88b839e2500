"""The phases of a start, a function for each, in the order in which `Run.start` calls them.

    check_inputs -> join -> begin_branch -> start_pool -> build_policy -> resume -> start_colocated

and if some ranks only generate

    check_inputs -> join -> begin_branch -> build_policy -> resume -> order_generation
    check_inputs -> join -> start_side                                 on those ranks

User errors are found in the first phase, before any process waits for another; errors that depend
on the peers in the second, before any model is built.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from gapo_megatron import checkpoint, rewards
from gapo_megatron.checkpoint import State
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import CONFIG_NAME, VERIFIED_SEQUENCES, Config
from gapo_megatron.config.roles import flat
from gapo_megatron.config.run_sections import RunConfig
from gapo_megatron.data.source import PromptSource
from gapo_megatron.data.template_date import DATE, DATE_NAME
from gapo_megatron.io.files import write_atomically
from gapo_megatron.io.metric_files import check_metrics
from gapo_megatron.io.run_folder import VERIFIERS_FOLDER, is_finished
from gapo_megatron.io.toml_tree import to_toml
from gapo_megatron.learn.checks.range_check import check_range
from gapo_megatron.learn.plan import DataParallelRanks
from gapo_megatron.models.lora import factors_of
from gapo_megatron.policy import Policy, initialize
from gapo_megatron.policy.export import exported_by
from gapo_megatron.rollout.calls import Acting
from gapo_megatron.rollout.engine import Engine
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.rollout.rollouter import Rollouter
from gapo_megatron.rollout.samples import Samples
from gapo_megatron.rollout.sync import prompts_as_sequences, sync
from gapo_megatron.rollout.table import to_rollouts
from gapo_megatron.rollout.verify import WeightCheck
from gapo_megatron.run import process_group, processes
from gapo_megatron.run.attempt import Attempt
from gapo_megatron.run.colocated import Colocated
from gapo_megatron.run.cores import share_of_cores
from gapo_megatron.run.engines import build_engine, check_engine
from gapo_megatron.run.generation_ranks import GenerationRanks
from gapo_megatron.run.generation_side import GenerationSide
from gapo_megatron.run.inputs import Inputs, log_readings
from gapo_megatron.run.process_group import World

logger = logging.getLogger(__name__)


def join(config: Config, inputs: Inputs, startup: Stopwatch) -> tuple[World, Attempt]:
    """Seed the generators, meet the other ranks, take the run folder, and check the engine.

    From here on `startup` reports each part to the attempt.

    Collectives: creation of the process group; those of `Attempt.begin`.

    Raises:
        ConfigError, MachineError: see `process_group.start` and `check_engine`.
        FencedError: a newer attempt has taken the run.
    """
    process_group.seed_everything(config.run.seed)
    run_dir = Path(config.run.output_dir)
    with startup("process_group"):
        world = process_group.start(
            config.parallel.timeout_s,
            alike={
                "program": "train",
                "run": str(run_dir.absolute()),
                DATE: inputs.source.date,
                **flat(config),
            },
            rollout=config.rollout,
        )
        attempt = Attempt.begin(
            run_dir,
            hang_timeout_s=config.run.hang_timeout_s,
            stop_margin_s=config.run.stop_margin_s,
            may_lead=world.bridge is None or not world.bridge.is_generation,
        )
        if world.bridge is not None:
            attempt.on_alive = world.bridge.beat
    log_readings(config)
    startup.on_enter = lambda part: attempt.enter(f"startup: {part}")
    num_engine_ranks = world.bridge.num_generation if world.bridge else world.world_size
    check_engine(config, inputs.hf_config, world.device, world_size=num_engine_ranks)
    return world, attempt


def begin_branch(config: Config, inputs: Inputs, attempt: Attempt, startup: Stopwatch) -> None:
    """Make the branch point, if any, the run's own first checkpoint. Collective."""
    if inputs.branch_point is not None:
        with startup("branch"):
            checkpoint.begin_branch(inputs.branch_point, config, attempt)


def start_pool(config: Config) -> rewards.Pool:
    """Start the verifier workers; `Pool.wait_until_ready` waits for them. Collective."""
    num_workers = config.reward.num_workers or min(share_of_cores(), 8)
    output = None
    if config.reward.code_names:
        folder = Path(config.run.output_dir) / VERIFIERS_FOLDER
        folder.mkdir(exist_ok=True)
        output = folder / f"rank_{processes.stated_rank() or 0}.log"
    return rewards.start_pool(config.reward, num_workers=num_workers, output=output)


def build_policy(config: Config, world: World, attempt: Attempt, startup: Stopwatch) -> Policy:
    """Build model and optimizer, with the initial weights. Collective."""
    with startup("model"):
        policy = Policy.build(config, initialize(config.parallel), world.device)
        policy.load_initial_weights(on_bytes=lambda _: attempt.alive())
    return policy


def resume(
    config: Config, policy: Policy, source: PromptSource, attempt: Attempt, startup: Stopwatch
) -> State | None:
    """Load the newest complete checkpoint of the run folder, if any, and write the config there.

    The config is written only now: a finished or refused run must keep its own.

    Args:
        config: the run's settings.
        policy: receives weights and optimizer.
        source: receives its data position.
        attempt: told that this rank is alive while files are read.
        startup: times the part `checkpoint`.

    Returns:
        State of the run; None for a new run.

    Collectives: those of `checkpoint.load_latest`.

    Raises:
        CheckpointError, ConfigError: see `checkpoint.load_latest`.
        DataError: metrics of a step that will not be repeated are damaged.
    """
    run_dir = Path(config.run.output_dir)
    with startup("checkpoint"):
        state = checkpoint.load_latest(
            run_dir, policy=policy, config=config, on_bytes=lambda _: attempt.alive()
        )
    if policy.groups.rank == 0:
        write_atomically(run_dir / CONFIG_NAME, to_toml(config))
        if source.date:  # pinned, perhaps
            write_atomically(run_dir / DATE_NAME, source.date)
        checkpoint.record_branch(run_dir, state.branch if state else None)
        check_metrics(run_dir, resume_step=state.step if state else 0)
    if state is not None:
        source.load_state_dict(dict(state.source))
    return state


@dataclass(frozen=True, slots=True)
class Trainer:
    """Parts of a run that exist before its engines are started."""

    config: Config
    inputs: Inputs
    world: World
    attempt: Attempt
    policy: Policy
    state: State
    stopwatch: Stopwatch
    """Times the stages of the steps."""


def start_generation(
    trainer: Trainer, pool: rewards.Pool | None, startup: Stopwatch
) -> Colocated | GenerationRanks:
    """Start generation; in fp16, check first that the weights are in its range.

    Args:
        trainer: the rest of the run.
        pool: verifier workers of this rank; None if other ranks generate.
        startup: times the parts.

    Collectives, errors: in fp16 those of `check_range`; those of `start_colocated` or
    `order_generation`.
    """
    if trainer.config.model.precision == "fp16":
        with startup("model"):
            probe = prompts_as_sequences(trainer.inputs.problems, VERIFIED_SEQUENCES)
            check_range(trainer.policy, probe)
    generation = (
        order_generation(trainer, startup)
        if pool is None
        else start_colocated(trainer, pool, startup)
    )
    trainer.state.open_groups = ()  # all tokens on every rank: generation keeps a part from here on
    return generation


def start_colocated(trainer: Trainer, pool: rewards.Pool, startup: Stopwatch) -> Colocated:
    """Build the rollout engine beside the policy, and give it the policy's weights.

    Collectives: those of `build_engine`, of `DataParallelRanks.gather` and of `sync`.

    Raises:
        RolloutError: vLLM refuses, for want of memory for instance.
        WeightSyncError: the engine does not compute what the policy computes.
    """
    config, inputs, policy = trainer.config, trainer.inputs, trainer.policy
    with startup("vllm"):
        policy.make_room()  # vLLM checks at its start that its share of memory is free
        policy.make_room_of_weights()
        engine = build_engine(config, inputs.hf_config, trainer.world)
    with startup("sync"):
        probe = prompts_as_sequences(inputs.problems, VERIFIED_SEQUENCES)
        check = sync(policy, engine, probe, policy_version=trainer.state.step)
        _say_if_merged(check, trainer.attempt)
    pool.wait_until_ready()
    rollouter = build_rollouter(config, inputs, engine, pool)
    rollouter.resume(trainer.state.open_groups)
    return Colocated(
        config=config,
        engine=engine,
        rollouter=rollouter,
        policy=policy,
        pool=pool,
        source=inputs.source,
        held_out=inputs.held_out,
        attempt=trainer.attempt,
        stopwatch=trainer.stopwatch,
        dp_ranks=DataParallelRanks.gather(policy.groups, engine.replicas.gloo_group),
    )


def order_generation(trainer: Trainer, startup: Stopwatch) -> GenerationRanks:
    """Send the ranks that only generate the data position and the policy's weights.

    Within an open step the weights have no version, so none are sent before its end.

    Collectives: those of `DataParallelRanks.gather` and of `GenerationRanks.sync`.

    Raises:
        WeightSyncError: an engine does not compute what the policy computes; raised on its ranks.
    """
    state, inputs, world = trainer.state, trainer.inputs, trainer.world
    bridge = world.bridge
    assert bridge is not None
    numbers = [inputs.source.number_of(group[0].prompt.id) for group in state.open_groups]
    opened = to_rollouts(state.open_groups, problems=numbers)
    generation = GenerationRanks(
        config=trainer.config,
        bridge=bridge,
        policy=trainer.policy,
        attempt=trainer.attempt,
        stopwatch=startup,
        gloo_group=world.gloo_group,
        source_state=inputs.source.state_dict(),
        next_step=state.step + (state.open_step is not None),
        problems=inputs.source.problems,
        open_groups=opened.spread(rank=world.rank, size=world.world_size),
    )
    if not state.num_open_updates:
        probe = prompts_as_sequences(inputs.problems, VERIFIED_SEQUENCES)
        check = generation.sync(probe, policy_version=state.step)
        _say_if_merged(check, trainer.attempt)
        if state.open_step is not None:  # its batch exists: order the next batches
            generation.sample_ahead()
    generation.stopwatch = trainer.stopwatch
    return generation


def _say_if_merged(check: WeightCheck | None, attempt: Attempt) -> None:
    """Warn that the engine rounds what the policy computes with."""
    if check is not None and check.merge_rounding is not None and attempt.leads:
        logger.warning(
            "the engine gets weights with the adapter merged in, W + scale * B A rounded to the "
            "dtype of W; sync/merge_rounding measures it. Only vLLM computes with factors, and not "
            "those of experts, beside quantised weights (rollout.quantization) or in fp32 on a GPU"
        )


def start_side(
    config: Config, inputs: Inputs, world: World, attempt: Attempt, startup: Stopwatch
) -> GenerationSide:
    """Build engine and verifiers of a rank that only generates; orders bring the weights.

    Collectives: those of `build_engine`, over the ranks that only generate.

    Raises:
        RolloutError: vLLM refuses, for want of memory for instance.
    """
    assert world.bridge is not None
    adapter, num_ranks = config.adapter, world.bridge.num_training
    exported = exported_by(config, inputs.hf_config, num_ranks=num_ranks)
    pool = start_pool(config)
    with startup("vllm"):
        engine = build_engine(config, inputs.hf_config, world)
    pool.wait_until_ready()
    attempt.go_on(world.gloo_group)  # whose operations end once a rank is gone
    return GenerationSide(
        config=config,
        bridge=world.bridge,
        source=inputs.source,
        held_out=inputs.held_out,
        attempt=attempt,
        engine=engine,
        rollouter=build_rollouter(config, inputs, engine, pool),
        pool=pool,
        is_first=world.rank == 0,
        exported=exported,
        factors=[]
        if adapter.kind == "none"
        else factors_of(exported.rules, targets=adapter.targets, rank=adapter.rank),
    )


def build_rollouter(
    config: Config, inputs: Inputs, engine: Engine, pool: rewards.Pool
) -> Rollouter:
    """Build the rollouter that the config asks for."""
    acting = Acting(
        inputs.environment,
        config.environment,
        inputs.turns,
        max_response_tokens=config.rollout.max_response_tokens,
        vocab_size=engine.vocab_size,
        run_dir=Path(config.run.output_dir),
        template_variables=config.data.chat_template_kwargs,
    )
    rollouter = Rollouter(
        engine,
        inputs.source,
        pool,
        acting,
        batch=config.batch,
        sampling=SamplingSettings(
            num_samples=config.batch.rollouts_per_prompt,
            max_response_tokens=config.rollout.max_response_tokens,
            seed=config.run.seed,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            keeps_routes=config.objective.replayed_routes == "rollout",
        ),
        reward=config.reward,
    )
    rollouter.counts_drafts = config.rollout.draft != "none"
    rollouter.virtual_correct = config.objective.resolve().virtual_correct
    rollouter.samples = Samples(inputs.tokenizer, num_per_step=config.metrics.samples_per_step)
    return rollouter


def is_finished_everywhere(run: RunConfig, world: World, attempt: Attempt) -> bool:
    """Whether rank 0 of the job finds the run finished; if so, closes the bridge.

    Returns:
        The same on every rank.

    Collectives: a broadcast over the trainers; if it is finished, that of `Bridge.close`.
    """
    bridge = world.bridge
    if bridge is not None and bridge.is_generation:
        answer = (
            bridge.wait(lambda: bridge.mail.look("run"), alive=attempt.restart_watch) == b"finished"
        )
    else:
        answer = attempt.leads and is_finished(Path(run.output_dir), num_steps=run.num_steps)
        if bridge is not None and attempt.leads:
            bridge.mail.post("run", b"finished" if answer else b"begins")
        answer = attempt.agree(answer)
    if bridge is not None and answer:
        bridge.close()  # rank 0 hosts the mailbox, which the others have read by now
    return answer


def sizes(world: World) -> dict[str, int]:
    """Numbers of ranks, for the run's timings."""
    if world.bridge is None:
        return {"perf/world_size": world.world_size}
    num_generation = world.bridge.num_generation
    return {
        "perf/world_size": world.bridge.num_training + num_generation,
        "perf/generation_ranks": num_generation,
    }
