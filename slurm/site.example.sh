# Settings of your site. Copy this file to slurm/site.sh, which git ignores, and edit the copy; the scripts need
# no change. It is read twice: by you, because SBATCH_* override the #SBATCH lines of the scripts,
#
#   source slurm/site.sh && sbatch slurm/gapo_ds_r1.sbatch
#
# and by slurm/launch.sh on the first node of the job (a restart reads the copy in the job's frozen code).
#
# shellcheck shell=bash disable=SC2034

# --- options of sbatch -------------------------------------------------------------------------------------
# export SBATCH_ACCOUNT=my_account
# export SBATCH_PARTITION=gpu
# export SBATCH_QOS=normal
# export SBATCH_TIMELIMIT=04:00:00           # of one job; the run resumes in the next
# export SBATCH_CONSTRAINT=h200
# export SBATCH_RESERVATION=my_reservation
# export SBATCH_EXPORT=ALL                   # if your site's default is NONE: `NUM_NODES=4 sbatch ...` then arrives

# --- the shape of a node -----------------------------------------------------------------------------------
# The batch files ask for nodes of 8 GPUs and 96 cores. For 4 GPUs and 64 cores (options that you give override these;
# tools/submit.py does not see it, and needs --tasks-per-node=4 --cpus-per-task=16):
# sbatch() { command sbatch --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=16 "$@"; }

# --- modules that the interpreter needs --------------------------------------------------------------------
# module purge
# module load cuda/13.0 cudnn/9

# --- the interpreter ---------------------------------------------------------------------------------------
# PYTHON=/shared/envs/gapo/bin/python        # default: .venv/bin/python

# In a container (slurm/container.def) it is /opt/gapo/bin/python. Mount the folders of the repository, the runs,
# the models and the data under the same paths.
#
# Apptainer: a command before the interpreter.
# PYTHON=/opt/gapo/bin/python
# CONTAINER="apptainer exec --nv --bind /scratch $PWD/gapo.sif"
#
# Pyxis: options of srun (no spaces within one).
# PYTHON=/opt/gapo/bin/python
# SRUN_OPTIONS="--container-image=$PWD/gapo.sqsh --container-workdir=$PWD"
# SRUN_OPTIONS+=" --container-mounts=$PWD:$PWD,/scratch:/scratch,/tmp:/tmp"   # /tmp: see CACHE_DIR

# --- secrets -----------------------------------------------------------------------------------------------
# A file of lines NAME=VALUE (WANDB_API_KEY=...) for the ranks. It must be yours alone (chmod 600); what it holds is
# shown in no log and kept in no run folder, unlike this file, of which every run has a copy.
# SECRETS=$HOME/.gapo_secrets

# --- network -----------------------------------------------------------------------------------------------
# The name by which other nodes reach a node, if it is not Slurm's; %s is Slurm's. Rank 0's is MASTER_ADDR.
# NODE_ADDRESS=%s-ib0
# Network interface of sockets: for the rendezvous, and for NCCL without InfiniBand.
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
# export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7
# export NCCL_DEBUG=WARN                      # INFO prints the topology that NCCL found

# --- CPUs --------------------------------------------------------------------------------------------------
# Set these if your site does not bind each task to its own cores near its GPU; rank 0 warns if so. (Set before sbatch,
# SLURM_CPU_BIND would not hold: a job that is submitted from an interactive step inherits that of the step.)
# export SLURM_CPU_BIND=cores
# export OMP_NUM_THREADS=4                    # default: the task's cores, at most 8; without GPUs 1

# --- launch.sh ---------------------------------------------------------------------------------------------
# export NUM_NODES=4                          # with `sbatch --nodes=5`: one spare node
# export MAX_RESTARTS=50 MAX_FAILURES=3
# export CACHE_DIR=/local/$USER/gapo_cache    # compiled kernels, on a local disk of each node; default: in /tmp
# export TMPDIR=/local/$USER                  # other temporary files; must exist on each node
