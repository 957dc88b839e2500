"""Which groups a batch is made of, and which problems. tests/test_train.py runs it whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gapo_megatron import rewards
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import Config
from gapo_megatron.config.counts import num_begun
from gapo_megatron.data.source import PromptSource
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.rollout import rollouter as sample_module
from gapo_megatron.rollout.progress import Occupancy
from gapo_megatron.rollout.rollouter import check_problems, choose, is_informative, sample
from gapo_megatron.rollout.vllm.engine import _slice
from gapo_megatron.types import Carried, OpenGroup, Outcome, Prompt, Rollout, Verdict
from tests.learn_setup import GROUP_SIZE, make_config, make_groups
from tests.messages import mentions


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [("cw", True), ("cc", False), ("ww", False), ("cwu", True), ("cu", False), ("uu", False)],
)
def test_a_group_teaches_where_valid_rewards_differ(verdicts: str, expected: bool) -> None:
    (group,) = make_groups([verdicts])
    assert is_informative(group) is expected


@pytest.mark.parametrize(
    ("verdicts", "wanted", "expected"),
    [
        (["cw", "cc", "ww", "wc"], 2, [0, 3]),
        (["cc", "cw", "ww", "wc", "cw"], 2, [1, 3]),
        # Filled up with the first that teach nothing, in the order drawn.
        (["cc", "ww", "cw", "cc"], 3, [0, 1, 2]),
        (["ww", "ww", "ww"], 2, [0, 1]),
    ],
)
def test_the_batch_keeps_the_first_that_teach(
    verdicts: list[str], wanted: int, expected: list[int]
) -> None:
    groups = make_groups(verdicts)
    assert [groups.index(group) for group in choose(groups, wanted)] == expected


def test_no_problem_comes_twice_in_a_batch_of_several_draws() -> None:
    source = PromptSource([Prompt(str(i), (i,), "") for i in range(10)], seed=0)
    all_drawn = []
    for _ in range(30):
        drawn = source.next_batch(5)
        for more in (3, 1):
            drawn += source.next_batch(more, drawn=drawn)
        ids = [prompt.id for prompt in drawn]
        assert len(set(ids)) == 9
        all_drawn += ids
    assert {all_drawn.count(str(i)) for i in range(10)} == {27}
    with pytest.raises(ConfigError, match=r"\b11\b.*\b10\b"):
        source.next_batch(2, drawn=drawn)


def test_problems_given_back_come_again_and_all_as_often() -> None:
    """Also over the ends of epochs, where one may be there twice."""
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


@pytest.mark.parametrize(
    ("luck", "longest", "others", "least"), [(0.0, 20.9, 34.8, 0), (0.7, 30.25, 32.44, 1)]
)
def test_over_sampling_puts_off_long_problems(
    luck: float, longest: float, others: float, least: int
) -> None:
    """The figures of docs/data.md: how often each is learned from, by how long its responses are.

    What is put off comes again in every epoch that it has missed; yet what is the longest of any
    company never gets its turn.
    """
    random = np.random.default_rng(1)
    source = PromptSource([Prompt(str(i), (i,), "") for i in range(400)], seed=0)
    lengths = random.lognormal(0, 0.7, 400)
    counts = np.zeros(400, int)
    for _ in range(200):
        drawn = source.next_batch(96)
        now = [lengths[int(p.id)] * np.exp(luck * random.standard_normal()) for p in drawn]
        late = {int(i) for i in np.argsort(now)[64:]}
        source.give_back([drawn[i] for i in sorted(late)])
        counts[[int(p.id) for i, p in enumerate(drawn) if i not in late]] += 1
    assert len(source.state_dict()["remaining"]) + 200 * 64 == 400 * (
        1 + source.state_dict()["epoch"]
    )
    by_length = counts[np.argsort(lengths)]
    found = (by_length[320:].mean(), by_length[:320].mean(), counts.min())
    assert found == pytest.approx((longest, others, least), abs=0.05)


def config_of(rollout_prompts: int, **batch: Any) -> Config:
    sizes = {"rollout_prompts": rollout_prompts, "minibatch_prompts": rollout_prompts}
    return make_config(Path("unused"), batch=sizes | batch)


def test_as_many_problems_are_begun_as_the_factor_says() -> None:
    batch = config_of(50, oversampling=1.1).batch
    assert [num_begun(batch, wanted) for wanted in (50, 1, 0)] == [55, 2, 0]
    assert num_begun(config_of(50).batch, 50) == 50


class StandInEngine:
    """One engine on one rank: every decoding step gives each response a token.

    Response j to prompt i has 1 + (7 i + 3 j) % 11 tokens, or as many as it is told, each the
    number of the step of the run.
    """

    def __init__(self, lengths: Mapping[str, int] | None = None) -> None:
        self.lengths = lengths
        self.num_tokens = 0
        self.there_s: list[float] = []

    def share(self, items: Sequence[Any]) -> list[Any]:
        return list(items)

    part = gather = share

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_groups: int,
        num_samples: int,
        begun: Mapping[str, tuple[Rollout, ...]],
        occupancy: Occupancy,
        step: int,
        **_: Any,
    ) -> list[tuple[Rollout, ...]]:
        lengths = [
            [
                self.lengths[prompt.id] if self.lengths else 1 + (7 * int(prompt.id) + 3 * j) % 11
                for j in range(num_samples)
            ]
            for prompt in prompts
        ]
        not_begun = Rollout(np.empty(0, np.int32), np.empty(0, np.float32), False, finished=False)
        so_far = [begun.get(prompt.id, (not_begun,) * num_samples) for prompt in prompts]
        missing = [
            max(n - len(r.token_ids) for n, r in zip(row, group, strict=True))
            for row, group in zip(lengths, so_far, strict=True)
        ]
        num_steps = sorted(missing)[num_groups - 1] if num_groups else 0
        self.there_s.append(num_steps + 1.0)
        occupancy.taken_s += 1.0
        occupancy.there_s += self.there_s[-1]

        def go_on(rollout: Rollout, length: int) -> Rollout:
            tokens = rollout.token_ids.tolist()
            new = min(num_steps, length - len(tokens))
            self.num_tokens += new
            ids = np.array([*tokens, *[step] * new], np.int32)
            log_probs = np.full(len(ids), -1, np.float32)
            return replace(rollout, token_ids=ids, log_probs=log_probs, finished=len(ids) == length)

        return [tuple(map(go_on, group, row)) for group, row in zip(so_far, lengths, strict=True)]


ATTEMPT = SimpleNamespace(patience=lambda _: None)


def judge(_: Any, prompts: Any, rollouts: Any, **__: Any) -> list[tuple[Verdict, ...]]:
    """Every third problem teaches nothing."""
    return [
        tuple(
            Verdict(Outcome.CORRECT if j == 0 and int(prompt.id) % 3 else Outcome.WRONG)
            for j in range(len(group))
        )
        for prompt, group in zip(prompts, rollouts, strict=True)
    ]


def test_a_step_draws_as_many_problems_as_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """No group teaches, so that every round draws anew; one problem less is refused before."""
    config = config_of(8, oversampling=1.3, dynamic_sampling_rounds=2)
    problems = [Prompt(str(3 * i), (i,), "") for i in range(3 * 11)]
    check_problems(problems, config)
    monkeypatch.setattr(sample_module.rewards, "score", judge)
    source, engine, stopwatch = PromptSource(problems, seed=0), StandInEngine(), Stopwatch()
    given_back: list[Prompt] = []
    monkeypatch.setattr(source, "give_back", given_back.extend)
    sampled = sample(
        engine, source, None, None, config, attempt=ATTEMPT, stopwatch=stopwatch, step=0
    )
    assert sampled is not None and sampled.metrics["rollout/sampling_rounds"] == 3
    assert source.state_dict()["remaining"] == []
    # Every problem has been drawn once; 8 of each 11 are whole.
    assert len({prompt.id for prompt in given_back}) == 3 * 3
    num_whole = 24 * GROUP_SIZE * sampled.metrics["rollout/response_length/mean"]
    lost = engine.num_tokens - num_whole
    assert lost > 0
    assert sampled.metrics["rollout/lost_token_share"] == pytest.approx(lost / engine.num_tokens)
    assert len(engine.there_s) == 3
    idle_share = 1 - 3 / sum(engine.there_s)
    assert stopwatch.notes["perf/rollout_idle_share"] == pytest.approx(idle_share)

    rounds = ("batch.oversampling (1.3)", "batch.dynamic_sampling_rounds (2)")
    named = mentions("batch.rollout_prompts (8)", *rounds, 33, config.data.train_path, 32)
    with pytest.raises(DataError, match=named):
        check_problems(problems[1:], config)
    with pytest.raises(DataError, match=mentions("batch.rollout_prompts (64)", 33)) as caught:
        check_problems(problems, config_of(64))
    assert "oversampling" not in str(caught.value)


def test_an_engine_is_full_while_requests_wait() -> None:
    """And keeps its places, when a later call has fewer requests than they are."""
    occupancy = Occupancy()
    assert occupancy.share_taken(4, 6) == 1
    assert occupancy.share_taken(3, 1) == 1  # room in the cache for three, of longer responses
    assert occupancy.share_taken(3, 0) == 0.75
    assert occupancy.share_taken(2, 0) == 0.5
    assert occupancy.share_taken(8, 0) == 1
    assert occupancy.share_taken(2, 0) == 0.25
    assert Occupancy().share_taken(0, 0) == Occupancy().idle_share == 0
    assert Occupancy(taken_s=3.0, there_s=4.0).idle_share == 0.25


class StandInRank(StandInEngine):
    """One of the two ranks of one of two engines: a thread for each."""

    barrier = threading.Barrier(4)
    sent: tuple[list[Any], ...] = ([], [], [], [])

    def __init__(self, rank: int, lengths: Mapping[str, int] | None) -> None:
        super().__init__(lengths)
        self.rank = rank

    def share(self, items: Sequence[Any]) -> list[Any]:
        return _slice(items, self.rank // 2, 2)

    def part(self, items: Sequence[Any]) -> list[Any]:
        return _slice(items, self.rank % 2, 2)

    def gather(self, items: Sequence[Any]) -> list[Any]:
        self.sent[self.rank][:] = items
        self.barrier.wait(timeout=20)
        received = [item for part in self.sent for item in part]
        self.barrier.wait(timeout=20)
        return received


class StreamingRank(StandInRank):
    """Hands every response over when it has ended, the shortest first."""

    def generate(
        self, prompts: Sequence[Prompt], *, on_ended: Callable[[Any], object], **settings: Any
    ) -> list[tuple[Rollout, ...]]:
        groups = super().generate(prompts, **settings)
        ended = [
            (prompt, sample, rollout)
            for prompt, group in zip(prompts, groups, strict=True)
            for sample, rollout in enumerate(group)
            if rollout.finished
        ]
        for one in sorted(ended, key=lambda one: len(one[2].token_ids)):
            on_ended([one])
        return groups


def decode(token_ids: Sequence[Sequence[int]], **_: Any) -> list[str]:
    """As commands to tests/reward_setup.py, which make verdicts that say what is judged by what."""
    return [f"echo {len(ids)} tokens" for ids in token_ids]


TOKENIZER = SimpleNamespace(batch_decode=decode)


@pytest.fixture(scope="module")
def pools() -> Iterator[list[rewards.Pool]]:
    """One for each of four ranks. Every worker is ready: none is started in a rank's thread."""
    with ExitStack() as stack:
        verifier = "tests.reward_setup"
        pools = [rewards.Pool(verifier, num_workers=1, timeout_s=600) for _ in range(4)]
        for pool in pools:
            stack.enter_context(pool).wait_until_ready()
        yield pools


@pytest.mark.parametrize(("oversampling", "num_open"), [(1.0, 0), (1.5, 0), (1.5, 3)])
def test_verdicts_belong_to_their_responses_whichever_rank_judges(
    pools: list[rewards.Pool], oversampling: float, num_open: int
) -> None:
    """Two ranks in each of two engines; responses end in another order than they were begun."""
    partial = bool(num_open)
    config = config_of(6, oversampling=oversampling, partial_rollouts=partial)
    prompts = [Prompt(str(i), (1,), f"answer {i}") for i in range(int(6 * oversampling))]
    tokens = np.zeros(1, np.int32)
    first = Rollout(tokens, np.zeros(1, np.float32), False, False, Carried(0, np.ones(1)))
    # Of each open group two responses are finished: they are judged with the others.
    done = replace(first, finished=True)
    opened = [
        OpenGroup(prompt, (done, done, *[first] * (GROUP_SIZE - 2)))
        for prompt in prompts[len(prompts) - num_open :]
    ]

    def run(rank: int) -> Any:
        return sample_module._judge(
            StreamingRank(rank, None),
            prompts[: len(prompts) - num_open],
            opened,
            6,
            pools[rank],
            TOKENIZER,
            config,
            attempt=ATTEMPT,
            stopwatch=Stopwatch(),
            occupancy=Occupancy(),
            step=1,
        )

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(run, range(4)))
    for judged in found:
        assert len(judged.groups) >= 6
        for group in judged.groups:
            expected = [
                f"{len(r.token_ids)} tokens for {group.prompt.answer}" for r in group.rollouts
            ]
            assert [verdict.reason for verdict in group.verdicts] == expected
        ids = [group.prompt.id for group in (*judged.groups, *judged.open_groups)]
        assert len(set(ids)) == len(ids) == (len(prompts) if partial else 6)
        assert ids == [group.prompt.id for group in (*found[0].groups, *found[0].open_groups)]


def test_verdicts_of_a_generation_that_is_broken_off_count_nowhere(
    pools: list[rewards.Pool],
) -> None:
    class StoppedEngine(StandInEngine):
        def generate(self, prompts: Any, *, on_ended: Any, **_: Any) -> Any:
            rollout = Rollout(np.zeros(3, np.int32), np.zeros(3, np.float32), False)
            on_ended([(prompt, 0, rollout) for prompt in prompts])
            return None

    source = PromptSource([Prompt(str(i), (i,), "old") for i in range(6)], seed=0)
    sampled = sample(
        StoppedEngine(),
        source,
        pools[0],
        TOKENIZER,
        config_of(6),
        attempt=ATTEMPT,
        stopwatch=Stopwatch(),
        step=0,
    )
    assert sampled is None
    assert pools[0].judge([("echo it", "new")])[0].reason == "it for new"


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
@pytest.mark.parametrize("partial", [True, False])
def test_ranks_agree_on_what_is_whole_and_what_is_left(
    monkeypatch: pytest.MonkeyPatch, new: str, wanted: int, whole: str, left: str, partial: bool
) -> None:
    monkeypatch.setattr(sample_module.rewards, "score", judge)
    config = config_of(6, oversampling=1.5, partial_rollouts=partial)
    tokens = np.zeros(4, np.int32)
    rollout = Rollout(tokens, np.zeros(4, np.float32), False, False, Carried(0, np.ones(4)))
    opened = [OpenGroup(Prompt(i, (1,), ""), (rollout,) * GROUP_SIZE) for i in "678"]
    engines = [StandInRank(rank, LENGTHS) for rank in range(4)]

    def run(engine: StandInRank) -> Any:
        return sample_module._judge(
            engine,
            [Prompt(i, (1,), "") for i in new],
            opened,
            wanted,
            None,
            None,
            config,
            attempt=ATTEMPT,
            stopwatch=Stopwatch(),
            occupancy=Occupancy(),
            step=1,
        )

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, engines))
    for judged in found:
        assert "".join(group.prompt.id for group in judged.groups) == whole
        for group in judged.groups:
            lengths = [len(r.token_ids) for r in group.rollouts]
            assert lengths == [LENGTHS[group.prompt.id]] * GROUP_SIZE
            assert all(r.finished for r in group.rollouts)
            assert len(group.verdicts) == GROUP_SIZE
        ids = "".join(group.prompt.id for group in judged.open_groups)
        assert ids == (left if partial else "")
    first = found[0]
    # Both ranks of an engine make the same; half of all is there.
    num_new = sum(engine.num_tokens for engine in engines) // 2
    num_begun_before = 3 * GROUP_SIZE * 4
    num_whole = sum(GROUP_SIZE * LENGTHS[i] for i in whole)
    num_left = num_new + num_begun_before - num_whole
    assert first.num_lost_tokens == (0 if partial else num_left)
    if partial:
        rollouts = [r for group in first.open_groups for r in group.rollouts]
        assert sum(len(r.token_ids) for r in rollouts) == num_left
        finished = {g.prompt.id for g in first.open_groups if g.rollouts[0].finished}
        assert finished == ({"5"} if wanted == 6 else set())


def test_a_batch_mixes_old_groups_and_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update learns from consecutive groups: it must not see one kind alone."""
    monkeypatch.setattr(sample_module.rewards, "score", judge)
    config = config_of(16, oversampling=1.5, partial_rollouts=True)
    source = PromptSource([Prompt(str(i), (i,), "") for i in range(100)], seed=0)
    opened: list[OpenGroup] = []
    num_old = np.zeros(16, int)
    for step in range(60):
        were_open = {group.prompt.id for group in opened}
        sampled = sample(
            StandInEngine(),
            source,
            None,
            None,
            config,
            open_groups=opened,
            attempt=ATTEMPT,
            stopwatch=Stopwatch(),
            step=step,
        )
        assert sampled is not None
        num_old += [group.prompt.id in were_open for group in sampled.groups]
        opened = sampled.open_groups
    shares = num_old.reshape(4, 4).sum(axis=1) / num_old.sum()
    assert all(0.2 < share < 0.3 for share in shares), shares


def test_what_has_been_open_longest_is_taken_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five that end together, in a later round that wants two and begins none."""
    monkeypatch.setattr(sample_module.rewards, "score", judge)
    config = config_of(6, oversampling=1.5, partial_rollouts=True)
    empty = Rollout(np.empty(0, np.int32), np.empty(0, np.float32), False, finished=False)
    opened = [OpenGroup(Prompt(i, (1,), ""), (empty,) * GROUP_SIZE) for i in "01234"]
    judged = sample_module._judge(
        StandInEngine(dict.fromkeys("01234", 5)),
        [],
        opened,
        2,
        None,
        None,
        config,
        attempt=ATTEMPT,
        stopwatch=Stopwatch(),
        occupancy=Occupancy(),
        step=1,
    )
    assert judged is not None
    assert [group.prompt.id for group in judged.groups] == ["0", "1"]
    assert [group.prompt.id for group in judged.open_groups] == ["2", "3", "4"]


@pytest.mark.parametrize("rounds", [0, 2])
def test_open_groups_are_finished_and_nothing_that_was_sampled_is_lost(
    monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    """Problems are learned from as often as each other, however long their responses."""
    config = config_of(6, oversampling=1.5, partial_rollouts=True, dynamic_sampling_rounds=rounds)
    judged: list[Rollout] = []

    def remember(_: Any, prompts: Any, rollouts: Any, **__: Any) -> list[tuple[Verdict, ...]]:
        judged.extend(r for group in rollouts for r in group)
        return judge(_, prompts, rollouts)

    monkeypatch.setattr(sample_module.rewards, "score", remember)
    source = PromptSource([Prompt(str(i), (i,), "") for i in range(40)], seed=0)
    engine = StandInEngine()
    opened: list[OpenGroup] = []
    finished: list[str] = []
    gaps = []
    for step in range(60):
        stopwatch, num_calls = Stopwatch(), len(engine.there_s)
        sampled = sample(
            engine,
            source,
            None,
            None,
            config,
            open_groups=opened,
            attempt=ATTEMPT,
            stopwatch=stopwatch,
            step=step,
        )
        assert sampled is not None
        ids = [group.prompt.id for group in sampled.groups]
        assert len(ids) == len(set(ids)) == 6
        still = {group.prompt.id for group in sampled.open_groups}
        assert len(still) == len(sampled.open_groups) and not still & set(ids)
        rollouts = [r for group in sampled.groups for r in group.rollouts]
        assert all(r.finished for r in rollouts)
        there_s = engine.there_s[num_calls:]
        assert 1 <= len(there_s) <= 1 + rounds
        idle_share = 1 - len(there_s) / sum(there_s)
        assert stopwatch.notes["perf/rollout_idle_share"] == pytest.approx(idle_share)
        assert "rollout/lost_token_share" not in sampled.metrics
        if not rounds:
            # Three of nine stay open, and what went on is nearly always what is finished first.
            assert len(still) == 3
            assert len(source.state_dict()["remaining"]) + len(finished) + 6 + 3 == 40 * (
                1 + source.state_dict()["epoch"]
            )
            finished += ids
            carried = sum((r.token_ids < step).sum() for r in rollouts)
            share = carried / sum(len(r.token_ids) for r in rollouts)
            assert sampled.metrics["rollout/carried_token_share"] == pytest.approx(share)
            gap = step - min(int(r.token_ids[0]) for r in rollouts)
            assert sampled.metrics["rollout/oldest_version_gap"] == gap
            gaps.append(gap)
        # What `carry` does; a token's version is the token itself.
        opened = [
            replace(
                group,
                rollouts=tuple(
                    replace(r, carried=Carried(int(r.token_ids[0]), r.log_probs))
                    if len(r.token_ids)
                    else r
                    for r in group.rollouts
                ),
            )
            for group in sampled.open_groups
        ]
    if not rounds:
        counts = [finished.count(str(i)) for i in range(40)]
        assert sum(counts) == 360 and max(counts) - min(counts) <= 2
        assert max(gaps) >= 1
    # Every token that was sampled has been judged, once, or is open.
    everything = [*judged, *(r for group in opened for r in group.rollouts)]
    assert sum(len(r.token_ids) for r in everything) == engine.num_tokens
    # Without the option, what is open goes on once more, and then the source has it back.
    alone = config.batch.model_copy(update={"partial_rollouts": False, "oversampling": 1.0})
    sampled = sample(
        engine,
        source,
        None,
        None,
        config.model_copy(update={"batch": alone}),
        open_groups=opened,
        attempt=ATTEMPT,
        stopwatch=stopwatch,
        step=60,
    )
    assert sampled is not None and sampled.open_groups == []
    if not rounds:
        assert {group.prompt.id for group in opened} < {g.prompt.id for g in sampled.groups}
