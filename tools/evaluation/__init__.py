"""Work of tools/evaluate.py: benchmarks, sampling, statistics, tables."""
