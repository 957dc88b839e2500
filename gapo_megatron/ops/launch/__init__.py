"""Starting, stopping and watching a run; the only reader of SLURM_*, RANK and GAPO_*."""
