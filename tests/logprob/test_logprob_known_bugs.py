"""What went wrong in other heads like this one, each with the test that would see it here.

Below are those without a better place. The others, as reported in peers:

Columns and statistics
- Columns that pad the vocabulary share in the softmax:
  test_logprob.py::test_padded_columns_take_no_part
- A loss rebuilt from the log-sum loses its digits under a common offset of the logits:
  test_logprob.py::test_a_common_offset_costs_nothing_beyond_the_logits_own_rounding
- Logits rounded to bfloat16 decide which sequences are clipped:
  test_logprob.py::test_the_log_ratio_of_a_sequence_is_as_exact_as_its_clip_is_narrow
- Log-probs change with the shape of the batch:
  test_logprob_bits.py::test_a_sequence_keeps_the_bits_of_its_ratio_in_any_packing

Temperature
- The policy forgets it, or its entropy does:
  distributed/test_policy_one_rank.py::test_temperature_and_entropy_reach_the_head
- It is applied where the engine did not sample with it:
  test_weight_sync.py::test_the_engine_must_agree_with_the_model_at_temperature_one
- The gradient lacks its 1 / temperature:
  test_logprob.py::test_values_and_gradients_agree_with_float64

Gradients
- Wrong ones unless every row has the same upstream gradient:
  test_logprob.py::test_values_and_gradients_agree_with_float64
- Hidden states that are not contiguous are summed over ranks in vain, or not at all; dX of a
  vocabulary shard is never summed, or only under sequence parallelism:
  distributed/test_logprob.py::test_every_rank_saw_every_example
- A plain all-reduce of a loss has no, or the wrong, gradient:
  distributed/test_context.py::test_four_ranks_compute_what_one_does
- A shared weight taken for a layer's own or the reverse, or none where it is shared:
  distributed/test_policy_one_rank.py::test_log_probs_gradients_and_updates_are_those_of_transformers
- Entropy needs all logits at once:
  test_logprob.py::test_logits_exist_one_tile_at_a_time
- Labels are shifted across sequences, so nothing may be packed:
  batching/test_pack.py::test_every_row_predicts_its_label
- A batch without any gradient moves weights all the same, by Adam's momenta and decay:
  test_skip.py::test_an_update_without_gradient_never_was

What cannot occur
- A reference that is itself rounded (partial sums in bfloat16): references here are float64.
- Timing runs that repeat a kernel which writes in place: `triton_kernels._TILES` is a table, and
  nothing is timed.
- Weights of layers that predict further tokens stay behind: `PolicyModel` builds none.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gapo_megatron.learn.score import log_probs
from gapo_megatron.logprob import tiles, token_log_probs
from gapo_megatron.policy import Policy, destroy, initialize
from tests.dist import single_rank
from tests.distributed.policy_setup import (
    make_batch,
    make_config,
    pack_all,
    read_weights,
    save_model,
)
from tests.logprob_setup import (
    BOUNDS,
    both,
    many_blocks,
    problem,
    reference,
    relative,
    with_gradients,
)
from tests.messages import mentions


@pytest.mark.parametrize("num_columns", [1, 2047, 2049, 4096, 4097])
def test_columns_beyond_the_last_do_not_count_as_logits_of_zero(num_columns: int) -> None:
    """In a peer: log-probs of up to +123. Beside logits of -100 a single zero would be all."""
    hidden, weight, labels = problem(20, num_columns)
    hidden[:, 0], weight[:, 0] = 10.0, -10.0
    log_probs, entropy = both(hidden, weight, labels)
    expected = reference(hidden, weight, labels)
    assert (log_probs - expected[0]).abs().max() <= 5e-5  # logits of 100
    assert (entropy - expected[1]).abs().max() <= 5e-5
    assert log_probs.max() <= 0


@pytest.mark.parametrize("offset", [-1e4, -1e30])
def test_strongly_negative_logits_are_not_the_logarithm_of_zero(offset: float) -> None:
    """In a peer: a running maximum that starts at 0 leaves no exponential above 0."""
    hidden, weight, labels = torch.ones(5, 1), torch.full((70, 1), offset), torch.arange(5) * 14
    with many_blocks():
        log_probs, entropy, *gradients = with_gradients(both, hidden, weight, labels)
    # 70 equal logits; log 70 = 4.25 in float32.
    torch.testing.assert_close(log_probs, -torch.full((5,), 70.0).log(), rtol=0, atol=1e-6)
    torch.testing.assert_close(entropy, torch.full((5,), 70.0).log(), rtol=0, atol=1e-6)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_a_label_of_another_shard_matches_no_column_here() -> None:
    """In a peer: the number that stood for "elsewhere" was that of a padded column."""
    hidden, weight, _ = problem(16, 7)
    elsewhere = torch.tensor([-7, -1, 7, 8, 2048, 10**6] + [7] * 10)
    options = {"inverse_temperature": 1.0}
    stats = tiles.softmax_stats(hidden, weight, elsewhere, with_entropy=False, **options)
    assert stats.isfinite().all() and not stats[tiles.WEIGHTED - 1].any()
    dz, _ = tiles.grad_logits(
        hidden,
        weight,
        elsewhere,
        maximum=stats[tiles.MAXIMUM],
        inverse_sum=stats[1].reciprocal(),
        grad_log_probs=torch.ones(16),
        entropy=None,
        grad_entropy=None,
        **options,
    )
    assert (dz < 0).all()  # -p, and nothing that a label adds


def test_sums_over_tiles_and_blocks_are_not_rounded_on_the_way() -> None:
    """In peers: dX summed in bfloat16 over chunks of columns, dW over chunks of rows."""
    inputs = problem(200, 700, dtype=torch.bfloat16)
    expected = with_gradients(reference, *inputs, dtype=torch.float64)
    with many_blocks(num_columns=14):  # 50 tiles, 25 blocks
        *_, grad_hidden, grad_weight = with_gradients(both, *inputs)
    assert relative(grad_hidden, expected[2]) <= BOUNDS[torch.bfloat16][2]
    assert relative(grad_weight, expected[3]) <= BOUNDS[torch.bfloat16][3]
    # The measure can tell: dW of 25 blocks of 8 rows, rounded after each.
    rounded = torch.zeros(700, 64, dtype=torch.bfloat16)
    for rows in torch.arange(200).split(8):
        leaf = inputs[1].clone().requires_grad_()
        token_log_probs(inputs[0][rows], leaf, inputs[2][rows]).sum().backward()
        rounded += leaf.grad
    leaf = inputs[1].double().requires_grad_()
    reference(inputs[0], leaf, inputs[2])[0].sum().backward()
    assert leaf.grad is not None
    assert relative(rounded, leaf.grad) > BOUNDS[torch.bfloat16][3]


def test_both_passes_see_the_same_logits_however_large() -> None:
    """In a peer: bfloat16 logits forward, float32 backward; probabilities off by 86 % at 640."""
    hidden, weight, labels = problem(200, 300, kind="peaked", dtype=torch.bfloat16)
    hidden = hidden * 24
    assert (hidden.float() @ weight.float().T).amax(dim=1).median() > 600
    ours = with_gradients(both, hidden, weight, labels)
    expected = with_gradients(reference, hidden, weight, labels, dtype=torch.float64)
    # Logits near 640 have a last bit of 6e-5; a log-prob adds the errors of two.
    assert (ours[0] - expected[0]).abs().max() <= 2e-4
    for value, right in zip(ours[2:], expected[2:], strict=True):
        assert relative(value, right) <= BOUNDS[torch.bfloat16][2]


def test_an_upstream_gradient_may_have_any_strides() -> None:
    """In a peer: read as if it were contiguous."""
    hidden, weight, labels = problem(20, 30)
    upstream = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    found = []
    for gradient in (upstream[:, 1], upstream[:, 1].clone()):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        token_log_probs(*leaves, labels).backward(gradient)
        found.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_scored_may_hold_anything(value: float) -> None:
    """In peers: masked by a factor of 0, which makes NaN of them."""
    hidden, weight, labels = problem(40, 30)
    rows = torch.arange(10, 30)
    hidden[:10] = hidden[30:] = value
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    outputs = both(*leaves, labels[rows], row_index=rows)
    gradients = [torch.where(rows % 3 == 0, 0.0, 1.0)] * 2  # scored, and clipped in part
    torch.autograd.backward(outputs, gradients)
    expected = [leaf.clone().detach().requires_grad_() for leaf in (hidden[rows], weight)]
    torch.autograd.backward(both(*expected, labels[rows]), gradients)
    assert leaves[0].grad is not None and not leaves[0].grad[[*range(10), *range(30, 40)]].any()
    assert torch.equal(leaves[0].grad[rows], expected[0].grad)
    assert torch.equal(leaves[1].grad, expected[1].grad)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, "qwen2_untied")
    config = make_config(folder, rollout={"temperature": 0.5})
    with single_rank():
        policy = Policy.build(config, initialize(config.parallel), "cpu")
        policy.load_hf_weights(read_weights(folder))
        yield policy
        destroy()


def test_a_temperature_of_zero_is_an_error(policy: Policy) -> None:
    """In a peer it meant "as sampled", elsewhere "none"."""
    microbatches = pack_all(make_batch(), [(0,)])
    with pytest.raises(ValueError, match=mentions("temperature (0.0)")):
        log_probs(policy, microbatches, temperature=0.0)
    assert log_probs(policy, microbatches)[0] is not None


def test_weights_are_read_outside_of_their_layer_only_where_none_gathers_them(
    policy: Policy,
) -> None:
    """In a peer: hooks that gather a layer's weight, or reduce its gradient, as the layer runs.

    The head reads `head_weight` without running a layer, and writes to its gradient buffer.
    """
    (model,) = policy.model
    assert not model.ddp_config.overlap_param_gather
    assert not model.ddp_config.overlap_grad_reduce
