"""Log-probs of response tokens from hidden states and a vocabulary-parallel output layer.

Imports neither megatron nor vllm.
"""

from gapo_megatron.logprob.ahead import Ahead
from gapo_megatron.logprob.implementation import Resolved, choose_implementation, choose_together
from gapo_megatron.logprob.operator import token_log_probs
from gapo_megatron.logprob.reduce import segment_mean, sequence_log_ratio

__all__ = [
    "Ahead",
    "Resolved",
    "choose_implementation",
    "choose_together",
    "segment_mean",
    "sequence_log_ratio",
    "token_log_probs",
]
