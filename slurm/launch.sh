#!/usr/bin/env bash
# Starts one training process per GPU of a Slurm job, by srun; no other launcher is involved.
#
#   slurm/launch.sh CONFIG.toml [section.key=value ...]
#
# PYTHON          interpreter (default .venv/bin/python)
# DRY_RUN=1       print the resolved config and the arithmetic, start nothing; works outside Slurm too
# WORLD_SIZE      processes a dry run assumes outside a job (default 8)
set -euo pipefail

[ $# -ge 1 ] || { echo "usage: slurm/launch.sh CONFIG.toml [section.key=value ...]" >&2 && exit 2; }
python=${PYTHON:-.venv/bin/python}
[ -x "$(command -v "$python")" ] || { echo "no interpreter $python: set PYTHON (docs/slurm.md)" >&2 && exit 2; }

if [ "${DRY_RUN:-0}" = 1 ]; then
  # What a launcher would set, so that the arithmetic is that of the whole job.
  export RANK=0 LOCAL_RANK=0 WORLD_SIZE="${SLURM_NTASKS:-${WORLD_SIZE:-8}}" MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
  exec "$python" -m gapo_megatron.train "$@" --dry-run
fi
[ -n "${SLURM_JOB_ID:-}" ] || { echo "not in a Slurm job: use sbatch, or DRY_RUN=1" >&2 && exit 2; }

export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# One hardware queue, so that Megatron's communication starts before the computation it overlaps with.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

# Who is rank 0 and where: each process reads it from SLURM_* (gapo_megatron/launch).
echo "[launch] job $SLURM_JOB_ID attempt ${SLURM_RESTART_COUNT:-0}: $SLURM_NTASKS processes on" \
  "$SLURM_JOB_NODELIST"
# Every task sees all GPUs of its node (peer-to-peer needs that) and takes the one of its local rank.
# The first process that fails ends the job; srun does not inherit --cpus-per-task, hence its repetition.
exec srun --kill-on-bad-exit=1 --wait=60 --label ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
  "$python" -m gapo_megatron.train "$@"
