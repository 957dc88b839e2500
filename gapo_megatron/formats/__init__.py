"""Hugging Face folders and Megatron folders: read, write, check."""
