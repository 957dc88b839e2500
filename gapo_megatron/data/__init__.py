"""Problems in: schema of the files, tokenizer, seeded and resumable order."""
