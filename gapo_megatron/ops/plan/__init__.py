"""Plans of a run before it starts: layouts, memory, time."""
