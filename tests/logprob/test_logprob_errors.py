"""What the log-prob operator refuses."""

import pytest
import torch

from gapo_megatron.errors import DivergenceError
from gapo_megatron.logprob import token_log_probs
from tests.logprob_setup import problem
from tests.messages import mentions


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden": torch.zeros(4)}, ["hidden (4,)"]),
        ({"hidden": torch.zeros(4, 8, dtype=torch.int16)}, ["hidden", "int16", "H"]),
        ({"weight": torch.zeros(6, 9)}, ["weight (6, 9)", "(6, 8)", "[V_local, H]"]),
        ({"weight": torch.zeros(6, 8, dtype=torch.bfloat16)}, ["weight", "bfloat16", "float32"]),
        ({"hidden": torch.zeros(4, 0), "weight": torch.zeros(6, 0)}, ["hidden (4, 0)", "H > 0"]),
        ({"weight": torch.zeros(0, 8)}, ["weight", "row"]),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, ["labels (3)", "row", "(4)"]),
        ({"labels": torch.zeros(4, 1, dtype=torch.int64)}, ["labels (4, 1)"]),
        ({"row_index": torch.arange(3)}, ["row_index (3,)", "(4,)"]),
        ({"row_index": torch.arange(4).int()}, ["row_index", "int32"]),
        ({"row_index": torch.tensor([0, 2, 1, 3])}, ["row_index[2] (1)"]),
        ({"row_index": torch.tensor([0, 1, 1, 3])}, ["row_index[2] (1)"]),
        ({"row_index": torch.tensor([0, 1, 2, 4])}, ["row_index[3] (4)", "0..3"]),
        ({"row_index": torch.tensor([-1, 1, 2, 3])}, ["row_index[0] (-1)"]),
        ({"main_grad": torch.zeros(6, 8).bfloat16()}, ["main_grad", "bfloat16", "float32"]),
        ({"main_grad": torch.zeros(5, 8)}, ["main_grad (5, 8)", "(6, 8)"]),
        ({"implementation": "triton"}, ["implementation ('triton')", "bfloat16", "cpu"]),
        ({"labels": torch.zeros(4, dtype=torch.int32)}, ["labels", "int32"]),
        ({"labels": torch.tensor([0, 1, 6, 2])}, ["labels[2] (6)", "0..5"]),
        ({"labels": torch.tensor([0, -100, 1, 2])}, ["labels[1] (-100)"]),
        ({"labels": torch.tensor([0, 1, 2, 5]), "vocab_size": 5}, ["labels[3] (5)", "0..4"]),
        ({"temperature": 0.0}, ["temperature (0.0)"]),
        ({"temperature": float("nan")}, ["temperature (nan)"]),
        ({"vocab_start": 6}, ["vocab_start (6)"]),
        ({"vocab_size": 7}, ["vocab_size (7)", "1..6"]),
        ({"vocab_size": 0}, ["vocab_size (0)"]),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], named: list[str]) -> None:
    arguments = {
        "hidden": torch.zeros(4, 8),
        "weight": torch.zeros(6, 8),
        "labels": torch.zeros(4, dtype=torch.int64),
    } | change
    with pytest.raises(ValueError, match=mentions(*named)):
        token_log_probs(**arguments)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("return_entropy", [False, True])
def test_values_that_are_not_finite_are_named(value: float, return_entropy: bool) -> None:
    hidden, weight, labels = problem(9, 12)
    bad_hidden, bad_weight = hidden.clone(), weight.clone()
    bad_hidden[5, 3] = value
    bad_weight[7, 3] = value
    with pytest.raises(DivergenceError, match=mentions("row 5", "hidden[5]")):
        token_log_probs(bad_hidden, weight, labels, return_entropy=return_entropy)
    with pytest.raises(DivergenceError, match=mentions("weight", "token 7")):
        token_log_probs(hidden, bad_weight, labels, return_entropy=return_entropy)
    with pytest.raises(DivergenceError, match="overflow"):
        token_log_probs(hidden * 1e30, weight * 1e30, labels, return_entropy=return_entropy)
