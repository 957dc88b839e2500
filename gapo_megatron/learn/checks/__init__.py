"""What a step scores and checks beside its updates, each with one call."""
