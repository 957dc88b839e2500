"""Work of the two conversion tools: convert, check what was written, report."""
