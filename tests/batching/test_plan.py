import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gapo_megatron.batching import plan
from gapo_megatron.errors import ConfigError
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
