#!/bin/bash

# Parameters
#SBATCH --account=physics
#SBATCH --cpus-per-task=12
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --job-name=gapo
#SBATCH --mem=0
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output=/shared/runs/gapo/submitit/%j_0_log.out
#SBATCH --partition=h200
#SBATCH --requeue
#SBATCH --signal=B:USR2@300
#SBATCH --time=2-00:00:00

# setup
code=(
  /shared/runs/gapo/code/submitted
)
export PYTHONPATH=${code[${SLURM_ARRAY_TASK_ID:-0}]} PYTHONSAFEPATH=1
export PYTHON=${PYTHON:-/shared/env/bin/python}
export ON_STOP=exit  # the next link continues

# command
export SUBMITIT_EXECUTOR=slurm
exec /shared/env/bin/python -u -m submitit.core._submit /shared/runs/gapo/submitit

#!/bin/bash

# Parameters
#SBATCH --account=physics
#SBATCH --cpus-per-task=12
#SBATCH --dependency=afterok:JOB_1
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --job-name=gapo
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --mem=0
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output=/shared/runs/gapo/submitit/%j_0_log.out
#SBATCH --partition=h200
#SBATCH --requeue
#SBATCH --signal=B:USR2@300
#SBATCH --time=2-00:00:00

# setup
code=(
  /shared/runs/gapo/code/submitted
)
export PYTHONPATH=${code[${SLURM_ARRAY_TASK_ID:-0}]} PYTHONSAFEPATH=1
export PYTHON=${PYTHON:-/shared/env/bin/python}
export ON_STOP=exit  # the next link continues

# command
export SUBMITIT_EXECUTOR=slurm
exec /shared/env/bin/python -u -m submitit.core._submit /shared/runs/gapo/submitit
