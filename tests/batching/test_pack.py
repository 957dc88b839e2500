import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gapo_megatron.batching import pack, unpack
from gapo_megatron.errors import DataError
from gapo_megatron.rollouts import Batch, Rollouts
from gapo_megatron.types import LossMicrobatch
from tests.messages import mentions

lengths = st.tuples(st.integers(1, 6), st.integers(1, 6))


def make(pairs):
    """A batch whose tokens are all different, so that a misplaced one cannot go unseen."""
    prompts, responses, first = [], [], 1
    for num_prompt, num_response in pairs:
        ids = np.arange(first, first + num_prompt + num_response, dtype=np.int32)
        prompts.append(ids[:num_prompt])
        responses.append(ids[num_prompt:])
        first += len(ids)
    size = len(pairs)
    log_probs = [np.zeros(len(ids), dtype=np.float32) for ids in responses]
    rollouts = Rollouts.of(prompts, responses, log_probs)
    return Batch(
        rollouts.table,
        rollouts.tokens,
        advantages=torch.ones(size, dtype=torch.float64),
        num_correct=torch.ones(size, dtype=torch.int64),
        group_size=torch.full((size,), 8),
        valid=torch.ones(size, dtype=torch.bool),
    )


@settings(max_examples=100)
@given(
    pairs=st.lists(lengths, min_size=1, max_size=8),
    align=st.integers(1, 8),
    data=st.data(),
)
def test_every_row_predicts_its_label(pairs, align, data):
    batch = make(pairs)
    chosen = data.draw(st.permutations(range(len(pairs))))[: data.draw(st.integers(0, len(pairs)))]
    packed = pack(batch, chosen, align=align, device="cpu")
    tokens, positions = packed.tokens[0].tolist(), packed.position_ids[0].tolist()
    bounds = packed.cu_seqlens.tolist()

    row, longest = 0, 0
    for number, i in enumerate(chosen):
        start, end = bounds[number], bounds[number + 1]
        full = [*batch.prompt_ids[i].tolist(), *batch.response_ids[i].tolist()]
        assert tokens[start:end] == full[:-1], "all but the last token is fed"
        assert positions[start:end] == list(range(end - start))
        for label in batch.response_ids[i].tolist():
            at = int(packed.row_index[row])
            assert start <= at < end
            assert full[at - start + 1] == label == int(packed.labels[row])
            assert int(packed.sequence_ids[row]) == number
            row += 1
        longest = max(longest, end - start)
    assert row == len(packed.labels) == len(packed.row_index) == len(packed.sequence_ids)

    num_real = bounds[len(chosen)]
    assert num_real == int(batch.num_fed_tokens[list(chosen)].sum())
    assert len(tokens) % align == 0
    assert len(tokens) - num_real < align or (not chosen and len(tokens) == align)
    if len(tokens) > num_real:
        assert bounds[len(chosen) + 1 :] == [len(tokens)], "padding is one sequence of its own"
        assert positions[num_real:] == list(range(len(tokens) - num_real))
        longest = max(longest, len(tokens) - num_real)
    else:
        assert len(bounds) == len(chosen) + 1
    assert packed.max_seqlen == longest
    assert packed.indices == tuple(chosen)


@settings(max_examples=100)
@given(data=st.data(), sequence_align=st.sampled_from([1, 4]), align=st.sampled_from([4, 8]))
def test_a_conversation_is_packed_as_a_sequence_of_its_own(data, sequence_align, align) -> None:
    """Of an episode whose conversations take turns; its rows stay those of one sequence."""
    numbers, masks, lengths = [], [], []
    for _ in range(data.draw(st.integers(1, 4))):
        drawn = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=9))
        found = {number: i for i, number in enumerate(dict.fromkeys([0, *drawn]))}
        numbers.append(np.array([0, *(found[one] for one in drawn)], np.int32))
        # What opens a conversation is the environment's.
        opens = np.zeros(len(numbers[-1]), bool)
        opens[np.unique(numbers[-1], return_index=True)[1][1:]] = True
        shape = st.lists(st.booleans(), min_size=len(opens), max_size=len(opens))
        masks.append(np.array(data.draw(shape)) & ~opens)
        lengths.append((data.draw(st.integers(1, 4)), len(opens)))
    plain = make(lengths)
    size = range(len(lengths))
    prompts, responses = ([one[i] for i in size] for one in (plain.prompt_ids, plain.response_ids))
    log_probs = [-ids.astype(np.float32) for ids in responses]
    whole = Rollouts.of(prompts, responses, log_probs, response_masks=masks, conversations=numbers)
    whole = dataclasses.replace(plain, table=whole.table, tokens=whole.tokens)
    packed = pack(whole, size, align=align, sequence_align=sequence_align, device="cpu")

    # Each conversation alone, those of the first with the prompt.
    alone = {(i, n): responses[i][numbers[i] == n] for i in size for n in {*numbers[i].tolist()}}
    read = [[*prompts[i], *ids] if n == 0 else [*ids] for (i, n), ids in alone.items()]
    bounds = packed.cu_seqlens.tolist()
    fed = [one[:-1] for one in read if len(one) > 1]
    for place, one in enumerate(fed):
        start, end = bounds[place : place + 2]
        assert packed.tokens[0, start:end].tolist() == [*one, *[0] * (-len(one) % sequence_align)]
        assert packed.position_ids[0, start:end].tolist() == [*range(end - start)]
        assert packed.is_padding[0, start:end].sum() == -len(one) % sequence_align
    assert int(whole.num_fed_tokens.sum()) == sum(map(len, fed)) == int((~packed.is_padding).sum())
    assert packed.max_seqlen >= max(map(len, fed))
    labels = {int(label) for ids, mask in zip(responses, masks, strict=True) for label in ids[mask]}
    assert {*packed.labels.tolist()} == labels and len(packed.labels) == len(labels)
    following = {a: b for one in read for a, b in itertools.pairwise(one)}
    at = packed.tokens[0, packed.row_index].tolist()
    assert [following[token] for token in at] == packed.labels.tolist()
    of_sequence = [i for i in size for _ in range(masks[i].sum())]
    assert packed.sequence_ids.tolist() == of_sequence
    assert packed.row_index.tolist() == sorted(packed.row_index.tolist())
    # What is known of tokens goes with them, and what is found of them comes back in order.
    assert packed.rollout_log_probs.tolist() == [-label for label in packed.labels.tolist()]
    back = unpack(whole, [[*size]], [packed.labels])
    assert [back[i].tolist() for i in size] == [responses[i][masks[i]].tolist() for i in size]


@pytest.mark.parametrize("pair", [(0, 3), (3, 0)])
def test_an_empty_prompt_or_response_is_refused(pair):
    with pytest.raises(AssertionError, match="empty"):
        pack(make([(1, 1), pair]), [0, 1], device="cpu")


def test_a_token_that_the_model_does_not_have_is_refused():
    batch = make([(2, 3), (1, 2)])  # tokens 1..8
    pack(batch, [0, 1], vocab_size=9, device="cpu")
    with pytest.raises(DataError, match=mentions("sequence 1", "response", "8", "below 8")):
        pack(batch, [0, 1], vocab_size=8, device="cpu")
    batch.prompt_ids[0][1] = -1
    with pytest.raises(DataError, match=mentions("sequence 0", "prompt", "-1")):
        pack(batch, [0, 1], vocab_size=9, device="cpu")
    pack(batch, [1], vocab_size=9, device="cpu")


def test_a_masked_token_is_read_and_has_no_row() -> None:
    prompts = [np.array([1, 2], np.int32), np.array([3], np.int32)]
    responses = [np.array([4, 5, 6, 7], np.int32), np.array([8, 9, 10], np.int32)]
    masks = [np.array([True, False, True, False]), np.array([False, False, True])]
    batch = Rollouts.of(prompts, responses, response_masks=masks)
    packed = pack(batch, [1, 0], device="cpu")
    whole = pack(Rollouts.of(prompts, responses), [1, 0], device="cpu")
    for name in ("tokens", "position_ids", "cu_seqlens"):
        assert torch.equal(getattr(packed, name), getattr(whole, name))
    assert packed.labels.tolist() == [10, 4, 6]
    assert packed.sequence_ids.tolist() == [0, 1, 1]
    # The row before a label predicts it: 3 8 9 | 1 2 4 5 6.
    assert packed.row_index.tolist() == [2, 4, 6]
    by_sequence = unpack(batch, [[1, 0]], [torch.tensor([0.1, 0.2, 0.3])])
    assert {i: len(values) for i, values in by_sequence.items()} == {1: 1, 0: 2}
    everything = [np.ones(len(ids), dtype=bool) for ids in responses]
    same = pack(Rollouts.of(prompts, responses, response_masks=everything), [1, 0], device="cpu")
    for name in ("tokens", "row_index", "labels", "sequence_ids"):
        assert torch.equal(getattr(same, name), getattr(whole, name))


@pytest.mark.parametrize("is_carried", [True, False])
def test_a_microbatch_has_what_its_loss_reads(is_carried: bool) -> None:
    """By sequence and by scored row; of a sequence without carried tokens nothing is carried."""
    lengths, masks = (4, 3), [np.array([True, False, True, True]), None]
    log_probs = [-np.arange(1, n + 1, dtype=np.float32) for n in lengths]
    carried = [log_probs[0][:3] / 2, log_probs[1][:0]]
    rollouts = Rollouts.of(
        [np.array([1], np.int32)] * 2,
        [np.arange(2, 2 + n, dtype=np.int32) for n in lengths],
        log_probs,
        carried_log_probs=carried if is_carried else (),
        response_masks=masks,
    )
    batch = Batch(
        rollouts.table,
        rollouts.tokens,
        advantages=torch.tensor([0.5, -0.5], dtype=torch.float64),
        num_correct=torch.tensor([1, 2]),
        group_size=torch.tensor([4, 3]),
        valid=torch.ones(2, dtype=torch.bool),
    )
    packed = pack(batch, [1, 0], device="cpu")
    assert packed.sequence_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert packed.advantages.tolist() == [-0.5, 0.5]
    assert packed.num_correct.tolist() == [2, 1] and packed.group_size.tolist() == [3, 4]
    assert packed.row_offsets.tolist() == [0, 3, 6]
    assert packed.is_carried.tolist() == [False, is_carried]
    assert packed.rollout_log_probs.tolist() == [-1, -2, -3, -1, -3, -4]
    if is_carried:
        assert packed.carried_log_probs.tolist() == [0, 0, 0, -0.5, -1.5, 0]
        assert packed.is_carried_row.tolist() == [False, False, False, True, True, False]
    else:
        assert packed.carried_log_probs is None and packed.is_carried_row is None
    assert not isinstance(pack(rollouts, [1, 0], device="cpu"), LossMicrobatch), "only scored"
