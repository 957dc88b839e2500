"""The trainer's orders to the ranks that only generate, without a process group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import torch
from torch import Tensor

from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import Config
from gapo_megatron.learn.plan import DataParallelRanks
from gapo_megatron.policy.adapters import FULL_WEIGHTS
from gapo_megatron.policy.export import Exported
from gapo_megatron.rollout.verify import WeightCheck
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.run import generation_ranks as module
from gapo_megatron.run.bridge import LostRanksError
from gapo_megatron.run.generation_ranks import GenerationRanks
from gapo_megatron.run.orders import STOP, Order, pack
from tests.adapter_setup import FakeAdapter
from tests.configs import config_of
from tests.transfer_setup import exported_of, rule_of

T = TypeVar("T")
NO_PROBE = Rollouts.join([])


def make_config(*, max_staleness: int, num_steps: int = 8, every: int = 0) -> Config:
    sections = {
        "run": {"num_steps": num_steps},
        "rollout": {"generation_ranks": 1, "max_staleness": max_staleness},
        "objective": {"importance_weight_max": 2.0},
        "checkpoint": {"every_steps": every},
    }
    return config_of(sections)


class Mail(dict[str, bytes]):
    """A mailbox of one process."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def post(self, name: str, value: bytes) -> None:
        assert name not in self.names, "a name is used once"
        self.names.add(name)
        self[name] = value

    look = dict[str, bytes].get
    take = dict[str, bytes].pop

    def erase(self, name: str) -> None:
        self.pop(name, None)


class Side:
    """A bridge to a side that executes an order when its answer is read."""

    def __init__(self) -> None:
        self.mail = Mail()
        self.done = 0
        self.version = -1
        self.sampled: dict[int, int] = {}
        """Version of the weights that sampled each step's batch."""
        self.log: list[str] = []
        self.aborts: set[int] = set()
        self.messages = SimpleNamespace(rank=0)
        self.needs = "merged"
        self.received: list[list[str]] = []
        """Names of the parameters of every transfer."""

    is_generation = False
    num_training, num_generation, num_lost = 1, 1, 0

    def describe_lost(self) -> str:
        return "rank 7"

    def beat(self) -> None: ...

    def require_whole(self) -> None: ...

    def wait(self, find: Callable[[], T | None], *, alive: Callable[[], object]) -> T:
        while (found := find()) is None:
            self.execute()
        return found

    def execute(self) -> None:
        number, self.done = self.done, self.done + 1
        order = Order.from_bytes(self.mail[f"order/{number}"])
        self.log.append(f"{order.task} {order.step}")
        answer: Any = {}
        if order.task == "weights":
            needs = self.needs if order.scale is not None else "merged"
            self.mail.post(f"ready/{number}", pack(needs))
            self.version = order.step
            answer = dataclasses.asdict(WeightCheck(0.0, 0.0))
        elif order.task == "evaluate":
            answer = {"eval/version": float(self.version)}
        elif order.task == "sample":
            assert order.step not in self.sampled, "a batch is sampled once"
            self.sampled[order.step] = self.version
            is_aborted = order.step in self.aborts or STOP in self.mail
            answer = {"is_aborted": is_aborted, "num_tokens": 10 + order.step}
            about = {
                "clocks": {"generation/rollout_s": 1.0},
                "policy_version": self.version,
                "metrics": {"from": float(order.step)},
                "samples": [],
                "timelines": [],
                "source_state": {"after": order.step},
            }
            if not is_aborted:
                self.mail.post(f"batch/{number}", pack(about))
                self.mail.post(f"table/{number}", Rollouts.join([]).table.tobytes())
        self.mail.post(f"answer/{number}", pack(answer))

    def send_shards(self, exported: Exported, shard_of: Callable[[str], Tensor]) -> None:
        names = [rule.megatron for rule in exported.rules]
        self.received.append([name for name in names if bool(shard_of(name).any())])

    def close(self) -> None:
        while f"order/{self.done}" in self.mail:
            self.execute()


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., GenerationRanks]:
    """Build the trainer's end, at a step of a run."""
    ranks = DataParallelRanks((0,), (0,))
    monkeypatch.setattr(DataParallelRanks, "gather", lambda *_: ranks)
    monkeypatch.setattr(module, "score_probe", lambda *_: [])
    monkeypatch.setattr(module, "rows_by_trainer", lambda *_: [[]])  # batches are empty
    monkeypatch.setattr(module.dist, "broadcast_object_list", lambda *_, **__: None)

    def make(
        side: Side, config: Config, *, next_step: int = 0, adapter: Any = FULL_WEIGHTS
    ) -> GenerationRanks:
        attempt = SimpleNamespace(leads=True, alive=lambda: None, restart_watch=lambda: None)
        policy = SimpleNamespace(
            groups=SimpleNamespace(rank=0),
            adapter=adapter,
            exported=exported_of([rule_of("layer.weight", (2, 2))], num_ranks=1),
            shard=lambda name: torch.ones(2, 2),
            stages=(),
            begin_pass=lambda: None,
        )
        return GenerationRanks(
            config=config,
            bridge=cast(Any, side),
            policy=cast(Any, policy),
            attempt=cast(Any, attempt),
            stopwatch=Stopwatch(),
            gloo_group=cast(Any, None),
            source_state={"after": next_step - 1},
            next_step=next_step,
            problems=(),
            open_groups=NO_PROBE,
        )

    return make


def train(generation: GenerationRanks, steps: Iterable[int], *, first: int | None = None) -> None:
    """The loop's calls to generation; `first`: step that already has its batch."""
    for step in steps:
        if step != first:
            collected = generation.collect(step)
            assert collected is not None and collected.metrics["from"] == step
        generation.sync(NO_PROBE, policy_version=step + 1)
        generation.sample_ahead()


def begin_at_0(begin: Any, **settings: Any) -> tuple[Side, GenerationRanks]:
    """A run whose first weights have been sent, and what is at the other end."""
    side = Side()
    generation = begin(side, make_config(**settings))
    generation.sync(NO_PROBE, policy_version=0)
    return side, generation


@pytest.mark.parametrize(
    ("max_staleness", "versions"),
    [
        (0, [0, 1, 2, 3, 4, 5, 6, 7]),
        (1, [0, 0, 1, 2, 3, 4, 5, 6]),
        (2, [0, 0, 0, 2, 2, 4, 4, 6]),
        (3, [0, 0, 0, 0, 3, 3, 3, 6]),
    ],
)
def test_which_weights_sample_which_batch(
    begin: Any, max_staleness: int, versions: list[int]
) -> None:
    side, generation = begin_at_0(begin, max_staleness=max_staleness)
    train(generation, range(8))
    generation.close()
    assert [side.sampled[step] for step in range(8)] == versions
    assert side.version == 8, "the last weights are sent, for an evaluation"
    assert all(step - version <= max(max_staleness, 0) for step, version in side.sampled.items())


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_a_run_that_resumes_samples_every_batch_by_the_same_weights(
    begin: Any, max_staleness: int
) -> None:
    """From a checkpoint that already has the batch of its step."""
    config = make_config(max_staleness=max_staleness)
    whole, rest = Side(), Side()
    generation = begin(whole, config)
    generation.sync(NO_PROBE, policy_version=0)
    train(generation, range(8))

    resumed = begin(rest, config, next_step=5)
    resumed.sync(NO_PROBE, policy_version=4)
    resumed.sample_ahead()
    train(resumed, range(4, 8), first=4)
    assert rest.sampled == {step: whole.sampled[step] for step in range(5, 8)}


def test_after_a_stop_in_the_midst_of_a_step_no_batch_is_missing(begin: Any) -> None:
    """Weights within a step have no version; batches sampled ahead are sampled again."""
    for max_staleness in (1, 2, 3):
        for stopped in range(1, 7):
            side = Side()
            generation = begin(
                side, make_config(max_staleness=max_staleness), next_step=stopped + 1
            )
            train(generation, range(stopped, 8), first=stopped)
            assert sorted(side.sampled) == [*range(stopped + 1, 8)]
            gaps = [step - version for step, version in side.sampled.items()]
            assert all(0 <= gap <= max_staleness for gap in gaps)


def test_a_batch_says_how_old_the_weights_are_that_sampled_it(begin: Any) -> None:
    _, generation = begin_at_0(begin, max_staleness=1)
    gaps = []
    for step in range(3):
        gaps.append(generation.collect(step).metrics["rollout/version_gap"])
        generation.sync(NO_PROBE, policy_version=step + 1)
    assert gaps == [0, 1, 1]
    assert generation.source_state == {"after": 2}
    notes = {"generation/rollout_s": 1.0, "generation/lost_ranks": 0}
    assert generation.stopwatch.notes == notes


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_the_mailbox_does_not_grow_from_step_to_step(begin: Any, max_staleness: int) -> None:
    side, generation = begin_at_0(begin, max_staleness=max_staleness, num_steps=40)
    sizes = []
    for step in range(40):
        train(generation, [step])
        sizes.append(len(side.mail))
    assert max(sizes[20:]) <= max(sizes[:20])


def test_an_evaluation_is_of_the_weights_that_were_sent_last(begin: Any) -> None:
    _, generation = begin_at_0(begin, max_staleness=1)
    assert generation.evaluate(0) == {"eval/version": 0}
    with pytest.raises(AssertionError):
        generation.evaluate(1)


def test_what_is_sampled_ahead_is_discarded_and_counted(begin: Any) -> None:
    side, generation = begin_at_0(begin, max_staleness=2)
    generation.collect(0)
    assert generation.discard_ahead() == 11 + 12
    assert STOP in side.mail
    assert generation.discard_ahead() == 0
    generation.close()
    assert side.log[-1] == "end 0"


def test_a_batch_that_was_aborted_is_counted_as_well(begin: Any) -> None:
    side, generation = begin_at_0(begin, max_staleness=0)
    side.aborts = {0}
    assert generation.collect(0) is None
    assert generation.discard_ahead() == 10
    assert generation.source_state == {"after": -1}


def test_a_batch_is_there_once_the_weights_after_it_have_been_sent(begin: Any) -> None:
    side, generation = begin_at_0(begin, max_staleness=1)
    generation.collect(0)
    assert not generation.has_batch(1)
    generation.sync(NO_PROBE, policy_version=1)
    assert generation.has_batch(1) and not generation.has_batch(2)
    side.aborts = {2}
    generation.collect(1)
    generation.sync(NO_PROBE, policy_version=2)
    assert not generation.has_batch(2)


def test_an_adapter_is_sent_as_the_engines_need_it(begin: Any) -> None:
    """The base once, then factors alone; merged weights with the cost of their rounding."""
    factors = [("layer", torch.ones(1, 2), torch.ones(2, 1))]
    side = Side()
    generation = begin(side, make_config(max_staleness=0), adapter=FakeAdapter(factors, scale=0.5))
    weights, both = ["layer.weight"], ["layer.lora_a", "layer.lora_b"]
    for version, (needs, expected) in enumerate(
        [("base", [weights, both]), ("factors", [both]), ("merged", [weights])]
    ):
        side.needs, side.received = needs, []
        check = generation.sync(NO_PROBE, policy_version=version)
        assert side.received == expected
        assert check.merge_rounding == (0.25 if needs == "merged" else None)


def test_one_more_rank_is_lost_while_the_others_begin_again(begin: Any) -> None:
    """All connect anew, also those that had connected; what was ordered is ordered again."""
    side, generation = begin_at_0(begin, max_staleness=0)
    losses: list[Exception] = [LostRanksError("one"), RuntimeError("wait timeout after 1 ms")]
    wait, told = side.wait, []

    def lose_one(*args: Any, **kwargs: Any) -> Any:
        if len(losses) == 2:
            raise losses.pop(0)
        return wait(*args, **kwargs)

    def regroup(*, alive: Any, num_orders: int) -> int:
        told.append(num_orders)
        if losses:
            raise losses.pop()
        side.done = num_orders
        return num_orders

    def require_lost(error: Exception) -> LostRanksError:
        return error if isinstance(error, LostRanksError) else LostRanksError(str(error))

    fakes = {"wait": lose_one, "regroup": regroup, "require_lost": require_lost}
    side.__dict__.update(fakes)
    rollouts = generation.collect(0)
    assert rollouts is not None and side.log[-2:] == ["begin 0", "sample 0"]
    assert told == [told[0]] * 2 and not losses
