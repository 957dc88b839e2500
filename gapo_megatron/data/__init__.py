"""Training problems: schema of the files, tokenizer, and their seeded, resumable order."""
