"""Log-probs of response tokens from hidden states and an output layer, and one sum per sequence.

The output layer may be vocabulary-parallel.

Imports neither megatron nor vllm.
"""

from gapo_megatron.logprob.implementation import Resolved, choose_implementation, choose_together
from gapo_megatron.logprob.operator import token_log_probs
from gapo_megatron.logprob.rows import RowPlan
from gapo_megatron.logprob.sequences import Sequences

__all__ = [
    "Resolved",
    "RowPlan",
    "Sequences",
    "choose_implementation",
    "choose_together",
    "token_log_probs",
]
