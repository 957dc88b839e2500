"""What is an architecture's own: names and shapes of weights, sizes, refusals. No torch."""
