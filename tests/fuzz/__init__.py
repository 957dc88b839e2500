"""Damaged input of every kind the package reads, thousands of cases from one seed, in one process.

- mutate: what is done to a file, a JSON or TOML document, an override.
- campaign: cases, their outcomes, and what is a finding.
- text, models, run_folder, checkpoints: what is damaged, and what the package makes of it.
- targets: all of them.

`python -m tests.fuzz --help`, or `make fuzz SEED=1 N=10000`.
"""
