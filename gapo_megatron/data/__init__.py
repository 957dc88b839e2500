"""Problems in: schema of the files, tokenizer, seeded and resumable order."""

from gapo_megatron.data.schema import read_prompts
from gapo_megatron.data.source import PromptSource
from gapo_megatron.data.tokenizer import load_tokenizer

__all__ = ["PromptSource", "load_tokenizer", "read_prompts"]
