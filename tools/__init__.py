"""What a person runs: command lines, and the work behind them."""
