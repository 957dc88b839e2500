"""Log-probs of response tokens, from hidden states and a vocabulary-parallel output layer.

Imports neither megatron nor vllm.
"""

from gapo_megatron.logprob.implementation import Resolved, choose_implementation, choose_together
from gapo_megatron.logprob.operator import token_log_probs
from gapo_megatron.logprob.row_plan import RowPlan

__all__ = [
    "Resolved",
    "RowPlan",
    "choose_implementation",
    "choose_together",
    "token_log_probs",
]
