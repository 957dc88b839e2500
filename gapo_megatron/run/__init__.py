"""One run's life: its processes, when it stops, what it writes down."""
