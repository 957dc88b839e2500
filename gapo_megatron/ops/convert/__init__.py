"""What the two conversion tools do: convert, check what was written, report."""
