"""From prompts to judged rollouts."""
