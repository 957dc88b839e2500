"""Both ends of a run whose last ranks only generate, over gloo; scripted engines, no policy."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch

from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import Config
from gapo_megatron.data.source import PromptSource
from gapo_megatron.errors import RolloutError
from gapo_megatron.exchange import Posted
from gapo_megatron.learn.plan import plan_step, rounding_share
from gapo_megatron.objective import make_batch
from gapo_megatron.policy.adapters import FULL_WEIGHTS
from gapo_megatron.rewards import Pool
from gapo_megatron.rollout.engine import Request
from gapo_megatron.rollout.factors import check_factors
from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.run import generation_ranks as module
from gapo_megatron.run import generation_side, process_group
from gapo_megatron.run.attempt import Attempt
from gapo_megatron.run.fail_fast import fail_fast
from gapo_megatron.run.generation_ranks import GenerationRanks
from gapo_megatron.run.generation_side import GenerationSide
from gapo_megatron.run.orders import STOP
from gapo_megatron.run.process_group import World
from gapo_megatron.run.start import build_rollouter
from gapo_megatron.types import Prompt
from tests.acting import one_turn_inputs
from tests.adapter_setup import FakeAdapter, factor_rules
from tests.attempt_setup import make_attempt
from tests.configs import config_of
from tests.dist import rank_context, run_sides
from tests.scripted_engine import ScriptedEngine, place_of
from tests.transfer_setup import exported_of, rule_of
from tests.waiting import HANG_S, wait_until

NUM_STEPS, EOS = 4, 1
FACTORS = ("layer", torch.ones(2, 3), torch.ones(4, 2))
NUM_RESPONSES = 4
"""Responses of a generating rank in a step."""
FROZEN = "frozen"
"""File that says that a rank of a run is frozen."""
PROBLEMS = [Prompt(f"p{i}", (2, 10 + i), "", "ab"[i % 2]) for i in range(20)]


def make_config(folder: Path, *, max_staleness: int, **sections: dict[str, Any]) -> Config:
    ahead = {"generation_ranks": 2, "max_staleness": max_staleness}
    defaults = {
        "run": {"output_dir": str(folder), "num_steps": NUM_STEPS},
        "batch": {"rollout_prompts": 4, "minibatch_prompts": 2, "rollouts_per_prompt": 2},
        "rollout": ahead,
        "objective": {"importance_weight_max": 2.0},
        "metrics": {"rounding_every_steps": 0},
    }
    return config_of(defaults, sections)


def response(problem: str, sample: int, *, version: int) -> list[int]:
    """Response sampled by the weights of a version, unlike any other response."""
    number = int(problem.removeprefix("p"))
    return [100 + version, 200 + number, 300 + sample, *[5] * (number % 3), EOS]


def source_of(config: Config) -> PromptSource:
    return PromptSource(PROBLEMS, seed=0, curriculum=config.data.curriculum)


class Tokenizer:
    """Every second sample is correct, as defined by `tests.reward_setup`.

    With `solves`, so is every sample of a problem with an odd number.
    """

    def __init__(self, *, solves: bool = False) -> None:
        self.solves = solves

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}
    all_special_ids = all_special_tokens = ()

    def decode(self, ids: list[int], **_: Any) -> str:
        if ids[0] < 100:
            return f"prompt {ids}"
        return "right" if ids[2] % 2 or (self.solves and ids[1] % 2) else "echo wrong"


def serve(
    world: World,
    config: Config,
    attempt: Attempt,
    before_step: Callable[[ScriptedEngine], object],
    make_engine: Callable[..., ScriptedEngine] = ScriptedEngine,
    say: Callable[..., list[int]] = response,
) -> tuple[list[str], int]:
    """A rank that only generates; returns its orders and sampled tokens."""
    assert world.bridge is not None

    def script(request: Request) -> list[int]:
        said = say(*place_of(request), version=engine.policy_version)
        return said[len(request.response_ids) :]

    size = config.rollout.tensor_parallel_size
    replicas = Replicas.create(size, gloo_group=world.gloo_group)
    engine = make_engine(script, replicas=replicas, before_step=lambda: before_step(engine))
    source = source_of(config)
    inputs = one_turn_inputs(source, Tokenizer(solves=config.data.curriculum is not None))
    pool = Pool("tests.reward_setup", num_workers=1, timeout_s=HANG_S)
    side = GenerationSide(
        config=config,
        bridge=world.bridge,
        source=source,
        held_out=[],
        attempt=attempt,
        engine=engine,
        rollouter=build_rollouter(config, inputs, engine, pool),
        pool=pool,
        is_first=world.rank == 0,
        exported=exported_of([rule_of("w", (3,))], num_ranks=world.bridge.num_training),
        factors=factor_rules([FACTORS]),
    )
    side.serve()
    return [request.name for request in engine.asked], engine.num_tokens


def order(
    world: World, config: Config, attempt: Attempt, adapter: Any = FULL_WEIGHTS, **start: Any
) -> GenerationRanks:
    """Trainer end with the log-probs of the scripted engine."""
    assert world.bridge is not None
    cast(Any, module).score_probe = lambda policy, probe, group: [
        np.full(len(ids), -1.0, np.float32) for ids in probe.response_ids.values()
    ]

    groups = SimpleNamespace(
        rank=world.rank,
        dp_rank=world.rank,
        dp_size=world.world_size,
        world_size=world.world_size,
        is_last_stage=True,
        is_first_copy=True,
    )
    return GenerationRanks(
        config=config,
        bridge=world.bridge,
        policy=cast(
            Any,
            SimpleNamespace(
                groups=groups,
                exported=exported_of([rule_of("w", (3,))], num_ranks=world.world_size),
                shard=lambda name: torch.ones(3),
                stages=(),
                begin_pass=lambda: None,
                adapter=adapter,
            ),
        ),
        attempt=attempt,
        stopwatch=Stopwatch(),
        gloo_group=world.gloo_group,
        problems=PROBLEMS,
        **{
            "source_state": source_of(config).state_dict(),
            "next_step": 0,
            "open_groups": Rollouts.join([]),
        }
        | start,
    )


class FactorsEngine(ScriptedEngine):
    """Keeps what every sync brings; only the factors of the last are right."""

    needs = "base"
    received: list[Any] = []  # noqa: RUF012 (one engine in each process)

    def update_weights(self, tensors: Any, **settings: Any) -> None:
        super().update_weights(tensors, **settings)
        self.received.append(self.weights)
        self.needs, self.policy_version = "factors", -1

    def update_adapter(self, factors: Any, *, scale: float, policy_version: int) -> None:
        if self.needs != "factors":
            raise RolloutError(f"update_adapter, but the engine needs {self.needs}")
        self.policy_version, given = -1, list(factors)
        check_factors(given, {"layer": ((2, 3), (4, 2))})
        held = [(name, float(a.sum()), float(b.sum())) for name, a, b in given]
        self.received.append((held, scale))
        self.policy_version = policy_version


def send_an_adapter(world: World, folder: Path) -> Any:
    """Syncs of three versions, to an engine that computes with factors."""
    assert world.bridge is not None
    config = make_config(folder, max_staleness=0)
    attempt = make_attempt(folder / os.environ["RANK"], may_lead=not world.bridge.is_generation)
    attempt.on_alive = world.bridge.beat
    if world.bridge.is_generation:
        serve(world, config, attempt, lambda engine: None, FactorsEngine)
    else:
        factors = [FACTORS]
        generation = order(world, config, attempt, FakeAdapter(factors, scale=0.5))
        for version in range(3):
            generation.sync(probe(), policy_version=version)
            factors[0][2].add_(1)
        generation.close()
    cast(Any, world.bridge).close = lambda: None  # both sides have ended: `run_sides` need not
    return FactorsEngine.received


def test_an_adapter_travels_without_the_weights_beneath_it(tmp_path: Path) -> None:
    *_, received = run_sides(send_an_adapter, 1, 1, tmp_path)
    assert received == [["w"], *[([("layer", 6.0, 8.0 * (n + 1))], 0.5) for n in range(3)]]


def probe() -> Rollouts:
    return Rollouts.of([np.array([2], np.int32)], [np.array([3, 4], np.int32)])


def train(
    world: World,
    config: Config,
    *,
    until: int,
    at_step: Callable[[], object] = lambda: None,
    before_decoding: Callable[[ScriptedEngine], object] = lambda engine: None,
    before_stop: Callable[[], object] = lambda: None,
    begun: Callable[[Attempt], object] = lambda attempt: None,
) -> Any:
    """Run up to a step at which it is stopped; returns each rank's report."""
    assert world.bridge is not None
    is_generation = world.bridge.is_generation
    folder = Path(config.run.output_dir) / os.environ["RANK"]
    attempt = make_attempt(folder, may_lead=not is_generation)
    attempt.on_alive = world.bridge.beat
    begun(attempt)
    if is_generation:
        return serve(world, config, attempt, before_decoding)
    generation = order(world, config, attempt)
    generation.sync(probe(), policy_version=0)
    seen = []
    for step in range(until):
        rollouts = generation.collect(step)
        assert rollouts is not None
        batch = make_batch(rollouts, config.objective.resolve())
        plan = plan_step(
            batch,
            config.batch,
            needs_every_sequence=config.objective.needs_every_sequence,
            data_parallel_size=world.world_size,
            measured_share=rounding_share(config.model.precision),
        )
        batch = generation.bring_tokens(replace(batch, plan=plan))
        at_step()
        mine = np.flatnonzero(batch.table["holder"] == world.rank).tolist()
        responses = {row: batch.response_ids[row].tolist() for row in mine}
        facts = (rollouts.table.tobytes(), rollouts.samples)
        seen.append((facts, responses, generation.source_state))
        # A run that is ahead stops within its last step.
        if step + 1 < until or not config.rollout.max_staleness:
            generation.sync(probe(), policy_version=step + 1)
            generation.sample_ahead()
    before_stop()
    given_back = generation.discard_ahead()
    generation.close()
    return seen, given_back


def stop_while_one_is_sampled(
    world: World, folder: Path, max_staleness: int, curriculum: float | None
) -> Any:
    """Stop after three of four steps, while a generating rank samples the fourth."""
    generation_side._LOOK_EVERY_S = 0.0
    bridge = world.bridge
    assert bridge is not None

    def wait_for_the_stop(engine: ScriptedEngine) -> None:
        if len(engine.asked) > 3 * NUM_RESPONSES:
            bridge.mail.post(f"under way/{world.rank}", b"")
            bridge.wait(lambda: bridge.mail.look(STOP), alive=lambda: None)

    def wait_for_the_fourth() -> None:
        for name in ("under way/0", "under way/1"):
            bridge.wait(partial(bridge.mail.look, name), alive=lambda: None)

    config = make_config(folder, max_staleness=max_staleness, data={"curriculum": curriculum})
    account = train(
        world,
        config,
        until=3,
        before_decoding=wait_for_the_stop,
        before_stop=wait_for_the_fourth,
    )
    cast(Any, bridge).close = lambda: None  # both sides have ended: `run_sides` need not
    return account


@pytest.mark.parametrize(
    ("max_staleness", "versions", "curriculum"),
    [(0, [0, 1, 2], None), (1, [0, 0, 1], None), (1, [0, 0, 1], 0.9)],
)
def test_every_trainer_learns_from_its_share_of_what_the_others_sampled(
    tmp_path: Path, max_staleness: int, versions: list[int], curriculum: float | None
) -> None:
    """And tokens being sampled at a stop are counted as discarded.

    A curriculum draws a batch by the verdicts of all batches before, also of one that is sampled
    ahead: the trainers have not learned from the last of them yet.
    """
    accounts = run_sides(stop_while_one_is_sampled, 2, 2, tmp_path, max_staleness, curriculum)
    (seen, given_back), (other, also), *sampled = accounts
    source = PromptSource(PROBLEMS, seed=0, curriculum=curriculum)
    names, num_learned = list[str](), 0
    for step, version in enumerate(versions):
        (facts, mine, state), (same, theirs, same_state) = seen[step], other[step]
        prompts = source.next_batch(4)
        places = [(prompt.id, sample) for prompt in prompts for sample in range(2)]
        expected = [response(*place, version=version) for place in places]
        assert [value for _, value in sorted((mine | theirs).items())] == expected
        assert mine and theirs and not {*mine} & {*theirs}
        solved = [int(one.id[1:]) % 2 if curriculum else 0 for one in prompts]
        rewards = np.array([[one, 1.0] for one in solved])
        source.observe([source.number_of(one.id) for one in prompts], rewards, rewards > 0, step=0)
        num_correct = {one.id: 1 + some for one, some in zip(prompts, solved, strict=True)}
        assert facts == same and state == same_state == source.state_dict()
        # The verdicts' reasons are known to the ranks that generate, the texts from there.
        answers = {prompt.id: (prompt.answer, list(prompt.token_ids)) for prompt in prompts}
        assert {(one.problem, one.sample) for one in facts[1]} == {*places}
        for one in facts[1]:
            answer, ids = answers[one.problem]
            is_right = one.sample + num_correct[one.problem] > 1
            reason = "" if is_right else f"wrong for {answer}"
            c = num_correct[one.problem]
            assert (one.step, one.c, one.k, one.reason) == (step, c, 2, reason)
            assert (one.prompt, one.response == "right") == (f"prompt {ids}", is_right)
        names += [f"{problem}/{sample}" for problem, sample in places]
        num_learned += sum(map(len, expected))
    (asked, num_tokens), (also_asked, more_tokens) = sampled
    everything = asked + also_asked
    assert {*names} < {*everything} and len(everything) == len({*everything}), "nothing twice"
    assert given_back == also == num_tokens + more_tokens - num_learned > 0


def count_messages_under_way(world: World, folder: Path, max_staleness: int) -> Any:
    """A run of eight steps; on a rank that generates, the messages it keeps while it decodes."""
    bridge, counts = world.bridge, list[int]()
    assert bridge is not None

    def count(_: ScriptedEngine) -> None:
        counts.append(sum(isinstance(one, Posted) for one in gc.get_objects()))

    config = make_config(folder, max_staleness=max_staleness, run={"num_steps": 9})
    train(world, config, until=8, before_decoding=count)
    cast(Any, bridge).close = lambda: None  # both sides have ended: `run_sides` need not
    return counts


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_tokens_that_have_arrived_are_not_kept(tmp_path: Path, max_staleness: int) -> None:
    trainer, sampled = run_sides(count_messages_under_way, 1, 1, tmp_path, max_staleness)
    assert not trainer and len(sampled) >= 8
    assert max(sampled) <= max_staleness


def run_disturbed(
    job_rank: int, victim: int, number: signal.Signals, port: int, env: dict[str, str], folder: Path
) -> None:
    """A rank of a run in which another rank gets a signal while it trains or generates."""
    output = os.open(folder / f"{job_rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, sys.__stderr__.fileno())  # type: ignore[union-attr]
    os.environ |= {
        "RANK": str(job_rank),
        "WORLD_SIZE": "4",
        "LOCAL_RANK": str(job_rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **env,
    }
    torch.set_num_threads(1)
    config = make_config(folder, max_staleness=0)

    def disturb(*_: Any) -> None:
        if job_rank == victim:
            os.kill(os.getpid(), number)

    def watch(attempt: Attempt) -> None:
        """Count seconds only from when a rank is frozen: what comes before may take its time."""

        def shorten() -> None:
            wait_until((folder / FROZEN).exists, "a frozen rank")
            attempt._hang_timeout_s = 5
            attempt.restart_watch()

        threading.Thread(target=shorten, daemon=True).start()

    with fail_fast():
        world = process_group.start(HANG_S, rollout=config.rollout)
        train(
            world,
            config,
            until=1,
            at_step=disturb,
            before_decoding=disturb,
            begun=watch,
        )


@contextmanager
def disturbed_runs(
    folder: Path, number: signal.Signals, victims: tuple[int, ...], **env: str
) -> Iterator[dict[int, list[BaseProcess]]]:
    """Start parallel runs of two trainers and two generating ranks; returns ranks by victim.

    A rank's output is in `folder/VICTIM/RANK.log`.
    """
    runs: dict[int, list[BaseProcess]] = {}
    for victim in victims:
        (folder / str(victim)).mkdir()
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        arguments = (victim, number, port, env, folder / str(victim))
        runs[victim] = [
            rank_context().Process(target=run_disturbed, args=(rank, *arguments))
            for rank in range(4)
        ]
        for process in runs[victim]:
            process.start()
    try:
        yield runs
    finally:
        for process in itertools.chain(*runs.values()):
            process.kill()
            process.join()


def is_stopped(pid: int | None) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def ends_of_others(ranks: list[BaseProcess], victim: int) -> list[int | None]:
    others = [rank for rank in ranks if rank is not ranks[victim]]
    for rank in others:
        rank.join(HANG_S)
    return [rank.exitcode for rank in others]


def test_a_frozen_rank_is_found_out_on_both_sides(tmp_path: Path) -> None:
    """Each watch ends its own rank, so that the launcher has all stacks."""
    launched = {"GAPO_ATTEMPT_DIR": str(tmp_path)}
    with disturbed_runs(tmp_path, signal.SIGSTOP, (0, 3), **launched) as runs:
        for victim, ranks in runs.items():
            wait_until(lambda: is_stopped(ranks[victim].pid), "a frozen rank")  # noqa: B023
            (tmp_path / str(victim) / FROZEN).touch()
            assert ends_of_others(ranks, victim) == [1, 1, 1], victim
    # A trainer that waits for ranks that generate, and the other way round.
    for frozen, waiting in ((0, 2), (0, 3), (3, 0)):
        log = (tmp_path / str(frozen) / f"{waiting}.log").read_text()
        assert "Timeout (0:00:05)!" in log and "run/bridge.py" in log, (frozen, waiting)
