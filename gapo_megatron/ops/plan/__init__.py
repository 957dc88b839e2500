"""What a run needs before it runs: layouts, memory, time."""
