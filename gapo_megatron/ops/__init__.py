"""What operates runs and trains nothing. Nothing outside this package imports it."""
