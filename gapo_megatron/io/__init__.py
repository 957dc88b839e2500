"""Files: atomic writes, documents that nobody here wrote, digests, what lies in a run's folder."""
