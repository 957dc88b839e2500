# Settings of a site. Copy this file to slurm/site.sh, which git ignores, and edit the copy; the scripts stay
# as they are. It is read twice: by you, since sbatch obeys SBATCH_* over the lines of the script,
#
#   source slurm/site.sh && sbatch slurm/gapo_ds_r1.sbatch
#
# and by slurm/launch.sh on the job's first node, from the job's frozen code once that is there.
#
# shellcheck shell=bash disable=SC2034

# --- what sbatch asks for ----------------------------------------------------------------------------------
# export SBATCH_ACCOUNT=my_account
# export SBATCH_PARTITION=gpu
# export SBATCH_QOS=normal
# export SBATCH_TIMELIMIT=04:00:00           # of one job; the run goes on in the next
# export SBATCH_CONSTRAINT=h200
# export SBATCH_RESERVATION=my_reservation

# --- modules, before the interpreter that may need them ----------------------------------------------------
# module purge
# module load cuda/13.0 cudnn/9

# --- the interpreter ---------------------------------------------------------------------------------------
# PYTHON=/shared/envs/gapo/bin/python        # default: .venv/bin/python

# In a container (slurm/container.def), its own: /opt/gapo/bin/python. The folders of the repository, the runs,
# the models and the data must be visible in it, under the same names.
#
# Apptainer: a command in front of the interpreter.
# PYTHON=/opt/gapo/bin/python
# CONTAINER="apptainer exec --nv --bind /scratch $PWD/gapo.sif"
#
# Pyxis: options of srun (no spaces within one).
# PYTHON=/opt/gapo/bin/python
# SRUN_OPTIONS="--container-image=$PWD/gapo.sqsh --container-workdir=$PWD"
# SRUN_OPTIONS+=" --container-mounts=$PWD:$PWD,/scratch:/scratch,/tmp:/tmp"   # /tmp: see CACHE_DIR

# --- network -----------------------------------------------------------------------------------------------
# Which interface sockets use: for the rendezvous, and for NCCL where there is no InfiniBand.
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
# export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7
# export NCCL_DEBUG=WARN                      # INFO shows the topology that NCCL found

# --- CPUs --------------------------------------------------------------------------------------------------
# srun binds each task to the cores it was given; sites that bind otherwise:
# export SLURM_CPU_BIND=cores
# export OMP_NUM_THREADS=4                    # default: the task's cores, at most 8; without GPUs 1

# --- launch.sh ---------------------------------------------------------------------------------------------
# export NUM_NODES=4                          # with `sbatch --nodes=5`: one spare node
# export MAX_RESTARTS=50 MAX_FAILURES=3
# export CACHE_DIR=/local/$USER/gapo_cache    # compiled kernels, on a disk of each node's own; default: in /tmp
