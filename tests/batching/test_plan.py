import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gapo_megatron.batching import pack, plan
from gapo_megatron.errors import ConfigError
from gapo_megatron.objective import METHODS, policy_loss
from gapo_megatron.rollouts import Batch, Rollouts
from tests.messages import mentions


@st.composite
def problems(draw, max_per_minibatch=24):
    """Arguments of `plan`: advantages with zeros, unknown verdicts, any number of ranks."""
    num_minibatches = draw(st.integers(1, 4))
    size = num_minibatches * draw(st.integers(0, max_per_minibatch))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    longest = draw(st.integers(1, 60))
    lengths = torch.randint(1, longest + 1, (size,), generator=generator)
    active = torch.rand(size, generator=generator) < draw(st.sampled_from([0.0, 0.1, 0.6, 1.0]))
    valid = torch.rand(size, generator=generator) < draw(st.sampled_from([0.5, 1.0]))
    return {
        "lengths": lengths,
        "advantages": torch.where(active, 0.5, 0.0),
        "num_response_tokens": (lengths + 1) // 2,
        "valid": valid,
        "num_minibatches": num_minibatches,
        "max_tokens_per_microbatch": draw(st.integers(longest, 4 * longest)),
        "data_parallel_size": draw(st.integers(1, 9)),
        "keep_zero_advantage": draw(st.booleans()),
    }


def make_plan(problem, **changes):
    arguments = problem | changes
    return plan(arguments.pop("lengths"), arguments.pop("advantages"), **arguments)


@settings(max_examples=200)
@given(problem=problems())
def test_a_plan_keeps_every_promise(problem):
    result = make_plan(problem)
    lengths, valid = problem["lengths"], problem["valid"]
    active = valid if problem["keep_zero_advantage"] else valid & (problem["advantages"] != 0)
    assert len(result.minibatches) == problem["num_minibatches"]
    size = len(lengths) // problem["num_minibatches"]
    for number, minibatch in enumerate(result.minibatches):
        ranks = minibatch.microbatches
        assert len(ranks) == problem["data_parallel_size"]
        assert len({len(rank) for rank in ranks}) == 1, "collectives of all ranks match"
        assert len(ranks[0]) >= 1
        dealt = [i for rank in ranks for microbatch in rank for i in microbatch]
        own = range(number * size, (number + 1) * size)
        assert sorted(dealt) == [i for i in own if active[i]], "every active sequence, once"
        for microbatch in (microbatch for rank in ranks for microbatch in rank):
            assert sum(int(lengths[i]) for i in microbatch) <= problem["max_tokens_per_microbatch"]
            assert list(microbatch) == sorted(microbatch)
        counted = [i for i in own if valid[i]]
        assert minibatch.num_sequences_global == len(counted)
        tokens = sum(int(problem["num_response_tokens"][i]) for i in counted)
        assert minibatch.num_tokens_global == tokens
        # The greedy rule's bound: what made a rank the fullest went to the emptiest.
        loads = [sum(int(lengths[i]) for mb in rank for i in mb) for rank in ranks]
        longest = max((int(lengths[i]) for i in dealt), default=0)
        assert max(loads) <= sum(loads) / len(loads) + longest
    assert result.num_tokens_computed == int(lengths[active].sum())
    assert result.num_tokens_skipped == int(lengths[~active].sum())


@settings(max_examples=30)
@given(problem=problems())
def test_the_same_arguments_give_the_same_plan(problem):
    assert make_plan(problem) == make_plan(problem)


@settings(max_examples=30)
@given(problem=problems())
def test_rewards_change_no_denominator(problem):
    """A = 0 rows are dropped, but the mini-batch stays as large as it is."""
    one = make_plan(problem, keep_zero_advantage=False)
    all_ = make_plan(problem, keep_zero_advantage=True)
    for first, second in zip(one.minibatches, all_.minibatches, strict=True):
        assert first.num_tokens_global == second.num_tokens_global
        assert first.num_sequences_global == second.num_sequences_global


def test_by_hand():
    """Two ranks, budget 10: 9 | 5 + 4 balance; the zero and the unknown stay out."""
    result = plan(
        torch.tensor([5, 9, 4, 7, 6]),
        torch.tensor([0.5, -0.5, 0.5, 0.0, 0.0]),
        num_response_tokens=torch.tensor([3, 5, 2, 4, 1]),
        valid=torch.tensor([True, True, True, True, False]),
        num_minibatches=1,
        max_tokens_per_microbatch=10,
        data_parallel_size=2,
    )
    (minibatch,) = result.minibatches
    assert minibatch.microbatches == (((1,),), ((0, 2),))
    assert minibatch.num_tokens_global == 3 + 5 + 2 + 4
    assert minibatch.num_sequences_global == 4
    assert (result.num_tokens_computed, result.num_tokens_skipped) == (18, 13)


def test_lengths_alone_are_enough():
    result = plan(
        torch.tensor([5, 9]),
        torch.tensor([0.5, -0.5]),
        num_minibatches=2,
        max_tokens_per_microbatch=10,
        data_parallel_size=1,
    )
    assert [minibatch.num_tokens_global for minibatch in result.minibatches] == [5, 9]


def test_microbatches_of_a_rank_are_even():
    """Four micro-batches of 25 rather than three of 32 and a rest of 4: no pipeline bubble."""
    result = plan(
        torch.full((100,), 1),
        torch.ones(100),
        num_minibatches=1,
        max_tokens_per_microbatch=32,
        data_parallel_size=1,
    )
    assert [len(microbatch) for microbatch in result.minibatches[0].microbatches[0]] == [25] * 4


def test_a_minibatch_without_signal_still_takes_its_step():
    """The optimizer's momentum and weight decay do not wait: one empty micro-batch per rank."""
    result = plan(
        torch.tensor([3, 3]),
        torch.zeros(2),
        num_minibatches=1,
        max_tokens_per_microbatch=3,
        data_parallel_size=3,
    )
    assert result.minibatches[0].microbatches == (((),), ((),), ((),))
    assert result.minibatches[0].num_tokens_global == 6


def test_mistakes_are_named():
    lengths, advantages = torch.tensor([5, 11, 4]), torch.ones(3)
    with pytest.raises(
        ConfigError, match=mentions("sequence 1", 11, "max_tokens_per_microbatch (10)")
    ):
        plan(
            lengths,
            advantages,
            num_minibatches=1,
            max_tokens_per_microbatch=10,
            data_parallel_size=1,
        )
    with pytest.raises(ConfigError, match=mentions("3 sequences", "2 ", "mini-batches")):
        plan(
            lengths,
            advantages,
            num_minibatches=2,
            max_tokens_per_microbatch=20,
            data_parallel_size=1,
        )


def realistic(size, *, longest, seed=0):
    """Lengths spread as reasoning models spread them; a third of the sequences say nothing."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.exp(0.8 * torch.randn(size, generator=generator)) * longest / 4
    advantages = torch.where(torch.rand(size, generator=generator) < 1 / 3, 0.0, 0.5)
    return lengths.long().clamp(16, longest), advantages


@pytest.mark.parametrize(
    ("ranks", "longest", "imbalance"),
    # About 340 active sequences per mini-batch: 43 per rank even out almost wholly; 5, less.
    [(8, 5140, 1.005), (8, 26624, 1.005), (64, 26624, 1.05)],
)
def test_ranks_finish_together(ranks, longest, imbalance):
    lengths, advantages = realistic(2048, longest=longest)
    result = plan(
        lengths,
        advantages,
        num_minibatches=4,
        max_tokens_per_microbatch=32768,
        data_parallel_size=ranks,
    )
    for minibatch in result.minibatches:
        loads = [sum(int(lengths[i]) for mb in rank for i in mb) for rank in minibatch.microbatches]
        assert max(loads) / (sum(loads) / ranks) < imbalance
        # One micro-batch more than the tokens of the fullest rank need, at most one in seven.
        needed = -(-max(loads) // 32768)
        assert len(minibatch.microbatches[0]) <= needed + max(1, needed // 7)


@pytest.mark.system
@pytest.mark.parametrize("ranks", [1, 1024])
def test_a_large_cluster_does_not_wait_for_its_plan(ranks):
    """0.5 s for 1,024 ranks, 1.8 s for one, which sorts as many numbers fifty times meanwhile."""
    lengths, advantages = realistic(65_536, longest=26_624)
    start = time.process_time()
    for _ in range(10):
        sorted(lengths.tolist())
    sorting_s = (time.process_time() - start) / 10
    start = time.process_time()
    plan(
        lengths,
        advantages,
        num_minibatches=4,
        max_tokens_per_microbatch=32_768,
        data_parallel_size=ranks,
    )
    assert time.process_time() - start < 1000 * sorting_s


def table_batch(pairs, seed):
    """A batch over a vocabulary of 11, with half of the groups' advantages zero."""
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(0, 11, p).astype(np.int32) for p, _ in pairs]
    responses = [generator.integers(0, 11, n).astype(np.int32) for _, n in pairs]
    c = torch.from_numpy(generator.integers(1, 8, len(pairs)))
    correct = torch.from_numpy(generator.random(len(pairs)) < 0.5).double()
    live = torch.from_numpy(generator.random(len(pairs)) < 0.6)
    rollouts = Rollouts.of(
        prompts, responses, [np.zeros(len(ids), np.float32) for ids in responses]
    )
    return Batch(
        rollouts.table,
        rollouts.tokens,
        advantages=torch.where(live, correct - c / 8, 0.0),
        num_correct=c,
        group_size=torch.full((len(pairs),), 8),
        valid=torch.ones(len(pairs), dtype=torch.bool),
    )


def table_gradient(batch, the_plan, weight, old_weight, method):
    """Sum over ranks and micro-batches of loss and gradient of a bigram model `weight` [11, 11]."""
    (minibatch,) = the_plan.minibatches
    weight = weight.clone().requires_grad_()
    total = 0.0
    for rank in minibatch.microbatches:
        for indices in rank:
            packed = pack(batch, indices, align=3, device="cpu")
            inputs = packed.tokens[0][packed.row_index]
            log_probs = weight[inputs].log_softmax(-1)[range(len(inputs)), packed.labels]
            old = old_weight[inputs].log_softmax(-1)[range(len(inputs)), packed.labels]
            loss = policy_loss(
                log_probs,
                old,
                sequence_ids=packed.sequence_ids,
                advantages=packed.advantages,
                num_correct=packed.num_correct,
                group_size=packed.group_size,
                num_tokens_global=minibatch.num_tokens_global,
                num_sequences_global=minibatch.num_sequences_global,
                max_response_tokens=8,
                method=method,
            ).loss
            loss.backward()
            total += float(loss.detach())
    return total, weight.grad


@settings(max_examples=30)
@given(
    pairs=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 8)), min_size=1, max_size=12),
    seed=st.integers(0, 1000),
    ranks=st.integers(1, 4),
    budget=st.integers(12, 60),
    name=st.sampled_from(sorted(METHODS)),
)
def test_any_plan_gives_the_same_loss_and_gradient(pairs, seed, ranks, budget, name):
    """Any ranks, micro-batches, padding; dropped rows or not; plan, pack and loss together."""
    batch = table_batch(pairs, seed)
    generator = torch.Generator().manual_seed(seed)
    old_weight = torch.randn(11, 11, generator=generator).double()
    weight = old_weight + 0.01 * torch.randn(11, 11, generator=generator).double()
    arguments = {
        "num_response_tokens": batch.num_sampled_tokens,
        "valid": batch.valid,
        "num_minibatches": 1,
    }
    lengths = batch.num_fed_tokens
    whole = plan(
        lengths,
        batch.advantages,
        max_tokens_per_microbatch=10_000,
        data_parallel_size=1,
        keep_zero_advantage=True,
        **arguments,
    )
    split = plan(
        lengths,
        batch.advantages,
        max_tokens_per_microbatch=budget,
        data_parallel_size=ranks,
        **arguments,
    )
    method = METHODS[name]
    loss, gradient = table_gradient(batch, whole, weight, old_weight, method)
    split_loss, split_gradient = table_gradient(batch, split, weight, old_weight, method)
    # Float64 sums of at most 100 terms of order one, in another order.
    assert split_loss == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(split_gradient, gradient, atol=1e-12, rtol=1e-12)
