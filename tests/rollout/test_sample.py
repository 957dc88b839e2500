"""Choice of a batch's groups and problems. tests/run/test_train.py runs the whole loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gapo_megatron import rewards
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import Config, DataSource
from gapo_megatron.data.source import PromptSource, check_counts
from gapo_megatron.errors import DataError
from gapo_megatron.rewards.verifiers import Shape
from gapo_megatron.rollout import generate as generate_module
from gapo_megatron.rollout import rollouter as rollouter_module
from gapo_megatron.rollout.engine import Request
from gapo_megatron.rollout.environments.one_turn import OneTurn
from gapo_megatron.rollout.progress import Occupancy
from gapo_megatron.rollout.replicas import Replicas, assign
from gapo_megatron.rollout.rollouter import Rollouter
from gapo_megatron.rollout.selection import choose, informative
from gapo_megatron.rollout.table import to_episodes
from gapo_megatron.rollouts import ROW, Rollouts
from gapo_megatron.run.start import build_rollouter
from gapo_megatron.types import Episode, Outcome, Prompt, Verdict
from tests.acting import one_turn_inputs
from tests.learn_setup import GROUP_SIZE, make_config
from tests.messages import mentions
from tests.scripted_engine import LoneReplicas, ScriptedEngine, ThreadReplicas, place_of

Group = tuple[Episode, ...]


def with_verdicts(*groups: str) -> Rollouts:
    """Groups with a letter for each response: wrong, correct or unknown."""
    table = np.zeros(sum(map(len, groups)), dtype=ROW)
    table["sample"] = [sample for group in groups for sample in range(len(group))]
    table["outcome"] = ["wcu".index(letter) for group in groups for letter in group]
    table["grade"] = np.inf
    return Rollouts(table)


@pytest.mark.parametrize(
    ("verdicts", "wanted", "expected"),
    [
        (["cw", "cc", "ww", "wc"], 2, [0, 3]),
        (["cc", "cw", "ww", "wc", "cw"], 2, [1, 3]),
        # Filled up with the first that teach nothing, in the order drawn.
        (["cc", "ww", "cw", "cc"], 3, [0, 1, 2]),
        (["ww", "ww", "ww"], 2, [0, 1]),
        # Only valid rewards teach.
        (["ccu", "wuu", "cwu", "uuu", "wcu"], 2, [2, 4]),
    ],
)
def test_the_batch_keeps_the_first_that_teach(
    verdicts: list[str], wanted: int, expected: list[int]
) -> None:
    assert choose(with_verdicts(*verdicts), wanted) == expected


def test_problems_given_back_come_again_and_all_as_often() -> None:
    """Also across epochs, where a problem may remain twice."""
    source = PromptSource([Prompt(str(i), (i,), "") for i in range(10)], seed=0)
    learned = []
    for number in range(60):
        drawn = source.next_batch(6)
        ids = [prompt.id for prompt in drawn]
        assert len(set(ids)) == 6
        late = drawn[number % 3 :: 3]
        source.give_back(late)
        learned += [prompt.id for prompt in drawn if prompt not in late]
        begun = (1 + source.state_dict()["epoch"]) * 10
        assert len(source.state_dict()["remaining"]) + len(learned) == begun
    counts = [learned.count(str(i)) for i in range(10)]
    assert sum(counts) == 240
    assert max(counts) - min(counts) <= 2


def config_of(rollout_prompts: int, **batch: Any) -> Config:
    sizes = {"rollout_prompts": rollout_prompts, "minibatch_prompts": rollout_prompts}
    return make_config(Path("unused"), batch=sizes | batch)


class Numbered(OneTurn):
    """Tells the verifier which response it judges."""

    def judge(self, episode: Episode) -> tuple[str, str]:
        return episode.prompt.id, str(episode.sample)


class InstantPool:
    """Judges at once. Every third problem has A = 0."""

    correct_above = 0.5

    def __init__(self) -> None:
        self.judged: list[Verdict] = []

    def submit(self, items: Iterable[tuple[Any, ...]]) -> list[int]:
        first = len(self.judged)
        for problem, sample, *_ in items:
            correct = sample == "0" and int(problem) % 3
            self.judged.append(Verdict(Outcome.CORRECT if correct else Outcome.WRONG))
        return list(range(first, len(self.judged)))

    def shape(self, name: str) -> Shape:
        return Shape()

    def poll(self) -> None:
        pass

    def collect(self, numbers: Sequence[int], *, may_end: Callable[[bool], bool]) -> list[Verdict]:
        while not may_end(True):
            pass
        return [self.judged[number] for number in numbers]


class HesitantPool(InstantPool):
    """Has no verdict yet at the first call."""

    def collect(self, numbers: Sequence[int], *, may_end: Callable[[bool], bool]) -> list[Verdict]:
        may_end(False)
        return super().collect(numbers, may_end=may_end)


TOKENIZER: Any = SimpleNamespace(decode=lambda ids, **_: "")
ATTEMPT: Any = SimpleNamespace(patience=lambda _: lambda elapsed_s: False)


def length_of(problem: str, sample: int) -> int:
    return 1 + (7 * int(problem) + 3 * sample) % 11


class Setup:
    """A rollouter with a scripted engine: each token is the number of the run's step.

    The clock of `generate` advances a second per decoding step.
    """

    def __init__(
        self,
        config: Config,
        source: Any = None,
        *,
        replicas: Replicas | None = None,
        length: Callable[[str, int], int] = length_of,
        pool: InstantPool | None = None,
    ) -> None:
        self.step = 0
        self.now = 0.0
        self.running: list[int] = []
        """Requests of each decoding step."""
        self.length = length
        self.engine = ScriptedEngine(self._say, replicas=replicas, before_step=self._tick)
        self.pool = pool or InstantPool()
        self.rollouter = self.begin(config, source)

    def begin(self, config: Config, source: Any) -> Rollouter:
        inputs = one_turn_inputs(source, TOKENIZER)
        inputs.environment = Numbered(inputs.tokenizer)
        pool: Any = self.pool
        return build_rollouter(config, inputs, self.engine, pool)

    def collect(self, step: int, stopwatch: Stopwatch | None = None) -> Rollouts:
        self.step = self.engine.policy_version = step
        stopwatch = stopwatch or Stopwatch()
        sampled = self.rollouter.collect(step, attempt=ATTEMPT, stopwatch=stopwatch)
        assert sampled is not None
        return sampled

    def sample(
        self, prompts: Sequence[Prompt], opened: Sequence[Group], wanted: int
    ) -> tuple[Rollouts, Rollouts]:
        """A round of step 1: complete groups, and open groups."""
        now = rollouter_module._Step(1, ATTEMPT, Stopwatch(), Occupancy())
        self.step = 1
        self.rollouter.resume(opened)
        sampled = self.rollouter._sample(list(prompts), self.rollouter.open_groups, wanted, now)
        assert sampled is not None
        return sampled

    def _say(self, request: Request) -> list[int]:
        return [self.step] * (self.length(*place_of(request)) - len(request.response_ids))

    def _tick(self) -> None:
        self.now += 1
        self.running.append(sum(self.engine.num_requests()))


def groups_of(rollouts: Rollouts, source: PromptSource, *others: Rollouts) -> list[Group]:
    """The groups, with the tokens of this rank and of `others`."""
    tokens = {name: dict(held) for name, held in rollouts.tokens.items()}
    for other in others:
        assert other.table.tobytes() == rollouts.table.tobytes()
        assert not tokens["response_ids"].keys() & {*other.rows_here}
        tokens = {name: held | dict(other.tokens[name]) for name, held in tokens.items()}
    prompts = [source.problems[problem] for problem in rollouts.problems]
    return to_episodes(rollouts.with_tokens(tokens), prompts)


def open_group(prompt: Prompt, *, num_tokens: int = 0, num_finished: int = 0) -> Group:
    """Responses with these numbers of tokens, all carried; the first are finished."""
    return tuple(
        Episode(
            prompt,
            sample,
            np.zeros(num_tokens, np.int32),
            np.zeros(num_tokens, np.float32),
            finished=sample < num_finished,
            carried_log_probs=np.ones(num_tokens, np.float32) if num_tokens else None,
            carried_versions=np.zeros(num_tokens, np.int32) if num_tokens else None,
        )
        for sample in range(GROUP_SIZE)
    )


def tokens_of(groups: Iterable[Group]) -> dict[str, list[list[int]]]:
    return {group[0].prompt.id: [one.token_ids.tolist() for one in group] for group in groups}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Setup], None]:
    """Let generation use the clock of a setup."""
    return lambda setup: monkeypatch.setattr(
        generate_module, "time", SimpleNamespace(monotonic=lambda: setup.now)
    )


def idle_share(running: Sequence[int]) -> float:
    """Idle share of an engine with as many slots as it ever ran, a second per step."""
    taken = [count / max(running[: i + 1]) for i, count in enumerate(running)]
    return 1 - sum(taken) / len(taken)


def test_a_step_draws_as_many_problems_as_are_asked_for(
    clock: Callable[[Setup], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every group has A = 0, so every round draws new problems; one problem fewer is refused."""
    config = config_of(8, oversampling=1.3, dynamic_sampling_rounds=2)
    problems = [Prompt(str(3 * i), (i,), "") for i in range(3 * 11)]
    limits: dict[str, Any] = {"data": config.data, "num_steps": 1}
    check_counts({"": len(problems)}, config.batch, **limits)
    source, stopwatch = PromptSource(problems, seed=0), Stopwatch()
    given_back: list[Prompt] = []
    monkeypatch.setattr(source, "give_back", lambda prompts, step: given_back.extend(prompts))
    setup = Setup(config, source)
    clock(setup)
    sampled = setup.collect(0, stopwatch)
    assert sampled.metrics["rollout/sampling_rounds"] == 3
    assert source.state_dict()["remaining"] == []
    # Every problem has been drawn once; 8 of each 11 are whole.
    assert len({prompt.id for prompt in given_back}) == 3 * 3
    num_sampled = setup.engine.num_tokens
    lost = num_sampled - 24 * GROUP_SIZE * sampled.metrics["rollout/response_length/mean"]
    assert lost > 0 and not len(setup.rollouter.open_groups)
    assert sampled.metrics["rollout/lost_token_share"] == pytest.approx(lost / num_sampled)
    assert 0 < idle_share(setup.running) < 1
    assert stopwatch.notes["perf/rollout_idle_share"] == pytest.approx(idle_share(setup.running))

    rounds = ("batch.oversampling (1.3)", "batch.dynamic_sampling_rounds (2)")
    named = mentions("batch.rollout_prompts (8)", *rounds, 33, config.data.train_path, 32)
    with pytest.raises(DataError, match=named):
        check_counts({"": len(problems) - 1}, config.batch, **limits)
    with pytest.raises(DataError, match=mentions("batch.rollout_prompts (64)", 33)) as caught:
        check_counts({"": len(problems)}, config_of(64).batch, **limits)
    assert "oversampling" not in str(caught.value)


@pytest.mark.parametrize(("method", "num_rounds"), [("gapo", 3), ("ngrpo", 1)])
def test_a_virtual_answer_gives_a_signal_to_groups_without_a_correct_one(
    clock: Callable[[Setup], None], method: str, num_rounds: int
) -> None:
    config = config_of(4, dynamic_sampling_rounds=2)
    objective = config.objective.model_copy(update={"method": method})
    source = PromptSource([Prompt(str(3 * i), (i,), "") for i in range(12)], seed=0)
    setup = Setup(config.model_copy(update={"objective": objective}), source)
    clock(setup)
    assert setup.collect(0).metrics["rollout/sampling_rounds"] == num_rounds


MIXED = (DataSource(name="a", path="x", weight=3.0), DataSource(name="b", path="x", first_step=1))


MEASURED = ("batch_share", "reward", "informative_share", "response_length")


def mixed_source() -> PromptSource:
    """Ids are numbers, which the lengths and verdicts of this file follow from."""
    problems = [Prompt(str(i), (i,), "", source="ab"[i % 2]) for i in range(80)]
    return PromptSource(problems, seed=0, sources=MIXED)


def test_every_source_has_its_metrics() -> None:
    source = mixed_source()
    setup = Setup(config_of(8), source)
    for step in range(5):
        sampled = setup.collect(step)
        names = [source.problems[i].source for i in sampled.problems]
        metrics = sampled.metrics
        measured = {key.split("/")[1] for key in metrics if key.startswith("data/")}
        assert measured == {*names} == ({"a", "b"} if step else {"a"})
        for name in measured:
            here = [i for i, other in enumerate(names) if other == name]
            group = sampled.take_groups(here)
            assert {key: metrics[f"data/{name}/{key}"] for key in MEASURED} == pytest.approx(
                {
                    "batch_share": len(here) / 8,
                    "reward": float(group.rewards.mean()),
                    "informative_share": informative(group).mean(),
                    "response_length": group.num_sampled / len(group),
                }
            )


@pytest.mark.parametrize(
    "batch",
    [
        {"dynamic_sampling_rounds": 2},
        {"oversampling": 1.5},
        {"oversampling": 2.0, "partial_rollouts": True},
    ],
)
def test_a_curriculum_learns_from_every_judged_group(
    clock: Callable[[Setup], None], batch: dict[str, Any]
) -> None:
    """Also from those that dynamic sampling replaces, and of none that is given back or open."""
    levels = ("flat", "one", "two")  # one in three has A = 0 (`InstantPool`)
    problems = [Prompt(str(i), (i,), "", levels[i % 3]) for i in range(90)]
    source = PromptSource(problems, seed=0, curriculum=0.9)
    judged: list[tuple[int, float]] = []
    observe = source.observe

    def listen(numbers: Any, rewards: Any, is_correct: Any, *, step: int) -> dict[str, float]:
        assert (rewards == is_correct).all()
        judged.extend(zip(numbers, rewards.mean(axis=1).tolist(), strict=True))
        return observe(numbers, rewards, is_correct, step=step)

    source.observe = listen  # type: ignore[method-assign]
    setup = Setup(config_of(9, **batch), source)
    clock(setup)
    shares = []
    for step in range(12):
        sampled = setup.collect(step)
        setup.rollouter.open_groups = setup.rollouter.open_groups.carried()
        shares.append([sampled.metrics[f"curriculum/{level}/share"] for level in levels])
        assert sum(shares[-1]) == pytest.approx(1)
    replaces = "dynamic_sampling_rounds" in batch
    assert len(judged) == (len(setup.pool.judged) // GROUP_SIZE if replaces else 12 * 9)
    assert {one for n, one in judged if n % 3 == 0} == {0.0}
    assert {one for n, one in judged if n % 3} == {1 / GROUP_SIZE}
    assert shares[0] == pytest.approx([1 / 3] * 3)
    assert shares[-1][0] < 0.12 and shares[-1][1] == pytest.approx(shares[-1][2], abs=0.05)
    drawn = [n % 3 for n, _ in judged[-50:]]
    assert 0 < drawn.count(0) < 14
    last = setup.collect(12).metrics
    assert last["curriculum/flat/pass_rate"] == 0 == last["curriculum/flat/learnability"]
    assert last["curriculum/one/pass_rate"] == pytest.approx(1 / GROUP_SIZE)


def test_an_engine_is_full_while_requests_wait() -> None:
    """And keeps its slots when a later call has fewer requests."""
    occupancy = Occupancy()
    assert occupancy.share_taken(4, 6) == 1
    assert occupancy.share_taken(3, 1) == 1  # room in the cache for three, of longer responses
    assert occupancy.share_taken(3, 0) == 0.75
    assert occupancy.share_taken(2, 0) == 0.5
    assert occupancy.share_taken(8, 0) == 1
    assert occupancy.share_taken(2, 0) == 0.25
    assert Occupancy().share_taken(0, 0) == Occupancy().idle_share == 0
    assert Occupancy(taken_s=3.0, capacity_s=4.0).idle_share == 0.25


@pytest.mark.parametrize(("num_ranks", "size"), [(1, 1), (5, 1), (6, 2), (4, 4)])
def test_every_group_of_a_round_is_dealt_to_one_replica_and_in_order(
    num_ranks: int, size: int
) -> None:
    """New groups before open groups; replicas get equal numbers to complete, and to spare."""
    ranks = [LoneReplicas(rank=i, world_size=num_ranks, size=size) for i in range(num_ranks)]
    for num_new, num_open, wanted in itertools.product(range(9), range(7), range(15)):
        if wanted > num_new + num_open:
            continue
        dealt = [assign(num_new, num_open, wanted, one) for one in ranks]
        for rank in range(num_ranks):
            assert dealt[rank] == assign(num_new, num_open, wanted, ranks[0], rank=rank)
            assert dealt[rank] == dealt[rank // size * size], "a replica completes the same groups"
        shares = [([*new, *(num_new + i for i in opened)], n) for new, opened, n in dealt[::size]]
        first, spare = [share[:n] for share, n in shares], [share[n:] for share, n in shares]
        assert [*itertools.chain(*first)] == [*range(wanted)]
        assert [*itertools.chain(*spare)] == [*range(wanted, num_new + num_open)]
        for lengths in ([*map(len, first)], [*map(len, spare)]):
            assert max(lengths) - min(lengths) <= 1


LENGTHS = {"0": 5, "1": 2, "2": 9, "3": 4, "4": 4, "5": 4, "6": 7, "7": 5, "8": 14}


@pytest.mark.parametrize(
    ("new", "wanted", "whole", "left"),
    [
        # Engine 0 has 6, begun, and 0 1 2: done after 5 tokens. Engine 1 has 7 8, begun, and 3 4 5:
        # of the four that are whole after 4 tokens the last one is left as it is.
        ("012345", 6, "601734", "285"),
        # No group is wanted of engine 0: what it has of 6 stays. Engine 1 needs a token more for 7.
        ("0", 1, "7", "680"),
    ],
)
def test_ranks_agree_on_what_is_whole_and_what_is_left(
    new: str, wanted: int, whole: str, left: str
) -> None:
    source = PromptSource([Prompt(str(i), (1,), "") for i in range(9)], seed=0)
    opened = [open_group(source.problems[i], num_tokens=4) for i in (6, 7, 8)]
    setups = [
        Setup(config_of(6), source, replicas=replicas, length=lambda problem, _: LENGTHS[problem])
        for replicas in ThreadReplicas.of(4, size=2)
    ]
    prompts = [source.problems[int(i)] for i in new]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda setup: setup.sample(prompts, opened, wanted), setups))
    complete, still = (groups_of(one[0], source, *one[1:]) for one in zip(*found, strict=True))
    assert "".join(group[0].prompt.id for group in complete) == whole
    for one in itertools.chain(*complete):
        assert one.finished and len(one.token_ids) == LENGTHS[one.prompt.id]
    assert (found[0][0].table["outcome"] < 2).all()
    assert "".join(group[0].prompt.id for group in still) == left
    assert (found[0][1].table["outcome"] == 2).all()
    finished = {group[0].prompt.id for group in still if group[0].finished}
    assert finished == ({"5"} if wanted == 6 else set())
    # Both ranks of an engine make the same; half of all is there.
    num_new = sum(setup.engine.num_tokens for setup in setups) // 2
    num_begun_before = 3 * GROUP_SIZE * 4
    num_whole = sum(GROUP_SIZE * LENGTHS[i] for i in whole)
    assert found[0][1].num_sampled == num_new + num_begun_before - num_whole


@pytest.mark.parametrize("aborted", range(4))
def test_what_is_discarded_is_counted_once(aborted: int) -> None:
    """While a round generates (0, 2) or is judged (1, 3); the two ranks of an engine agree."""
    config = config_of(6, dynamic_sampling_rounds=1)
    problems = [Prompt(str(i), (1,), "") for i in range(40)]
    setups = [Setup(config, replicas=replicas) for replicas in ThreadReplicas.of(4, size=2)]
    for setup in setups:
        setup.pool = HesitantPool()
        setup.rollouter = setup.begin(config, PromptSource(problems, seed=0))
    opened = [setup.rollouter.open_groups for setup in setups]

    def collect(setup: Setup) -> Rollouts | None:
        stages = itertools.count()

        def patience(_: object) -> Callable[[float], bool]:
            stage, questions = next(stages), itertools.count()
            # A generation is asked before its first token, too.
            first = 1 if stage % 2 == 0 else 0
            return lambda elapsed_s: stage == aborted and next(questions) >= first

        attempt: Any = SimpleNamespace(patience=patience)
        return setup.rollouter.collect(0, attempt=attempt, stopwatch=Stopwatch())

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(collect, setups)) == [None] * 4
    sampled = sum(setup.engine.num_tokens for setup in setups) // 2
    assert sum(setup.rollouter.num_discarded_tokens for setup in setups) == sampled > 0
    assert all(s.rollouter.open_groups is o for s, o in zip(setups, opened, strict=True))


def test_a_batch_mixes_old_groups_and_new_ones() -> None:
    """An update learns from consecutive groups, which must not all be of one kind."""
    config = config_of(16, oversampling=1.5, partial_rollouts=True)
    source = PromptSource([Prompt(str(i), (i,), "") for i in range(100)], seed=0)
    setup = Setup(config, source)
    num_old = np.zeros(16, int)
    for step in range(60):
        were_open = {*setup.rollouter.open_groups.problems}
        sampled = setup.collect(step)
        num_old += [problem in were_open for problem in sampled.problems]
    shares = num_old.reshape(4, 4).sum(axis=1) / num_old.sum()
    assert all(0.2 < share < 0.3 for share in shares), shares


def test_what_has_been_open_longest_is_taken_first() -> None:
    """Five groups end together, in a later round that needs two and begins none."""
    config = config_of(6, oversampling=1.5, partial_rollouts=True)
    source = PromptSource([Prompt(i, (1,), "") for i in "01234"], seed=0)
    opened = [open_group(prompt) for prompt in source.problems]
    complete, left = Setup(config, source, length=lambda *_: 5).sample([], opened, 2)
    assert (complete.problems, left.problems) == ([0, 1], [2, 3, 4])


def carried_over(one: Episode) -> Episode:
    """Like `learn.checks.carry`; a token's version is the token itself."""
    if not len(one.token_ids):
        return one
    return replace(one, carried_log_probs=one.log_probs, carried_versions=one.token_ids)


@pytest.mark.parametrize("rounds", [0, 2])
def test_open_groups_are_finished_and_nothing_that_was_sampled_is_lost(
    clock: Callable[[Setup], None], monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    """Problems are learned from equally often, regardless of response length."""
    config = config_of(6, oversampling=1.5, partial_rollouts=True, dynamic_sampling_rounds=rounds)
    scored: list[Episode] = []
    score = rewards.score

    def remember(judging: Any, groups: Sequence[Group], **settings: Any) -> Any:
        scored.extend(one for group in groups for one in group)
        return score(judging, groups, **settings)

    monkeypatch.setattr(rewards, "score", remember)
    source = PromptSource([Prompt(str(i), (i,), "") for i in range(40)], seed=0)
    setup = Setup(config, source)
    clock(setup)
    finished: list[str] = []
    gaps = []
    for step in range(60):
        stopwatch = Stopwatch()
        setup.running.clear()
        sampled = setup.collect(step, stopwatch)
        opened = groups_of(setup.rollouter.open_groups, source)
        groups = groups_of(sampled, source)
        ids = [group[0].prompt.id for group in groups]
        assert len(ids) == len(set(ids)) == 6
        still = {group[0].prompt.id for group in opened}
        assert len(still) == len(opened) and not still & set(ids)
        episodes = [one for group in groups for one in group]
        assert all(one.finished for one in episodes)
        assert 1 <= sampled.metrics.get("rollout/sampling_rounds", 1) <= 1 + rounds
        noted = stopwatch.notes["perf/rollout_idle_share"]
        assert noted == pytest.approx(idle_share(setup.running))
        assert "rollout/lost_token_share" not in sampled.metrics
        if not rounds:
            # Three of nine stay open, and what went on is nearly always what is finished first.
            assert len(still) == 3
            assert len(source.state_dict()["remaining"]) + len(finished) + 6 + 3 == 40 * (
                1 + source.state_dict()["epoch"]
            )
            finished += ids
            carried = sum((one.token_ids < step).sum() for one in episodes)
            share = carried / sum(len(one.token_ids) for one in episodes)
            assert sampled.metrics["rollout/carried_token_share"] == pytest.approx(share)
            gap = step - min(int(one.token_ids[0]) for one in episodes)
            assert sampled.metrics["rollout/oldest_version_gap"] == gap
            gaps.append(gap)
        setup.rollouter.resume([tuple(map(carried_over, group)) for group in opened])
    if not rounds:
        counts = [finished.count(str(i)) for i in range(40)]
        assert sum(counts) == 360 and max(counts) - min(counts) <= 2
        assert max(gaps) >= 1
    # Every token that was sampled has been judged, once, or is open.
    opened = setup.rollouter.gather_open_groups()
    everything = [*scored, *(one for group in opened for one in group)]
    assert sum(len(one.token_ids) for one in everything) == setup.engine.num_tokens
    # Without the option, open groups continue once more, then return to the source.
    alone = config.batch.model_copy(update={"partial_rollouts": False, "oversampling": 1.0})
    setup.rollouter = setup.begin(config.model_copy(update={"batch": alone}), source)
    setup.rollouter.resume(opened)
    sampled = setup.collect(60)
    assert len(setup.rollouter.open_groups) == 0
    if not rounds:
        chosen = {source.problems[problem].id for problem in sampled.problems}
        assert {group[0].prompt.id for group in opened} < chosen
