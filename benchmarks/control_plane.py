"""What a step exchanges and computes on the host beside tokens of passes and weights, by ranks.

    PYTHONPATH=. python -m benchmarks.control_plane [--ranks 8 64 512 4096] [--real 2 4 8 16]

Every rank is data parallel and runs the program's own `Run`: engine, verifiers and model are
stand-ins that answer at once. On up to 16 ranks these are processes over gloo; the kernel counts
what each connection brings (TCP_INFO). For more, one rank runs with torch's "fake" group, in which
every other rank sends what this one sends. Messages, bytes and their seconds then follow from its
collectives: the costs are fitted on all real runs but the largest, and compared with that one.
Prints both tables of benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import socket
import statistics
import struct
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from gapo_megatron.checkpoint import State
from gapo_megatron.clock import Stopwatch
from gapo_megatron.data.source import PromptSource
from gapo_megatron.exchange import GroupChannel
from gapo_megatron.learn import step as learning
from gapo_megatron.learn.plan import DataParallelRanks
from gapo_megatron.learn.step import Progress
from gapo_megatron.rewards.verifiers import Shape
from gapo_megatron.rollout.calls import Acting
from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.rollout.rollouter import Rollouter
from gapo_megatron.rollout.samples import Samples
from gapo_megatron.rollout.verify import WeightCheck, verify_weights
from gapo_megatron.rollouts import Batch, Rollouts
from gapo_megatron.run import colocated, run
from gapo_megatron.run.attempt import Attempt
from gapo_megatron.run.colocated import Colocated
from gapo_megatron.run.memory import StepMemory
from gapo_megatron.run.run import Run
from gapo_megatron.run.saving import Checkpoints
from gapo_megatron.run.tokens import TokenRecords
from gapo_megatron.types import Outcome, Prompt, Verdict
from tests.attempt_setup import make_attempt
from tests.configs import config_of
from tests.dist import run_distributed
from tests.scripted_engine import ScriptedEngine

GROUP_SIZE, NUM_PROBLEMS = 8, 40_000
PROMPT_TOKENS, MEAN_TOKENS, MOST_TOKENS = 200, 2000, 8192
STEP_S, STAND_IN = 60.0, "stand-in"
STAGES = {
    "stop": [(Attempt, "must_stop")],
    "data position": [(PromptSource, "state_dict")],
    "verdicts": [(Rollouter, "collect")],
    "facts": [(Rollouter, "_join_ranks")],
    "c, k, A": [(run, "make_batch"), (run, "count_by_correct")],
    "plan": [(run, "plan_step")],
    "tokens": [(Colocated, "bring_tokens")],
    "metrics": [(learning, "_summarize")],
    "verify": [(Run, "sync")],
    "records": [(TokenRecords, "log")],
    "log": [(Run, "log")],
}
"""Functions of each stage, without the stages called from there."""
KINDS = ("all_gather", "all_reduce", "broadcast", "barrier")


@dataclass
class Cost:
    """Of a stage in a step, on rank 0."""

    seconds: float = 0.0
    """Processor time, threads of gloo included."""
    segments: float = 0.0
    megabytes: float = 0.0
    """Sent or received, whichever is more, as the kernel counts them."""
    calls: list[tuple[str, int]] = field(default_factory=list)
    """Collectives and messages sent, with this rank's bytes in each."""

    def messages(self, num_ranks: int) -> tuple[int, int, float]:
        """Calls, messages that gloo passes on in them on rank 0, and their payload in MB."""
        depth, num_messages, payload = math.ceil(math.log2(num_ranks)), 0, 0.0
        for kind, size in self.calls:
            hops = 1 if kind == "message" else depth
            if kind.startswith("all_gather"):  # around the ring, in halves and with receipts
                hops = num_ranks - 1
                num_messages += 2 * hops
            num_messages += hops
            payload += hops * size
        return len(self.calls), num_messages, payload / 1e6


class Ledger:
    """Costs by stage; the innermost of nested stages pays."""

    def __init__(self) -> None:
        self.costs: dict[str, Cost] = defaultdict(Cost)
        self._stages = ["other"]
        self._traffic, self._start_s = traffic(), time.process_time()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._settle()
        self._stages.append(name)
        try:
            yield
        finally:
            self._settle()
            self._stages.pop()

    def _settle(self) -> None:
        seconds, now = time.process_time() - self._start_s, traffic()
        cost, (segments, num_bytes) = self.costs[self._stages[-1]], now - self._traffic
        cost.seconds += seconds
        cost.segments += segments.max()
        cost.megabytes += num_bytes.max() / 1e6
        self._traffic, self._start_s = now, time.process_time()

    def call(self, kind: str, num_bytes: int) -> None:
        self.costs[self._stages[-1]].calls.append((kind, num_bytes))


def traffic() -> np.ndarray:
    """[[segments in, out], [bytes in, out]] of data over this process's connections so far."""
    found = np.zeros((2, 2), dtype=np.int64)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                facts = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
            sent, arrived = struct.unpack_from("2Q", facts, 120)
            found += [struct.unpack_from("2I", facts, 152), (arrived, sent)]
    return found


class AtOnce(ScriptedEngine):
    """An engine whose requests have all ended at the first look."""

    def poll(self) -> list[Any]:
        self._open = {
            name: (asked, said, len(said)) for name, (asked, said, _) in self._open.items()
        }
        return [self._end(name, "stop") for name in list(self._open)]


class Verifiers:
    """A `rewards.Pool` whose verdicts are there at once."""

    correct_above = 0.5

    def __init__(self) -> None:
        self._items: list[Any] = []

    def shape(self, name: str) -> Shape:
        return Shape()

    def submit(self, items: Any) -> list[int]:
        first = len(self._items)
        self._items += items
        return [*range(first, len(self._items))]

    def poll(self) -> None:
        """Nothing to do."""

    def collect(self, numbers: Sequence[int], *, may_end: Callable[[bool], bool]) -> list[Verdict]:
        while not may_end(True):
            pass
        codes = outcomes(np.array([int(self._items[i][1]) for i in numbers]), np.array(numbers))
        return [Verdict(Outcome.of_code(code)) for code in codes]


def outcomes(problems: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Three groups of four teach something; codes of `Outcome`."""
    is_correct = (problems % 4 > 0) & (samples % GROUP_SIZE < 1 + problems % 7)
    return np.where(is_correct, Outcome.CORRECT.code, Outcome.WRONG.code)


class Others(Replicas):
    """The only rank that is there: what the fake group brings becomes the other ranks' facts."""

    source: Any
    ledger: Any

    def gather_tables(self, table: np.ndarray) -> list[np.ndarray]:
        tables = super().gather_tables(table)
        with self.ledger().stage(STAND_IN):
            self._fill(tables)
        return tables

    def _fill(self, tables: list[np.ndarray]) -> None:
        random = np.random.default_rng(1)
        for rank, one in enumerate(tables):
            if rank == self.rank or not len(one):
                continue
            prompts = self.share(self.source.drawn, rank=rank)
            numbers = [self.source.number_of(prompt.id) for prompt in prompts]
            one["problem"] = np.repeat(numbers, GROUP_SIZE)
            one["outcome"] = outcomes(one["problem"], one["sample"])
            one["num_response_tokens"] = one["num_sampled_tokens"] = lengths(random, len(one))
            one["holder"] = rank


class Source(PromptSource):
    """Remembers what it has drawn."""

    def next_batch(self, *arguments: Any, **settings: Any) -> list[Prompt]:
        self.drawn = super().next_batch(*arguments, **settings)
        return self.drawn


def lengths(random: np.random.Generator, count: int) -> np.ndarray:
    """Log-normal, some at the limit."""
    found = random.lognormal(np.log(MEAN_TOKENS) - 0.32, 0.8, count)
    return found.clip(1, MOST_TOKENS).astype(np.int32)


def make_run(
    num_ranks: int, share: int, folder: Path, *, is_lone: bool, ledger: Callable[[], Ledger]
) -> Run:
    """A run of `num_ranks` data-parallel ranks, four updates a step."""
    rank, num_prompts = dist.get_rank(), num_ranks * share // GROUP_SIZE
    config = config_of(
        {
            "run": {"num_steps": 1000},
            "data": {"max_prompt_tokens": PROMPT_TOKENS},
            "batch": {
                "rollout_prompts": num_prompts,
                "minibatch_prompts": num_prompts // 4,
                "rollouts_per_prompt": GROUP_SIZE,
                "max_tokens_per_microbatch": 16384,
            },
            "rollout": {"max_response_tokens": MOST_TOKENS},
        }
    )
    tokens = (*range(PROMPT_TOKENS),)
    source = Source(
        [Prompt(f"p{i}", tokens, str(i)) for i in range(NUM_PROBLEMS if is_lone else 1000)], seed=0
    )
    group: Any = dist.group.WORLD
    replicas = (Others if is_lone else Replicas)(
        rank=rank, world_size=num_ranks, size=1, gloo_group=group
    )
    replicas.source, replicas.ledger = source, ledger
    random = np.random.default_rng(rank)
    engine = AtOnce(
        lambda request: np.zeros(int(lengths(random, 1)[0]), np.int32), replicas=replicas
    )
    environment: Any = SimpleNamespace(
        begin=lambda prompt: prompt.token_ids,
        respond=lambda episode: None,
        judge=lambda episode: ("", episode.prompt.answer),
    )
    turns: Any = SimpleNamespace(messages=None, stop_ids=())
    acting = Acting(environment, config.environment, turns, MOST_TOKENS, engine.vocab_size)
    pool: Any = Verifiers()
    sampling = SamplingSettings(num_samples=GROUP_SIZE, max_response_tokens=MOST_TOKENS, seed=0)
    rollouter = Rollouter(
        engine, source, pool, acting, batch=config.batch, sampling=sampling, reward=config.reward
    )
    tokenizer: Any = SimpleNamespace(decode=lambda ids: "")
    rollouter.samples = Samples(tokenizer, num_per_step=config.metrics.samples_per_step)
    attempt, stopwatch = make_attempt(folder / str(rank)), Stopwatch()
    policy: Any = SimpleNamespace(
        groups=SimpleNamespace(rank=rank, dp_rank=rank, dp_size=num_ranks, is_first_copy=True),
        device=torch.device("cpu"),
        precision="fp32",
        loss_scale=None,
    )
    ranks = DataParallelRanks((*range(num_ranks),), (*range(num_ranks),))
    generation = Colocated(
        config, engine, rollouter, policy, pool, source, (), attempt, stopwatch, ranks
    )
    writer: Any = SimpleNamespace(log_samples=lambda *_: None, log=lambda *_: None)
    writer.samples_of, writer.log_tokens = lambda step: [], lambda *_: None
    inputs: Any = SimpleNamespace(source=source, held_out=(), tokenizer=tokenizer)
    channel = GroupChannel(group)
    return Run(
        config=config,
        state=State(),
        attempt=attempt,
        policy=policy,
        generation=generation,
        inputs=inputs,
        checkpoints=Checkpoints(config, policy, generation, channel, attempt, stopwatch),
        writer=writer,
        stopwatch=stopwatch,
        memory=StepMemory(torch.device("cpu")),
        gloo_group=group,
        tokens=TokenRecords(config, inputs, generation, channel, writer),
    )


def learn(policy: Any, batch: Batch, objective: Any, *_: Any, **given: Any) -> dict[str, float]:
    """In place of `learn.step.learn`: its exchanges and its metrics, without a pass."""
    progress: Progress = given["progress"]
    assert batch.plan is not None
    for _ in batch.plan.minibatches:
        assert not given["must_stop"]()
        progress.grad_norms.append(1.0)
    progress.recorded = sorted(given["recorded"])
    for one in batch.plan.minibatches:
        for row in (i for rows in one.microbatches[policy.groups.dp_rank] for i in rows):
            values = torch.zeros(int(batch.num_sampled_tokens[row]))
            progress.records[row] = {
                "log_probs": values,
                "old_log_probs": values,
                "clipped": torch.zeros(1, dtype=torch.bool),
                "facts": torch.zeros(3, dtype=torch.float64),
            }
    summarize: Any = learning._summarize
    found: dict[str, float] = summarize(policy, batch, progress, objective, objective.resolve())
    return found


def verify(policy: Any, engine: Any, probe: Rollouts, *, policy_version: int) -> WeightCheck:
    """In place of `rollout.sync.sync`: its exchanges, without a pass and without weights."""
    engine.wake()
    log_probs = [engine.score(probe)]
    dist.broadcast_object_list(log_probs, src=0)
    engine.policy_version = policy_version
    return verify_weights(engine, probe, log_probs[0])


def take_steps(num_ranks: int, share: int, num_steps: int, *, is_lone: bool) -> dict[str, Cost]:
    """Medians over steps but the first, on this rank."""
    ledgers = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as patches:
        ledger = Ledger()

        def patch(owner: Any, name: str, new: Any) -> None:
            patches.enter_context(mock.patch.object(owner, name, new))

        for module in (dist, c10d):
            for kind in KINDS:
                patch(module, kind, counted(getattr(module, kind), kind, lambda: ledger, is_lone))
        patch(GroupChannel, "send", counted(GroupChannel.send, "message", lambda: ledger, is_lone))
        if is_lone:
            patch(dist, "new_group", lambda *_, **__: dist.group.WORLD)
        patch(run, "learn", learn)
        patch(colocated, "sync", verify)
        for stage, places in STAGES.items():
            for owner, name in places:
                patch(owner, name, paid(getattr(owner, name), stage, lambda: ledger))
        one = make_run(num_ranks, share, Path(folder), is_lone=is_lone, ledger=lambda: ledger)
        for step in range(num_steps):
            dist.barrier()
            ledger = Ledger()
            with ledger.stage("other"):
                assert next(one.steps()) == step
                batch = one.make_batch(one.collect(step))
                learned = one.learn(batch)
                one.log(step, batch, learned, one.sync(step, batch))
            ledgers.append(ledger.costs)
    return {
        stage: Cost(
            *(
                statistics.median(getattr(costs[stage], name) for costs in ledgers[1:])
                for name in ("seconds", "segments", "megabytes")
            ),
            ledgers[-1][stage].calls,
        )
        for stage in [*STAGES, "other"]
    }


def paid(call: Callable[..., Any], stage: str, ledger: Callable[[], Ledger]) -> Callable[..., Any]:
    """The function, as a stage."""

    @wraps(call)
    def inner(*arguments: Any, **settings: Any) -> Any:
        with ledger().stage(stage):
            return call(*arguments, **settings)

    return inner


def counted(
    call: Callable[..., Any], kind: str, ledger: Callable[[], Ledger], is_lone: bool
) -> Callable[..., Any]:
    """A collective that is noted; where no other rank is, it is done at once."""

    @wraps(call)
    def inner(*arguments: Any, **settings: Any) -> Any:
        if kind == "barrier":
            ledger().call(kind, 0)
        else:
            ledger().call(kind, arguments[kind.startswith(("all_gather", "message"))].nbytes)
        work = call(*arguments, **settings)
        if is_lone and work is not None:
            return SimpleNamespace(is_completed=lambda: True, wait=lambda *_: None)
        return work

    return inner


def alone(num_ranks: int, share: int, num_steps: int) -> dict[str, Cost]:
    """One rank of many, the others copies of it."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    found = take_steps(num_ranks, share, num_steps, is_lone=True)
    dist.destroy_process_group()
    return found


def on_rank(num_ranks: int, share: int, num_steps: int) -> dict[str, Cost]:
    """One of several ranks that are all there."""
    return take_steps(num_ranks, share, num_steps, is_lone=False)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--real", type=int, nargs="*", default=[2, 4, 8, 16], help="over gloo")
    parser.add_argument("--sequences", type=int, default=16, help="sampled by each rank")
    parser.add_argument("--steps", type=int, default=6)
    given = parser.parse_args()
    lone = {n: alone(n, given.sequences, given.steps) for n in sorted({*given.ranks, *given.real})}
    real = {n: run_distributed(on_rank, n, n, given.sequences, given.steps)[0] for n in given.real}
    model = (0.0,) * 5
    if given.real:
        model = fit({n: real[n] for n in given.real[:-1]}, lone)
    if given.real:
        n = given.real[-1]
        print(f"{n} ranks: segments, MB and ms, measured | as predicted from fewer")
        for stage in STAGES:
            found, expected = real[n][stage], predict(lone[n][stage], n, model)
            print(
                f"| {stage} | {found.segments:.0f} / {found.megabytes:.3f} / "
                f"{found.seconds * 1e3:.1f} | {expected.segments:.0f} / "
                f"{expected.megabytes:.3f} / {expected.seconds * 1e3:.1f} |"
            )
    print("| stage: messages / MB / s |", *(f" {n:,} |" for n in given.ranks))
    at = {n: {s: predict(lone[n][s], n, model) for s in STAGES} for n in given.ranks}
    for stage in STAGES:
        cells = [
            f"{lone[n][stage].messages(n)[1]:,} / {at[n][stage].megabytes:.2f} / "
            f"{at[n][stage].seconds:.3f}"
            for n in given.ranks
        ]
        print(f"| {stage} | {' | '.join(cells)} |")
    print("| all |", *(f" {sum(one.seconds for one in at[n].values()):.3f} |" for n in given.ranks))
    for share in (0.01, 0.1):
        first = [(n, s) for n in given.ranks for s in STAGES if at[n][s].seconds > share * STEP_S]
        print(f"first at {share:.0%} of {STEP_S:.0f} s: {first[0] if first else 'none'}")


Model = tuple[float, float, float, float, float]
"""Segments and further bytes of a message; seconds of a call, of a message and of an MB."""


def fit(real: dict[int, dict[str, Cost]], lone: dict[int, dict[str, Cost]]) -> Model:
    """The costs of messages by runs of a few ranks."""
    pairs = [(real[n][stage], lone[n][stage], n) for n in real for stage in STAGES]
    counts = np.array([one.messages(n) for _, one, n in pairs])
    found = np.array([(one.segments, one.megabytes, one.seconds) for one, *_ in pairs]).sum(axis=0)
    _, num_messages, payload = counts.sum(axis=0)
    seconds = np.array([one.seconds - other.seconds for one, other, _ in pairs])
    costs = np.linalg.lstsq(counts, seconds)[0]
    model = (found[0] / num_messages, (found[1] - payload) * 1e6 / num_messages, *costs)
    print(
        "a message: {:.2f} segments, {:.0f} bytes more; s of a call {:.1e}, a message {:.1e}, "
        "an MB {:.1e}".format(*model)
    )
    return model


def predict(lone: Cost, num_ranks: int, model: Model) -> Cost:
    """What a stage costs with messages that travel."""
    counts = lone.messages(num_ranks)
    seconds = lone.seconds + float(np.dot(counts, model[2:]))
    return Cost(seconds, counts[1] * model[0], counts[2] + counts[1] * model[1] / 1e6)


if __name__ == "__main__":
    main()
