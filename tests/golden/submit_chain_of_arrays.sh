#!/bin/bash

# Parameters
#SBATCH --array=0-2%2
#SBATCH --cpus-per-task=2
#SBATCH --job-name=clips
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output='/shared/my runs/clips/submitit/%A_%a_0_log.out'
#SBATCH --requeue
#SBATCH --signal=B:USR2@300
#SBATCH --time=1-00:00:00

# setup
code=(
  '/shared/my runs/clips/seed_0/code/submitted'
  '/shared/my runs/clips/seed_1/code/submitted'
  '/shared/my runs/clips/seed_2/code/submitted'
)
export PYTHONPATH=${code[${SLURM_ARRAY_TASK_ID:-0}]} PYTHONSAFEPATH=1
export PYTHON=${PYTHON:-/shared/env/bin/python}
export ON_STOP=exit  # the next link continues

# command
export SUBMITIT_EXECUTOR=slurm
exec /shared/env/bin/python -u -m submitit.core._submit '/shared/my runs/clips/submitit'

#!/bin/bash

# Parameters
#SBATCH --array=0-2%2
#SBATCH --cpus-per-task=2
#SBATCH --dependency=aftercorr:JOB_1
#SBATCH --job-name=clips
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output='/shared/my runs/clips/submitit/%A_%a_0_log.out'
#SBATCH --requeue
#SBATCH --signal=B:USR2@300
#SBATCH --time=1-00:00:00

# setup
code=(
  '/shared/my runs/clips/seed_0/code/submitted'
  '/shared/my runs/clips/seed_1/code/submitted'
  '/shared/my runs/clips/seed_2/code/submitted'
)
export PYTHONPATH=${code[${SLURM_ARRAY_TASK_ID:-0}]} PYTHONSAFEPATH=1
export PYTHON=${PYTHON:-/shared/env/bin/python}
export ON_STOP=exit  # the next link continues

# command
export SUBMITIT_EXECUTOR=slurm
exec /shared/env/bin/python -u -m submitit.core._submit '/shared/my runs/clips/submitit'
