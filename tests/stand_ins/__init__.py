"""Libraries' compiled parts in plain PyTorch, for a CPU: as strict, and with the same results."""
