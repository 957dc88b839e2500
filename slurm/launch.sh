#!/usr/bin/env bash
# Trains on the tasks of a Slurm job, or on local ranks without Slurm, and restarts after a time limit, a preemption,
# or the failure of a rank or a node. docs/slurm.md describes the files it writes.
#
#   slurm/launch.sh CONFIG.toml [section.key=value ...]
#
# DRY_RUN=1         print the resolved config and what follows from it, start nothing
# WORLD_SIZE        without Slurm: ranks on this machine (default 1; in a dry run: what BATCH_FILE asks for)
# PREPARE           python script with arguments to run once, before anything else
# NUM_NODES         nodes to run on (default: all of the job); the others are spare
# GENERATION_NODES  how many of these nodes only generate, the last ones: rollout.generation_nodes
# CHECK_NODES=0     skip the node check
# MIN_FREE_GIB      free disk space that the node check requires (default 10)
# ON_STOP           after a stop under Slurm: requeue (default) or exit
# MAX_RESTARTS      restarts of one job (default 50)
# MAX_FAILURES      failed attempts in a row without a new checkpoint, before giving up (default 3)
# CACHE_DIR         folder for compiled kernels, on a local disk of each node (default /tmp/gapo_cache_UID)
# SITE_FILE         settings of your site (default slurm/site.sh)
# PYTHON, CONTAINER, SRUN_OPTIONS, NODE_ADDRESS, SECRETS     see slurm/site.example.sh
#
# Exit codes: 0 finished, or stopped on request; 2 wrong config, data or usage; 75 stopped, start it again; 90 too few
# healthy nodes; 143 cancelled; else the exit code of the rank that failed first (1 if it has none).

# shellcheck source=/dev/null
main() {
  [ $# -ge 1 ] || die 2 "usage: ${BATCH_FILE:-slurm/launch.sh} CONFIG.toml [section.key=value ...]"
  [ -z "${GENERATION_NODES:-}" ] || set -- "$@" "rollout.generation_nodes=$GENERATION_NODES"
  [ "${DRY_RUN:-0}" != 1 ] || dry_run "$@"
  trap on_stop USR1 USR2
  trap on_interrupt INT
  trap on_term TERM HUP QUIT
  describe_job
  prepare "$@"
  while :; do
    begin_attempt
    check_nodes
    run_ranks
    conclude # ends this script, except to restart without Slurm
    restart=$((restart + 1))
  done
}

say() { echo "[launch $(date +%FT%T)${attempt:+ $attempt}] $*"; }

die() { echo "[launch] $2" >&2; exit "$1"; } # CODE MESSAGE

moment() { date -u "+%Y%m%dT%H%M%S-$$"; } # of this process, for names

# --- before the ranks --------------------------------------------------------------------------------------

dry_run() {
  # Set what a launcher would set, so that the dry run is of the whole job.
  local world tasks asked="/^#SBATCH --nodes/ { n = \$2 } /^#SBATCH --ntasks-p/ { t = \$2 } END { print n * t, t }"
  read -r world tasks < <(awk -F= "$asked" "${BATCH_FILE:-/dev/null}")
  # WORLD_SIZE asks for another job than the allocation that this may be typed in.
  [ "${WORLD_SIZE:-}" ] || { WORLD_SIZE=${SLURM_NTASKS:-$world} && tasks=${SLURM_NTASKS_PER_NODE:-$tasks}; }
  [ "$WORLD_SIZE" != 0 ] || die 2 "a dry run needs WORLD_SIZE: the number of ranks"
  [ -z "$tasks" ] || export LOCAL_WORLD_SIZE=$((WORLD_SIZE < tasks ? WORLD_SIZE : tasks)) # ranks per node
  export RANK=0 LOCAL_RANK=0 WORLD_SIZE MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 PYTHONPATH=$tree$python_path
  exec "${python[@]}" -m gapo_megatron.train "$@" --dry-run
}

ask_slurm() { # sets `slurm_job` (for Slurm's commands), `restart`, and `batch` (0: an allocation, as salloc makes)
  # The environment may have the array, or the restarts, of another job, within which this one was submitted.
  local answer shown
  slurm_job=$SLURM_JOB_ID
  for _ in {1..30}; do # wait up to 5 minutes for Slurm's controller
    answer=$(scontrol -o show job "$SLURM_JOB_ID" 2>&1)
    shown=$(grep "^JobId=$SLURM_JOB_ID " <<<"$answer") && break
    [[ ! $answer =~ "Invalid job id"|"command not found" ]] || die 1 "Slurm does not know job $SLURM_JOB_ID: $answer"
    say "Slurm does not answer, waiting: $answer"
    sleep 10
  done
  # What precedes the job's name, and what follows it: a name may be anything.
  [[ ${shown#* UserId=} =~ " Restarts="([0-9]+)" BatchFlag="([0-9]+) ]] || die 75 "Slurm does not answer: $answer"
  restart=${BASH_REMATCH[1]} batch=${BASH_REMATCH[2]}
  # The job id of an array's last task would mean the whole array.
  [[ ! ${shown%% JobName=*} =~ " ArrayJobId="([0-9]+)" ArrayTaskId="([0-9]+) ]] ||
    slurm_job=${BASH_REMATCH[1]}_${BASH_REMATCH[2]}
}

describe_job() {
  restart=0
  if [ "$mode" = slurm ]; then
    ask_slurm
    job=$SLURM_JOB_ID
    # Started by hand in an allocation, which has no restart count: each start is a job of its own.
    ((batch)) || job+=-$(moment)
    tasks_per_node=${SLURM_NTASKS_PER_NODE:-}
    [ "$tasks_per_node" ] || die 2 "the job needs --ntasks-per-node: one task per GPU"
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  else
    job=local-$(moment)
    tasks_per_node=${WORLD_SIZE:-1} nodes=(localhost)
    export LOCAL_WORLD_SIZE=$tasks_per_node && unset WORLD_SIZE # PREPARE would take it for a launcher's
  fi
  num_nodes=${NUM_NODES:-${#nodes[@]}}
  ((0 < num_nodes && num_nodes <= ${#nodes[@]})) ||
    die 2 "NUM_NODES ($num_nodes) must be from 1 to the nodes of the job (${#nodes[@]})"
  [[ ${GENERATION_NODES:-0} =~ ^(0|[1-9][0-9]{0,4})$ && ${GENERATION_NODES:-0} -lt $num_nodes ]] ||
    die 2 "GENERATION_NODES ($GENERATION_NODES) must be below the nodes to run on ($num_nodes); the others train"
  world_size=$((num_nodes * tasks_per_node))
}

prepare() {
  local answer state
  if [ "${PREPARE:-}" ]; then
    # shellcheck disable=SC2086 # words of a command
    PYTHONPATH=$tree$python_path start here $PREPARE
    await || exit
  fi
  answer=$(PYTHONPATH=$tree$python_path here -m gapo_megatron.launch.prepare "$@" \
    --world-size "$world_size" --ranks-per-node "$tasks_per_node" --job "$job" --restarts "$restart") || exit
  {
    read -r run_dir && read -r code && read -r state && read -r num_generation && [[ $run_dir == /* && $code == /* ]]
  } < <(tail -n 4 <<<"$answer") || # a container may greet first
    die 1 "unexpected output of gapo_megatron.launch.prepare: $answer"
  [ "$state" != finished ] || { say "$run_dir has finished already" && exit 0; }
  if [ "$mode" = slurm ] && ! [ "$tree" -ef "$code" ]; then
    mkdir -p "$tree/.jobs"
    ln -sfn "$code" "$tree/.jobs/$job" || say "cannot write $tree/.jobs: a restart will use the checkout as it is then"
  fi
  export PYTHONPATH=$code$python_path
}

here() { # one python process on this node; through srun if only srun enters the container
  local step=()
  [ "$mode" = local ] || [ -z "${SRUN_OPTIONS:-}" ] ||
    step=("${srun[@]}" --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="${nodes[0]}")
  "${step[@]}" "${python[@]}" "$@"
}

begin_attempt() {
  local owner end
  owner=$(cat "$run_dir/OWNER" 2>/dev/null)
  owner=${owner%.*}
  [ "$owner" = "$job" ] || ! is_running "$owner" || die 2 "$run_dir is in use: job $owner is running"
  # A name of its own, also where this job has started before: what that start left must not speak for this one.
  attempt=$job.$restart
  mkdir -p "$run_dir/attempts"
  mkdir "$run_dir/attempts/$attempt" 2>/dev/null || attempt+=-$(moment)
  attempt_dir=$run_dir/attempts/$attempt
  # Only one attempt writes: an older one that is cut off from Slurm finds another name in OWNER and ends.
  mkdir -p "$attempt_dir/check" && ln -sfn "$attempt" "$run_dir/attempts/latest" &&
    echo "$attempt" >"$attempt_dir/OWNER" && mv "$attempt_dir/OWNER" "$run_dir/OWNER" || exit 1
  export GAPO_ATTEMPT=$attempt GAPO_ATTEMPT_DIR=$attempt_dir
  keep_output
  if [ "$mode" = slurm ]; then
    unset GAPO_REQUEUES
    [ "${ON_STOP:-requeue}" != requeue ] || ((!batch || restart >= max_restarts)) ||
      [[ $(scontrol -o show job "$slurm_job" 2>/dev/null) == *" Requeue=0 "* ]] || export GAPO_REQUEUES=1
    end=$(squeue -h -j "$slurm_job" -o %e) # NONE where there is no limit
    ! GAPO_JOB_END=$(date -d "${end:-NONE}" +%s 2>/dev/null) || export GAPO_JOB_END
  fi
  say "$world_size ranks on $num_nodes of the nodes ${nodes[*]}, time limit ${end:-none}; $run_dir, code $code"
}

keep_output() { # moves Slurm's output file from where sbatch was called to the run folder, unless --output was given
  local opened=${SLURM_SUBMIT_DIR:-}/${SLURM_JOB_NAME:-}-${SLURM_JOB_ID:-}.out
  [ "$mode" = slurm ] && [ /proc/self/fd/1 -ef "$opened" ] || return 0
  # By links only, since Slurm still writes to it. (mv would copy it to another file system.)
  { ln "$opened" "$attempt_dir/job.out" && rm "$opened"; } 2>/dev/null || ln -sfn "$opened" "$attempt_dir/job.out"
}

is_running() { # JOB, by its name in OWNER
  case $1 in
    local-* | "${SLURM_JOB_ID:-}"-*) grep -qs launch.sh "/proc/${1##*-}/cmdline" ;; # or by hand in this allocation
    # The job of an array's last task has the number of the array.
    [0-9]*) squeue -h -j "${1%%-*}" -t all -o "%A %T" 2>/dev/null | grep -qxE "${1%%-*} ($alive)" ;;
    *) false ;;
  esac
}

check_nodes() { # sets `used` to the nodes to run on
  local node bad=() count=${#nodes[@]} step=(env SLURMD_NODENAME=localhost)
  used=("${nodes[@]:0:num_nodes}")
  [ "${CHECK_NODES:-1}" != 0 ] || return 0
  [ "$mode" = local ] || step=("${srun[@]}" --overlap --nodes="$count" --ntasks="$count" --ntasks-per-node=1
    --kill-on-bad-exit=0 --wait=0)
  # The check itself ends after 300 s: reading torch from a cold disk is slow.
  start timeout --kill-after=10 330 "${step[@]}" "${python[@]}" -m gapo_megatron.launch.preflight \
    --output "$attempt_dir/check" --run-dir "$run_dir" --num-nodes "$count" \
    --address "$NODE_ADDRESS" ${MIN_FREE_GIB:+--min-free-gib "$MIN_FREE_GIB"}
  await
  used=()
  for node in "${nodes[@]}"; do # a node without a verdict is bad
    if [ -e "$attempt_dir/check/$node.ok" ]; then used+=("$node"); else bad+=("$node"); fi
  done
  local reasons=""
  for node in "${bad[@]}"; do
    reasons+="${reasons:+; }$node: $(cat "$attempt_dir/check/$node.why" 2>/dev/null || echo "no verdict")"
  done
  [ ${#bad[@]} = 0 ] || say "bad nodes: ${bad[*]} ($reasons; see $attempt_dir/check)"
  if ((${#used[@]} < num_nodes)); then
    # If none of several nodes is healthy, the cause is elsewhere, and other nodes would not help.
    [ "$mode" = slurm ] && ((${#used[@]} > 0 || count == 1)) && count_failure && requeue_without "${bad[@]}"
    die 90 "Needed $num_nodes healthy node$( ((num_nodes == 1)) || echo s), found ${#used[@]} ($reasons)"
  fi
  used=("${used[@]:0:num_nodes}")
}

# --- the ranks ---------------------------------------------------------------------------------------------

run_ranks() {
  export MASTER_ADDR=${NODE_ADDRESS//%s/${used[0]}} MASTER_PORT
  if [ "$mode" = slurm ]; then
    # Below the kernel's ephemeral ports; jobs with neighbouring ids may share a node.
    MASTER_PORT=$((20000 + (SLURM_JOB_ID * 50 + restart) % 10000))
  else
    # A free port. If another program takes it before rank 0 does, the next attempt uses another.
    MASTER_PORT=$("${python[@]}" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])') ||
      die 1 "found no free port for MASTER_PORT"
  fi
  touch "$attempt_dir/launch.log" "$attempt_dir/rank_0.log"
  ((!stop_asked)) || { echo stopped >"$attempt_dir/outcome"; return; } # before the ranks started
  start "${mode}_ranks"
  tail -q -n +1 -f -s 0.2 --pid="$child" "$attempt_dir/launch.log" "$attempt_dir/rank_0.log" &
  await
  wait # for the tail
}

# COMMAND: in the background, since bash delays traps while a foreground process runs
start() { "$@" & child=$!; }

await() { # returns the exit code of that process; a trap interrupts `wait`
  local exit_code
  while wait "$child"; exit_code=$?; kill -0 "$child" 2>/dev/null; do :; done
  child=
  ((!cancelled)) || { say cancelled; exit 143; }
  return "$exit_code"
}

slurm_ranks() {
  local options=(--wait=60) side=()
  if ((num_generation)); then # also without the node of one that generates (sbatch --no-kill)
    options=(--wait=0 --no-kill)
    side=(bash -c "$(declare -f rank_of_side ended)"'; rank_of_side "$@"' "$0" "$((world_size - num_generation))")
  fi
  # Every task sees all GPUs of its node (peer-to-peer needs that). srun does not inherit --cpus-per-task.
  # In blocks, so that the last nodes have the last ranks. In a session of its own: Ctrl-C is for this script only.
  exec setsid "${srun[@]}" --nodes="$num_nodes" --nodelist="$(IFS=, && echo "${used[*]}")" --ntasks="$world_size" \
    --ntasks-per-node="$tasks_per_node" --distribution=block --kill-on-bad-exit=1 "${options[@]}" \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} --output="$attempt_dir/rank_%t.log" \
    "${side[@]}" "${python[@]}" -m gapo_megatron.train "$code/config.toml" 2>"$attempt_dir/launch.log"
}

rank_of_side() { # FIRST COMMAND ...; a failure of rank FIRST or a later one, which generate, does not end the others
  trap : TERM USR1 USR2 # for the rank, which gets them too
  local exit_code rank=${RANK:-$SLURM_PROCID} first=$1
  "${@:2}"
  exit_code=$?
  ((exit_code && rank >= first)) || return "$exit_code"
  ((exit_code == 143)) || ended "$rank" "$exit_code" >>"$GAPO_ATTEMPT_DIR/lost.log"
}

ended() { # RANK EXIT_CODE; how a rank failed, in srun's words
  case $2 in
    0) ;;
    137) echo "task $1: Killed" ;;
    143) echo "task $1: Terminated" ;;
    *) echo "task $1: Exited with exit code $2" ;;
  esac
}

local_ranks() { # what srun does: the first rank that fails ends the others
  local left ended=0 ranks=()
  # Ctrl-C and a hangup of the terminal are for this script, which then asks the ranks to stop.
  trap '' INT QUIT HUP
  trap 'ended=1; signal_ranks TERM' TERM
  for ((left = 0; left < world_size && !ended; left++)); do
    # Each rank leads a session, so that its children end with it. (Job control would take Ctrl-C from this script.)
    RANK=$left LOCAL_RANK=$left WORLD_SIZE=$world_size setsid bash -c \
      "$(declare -f local_rank rank_of_side ended)"'; local_rank "$@"' \
      "$0" "$((world_size - num_generation))" "${python[@]}" -m gapo_megatron.train "$code/config.toml" </dev/null &
    ranks+=("$!")
  done
  while ((left-- > 0 && !ended)); do wait -n || break; done
  signal_ranks TERM
  for _ in {1..100}; do signal_ranks 0 || return; sleep 0.1; done
  signal_ranks KILL
} 2>/dev/null

signal_ranks() { # SIGNAL: to the ranks and their process groups; fails if none is left
  kill "-$1" -- "${ranks[@]/#/-}" "${ranks[@]}"
}

local_rank() { # FIRST COMMAND ...; as rank_of_side, and writes to launch.log how it failed
  rank_of_side "$@" >"$GAPO_ATTEMPT_DIR/rank_$RANK.log" 2>&1
  local exit_code=$?
  ended "$RANK" "$exit_code" >>"$GAPO_ATTEMPT_DIR/launch.log"
  return "$exit_code"
}

# --- after the ranks ---------------------------------------------------------------------------------------

conclude() {
  local exit_code
  require_ownership
  case $(cat "$attempt_dir/outcome" 2>/dev/null) in
    finished) say finished; exit 0 ;;
    stopped)
      say stopped
      [ "$mode" = slurm ] && [ "${ON_STOP:-requeue}" = requeue ] || exit 0
      exit_code=75
      # Repeated stops without progress: is the time limit shorter than the lead of --signal?
      count_failure 10 || die 75 "giving up after 10 attempts in a row without a new checkpoint"
      ;;
    *)
      local verdict=0
      here -m gapo_megatron.launch.postmortem "$attempt_dir" || verdict=$?
      exit_code=$(grep -xE '[0-9]{1,3}' "$attempt_dir/exit_code" 2>/dev/null || first_exit_code)
      ((verdict != 4)) || exit "$exit_code" # a retry would fail again
      count_failure ||
        die "$exit_code" "giving up after MAX_FAILURES (${MAX_FAILURES:-3}) failures in a row without a new checkpoint"
      ;;
  esac
  ((restart < max_restarts)) || die "$exit_code" "giving up after $restart restarts (MAX_RESTARTS)"
  if [ "$mode" = local ]; then
    ((stop_asked == 0)) || exit "$exit_code"
    return
  fi
  requeue
  die "$exit_code" "Slurm cannot requeue this job: submit it again with the same command, and it resumes"
}

first_exit_code() { # if the postmortem does not know it
  local line
  line=$(grep -m1 -E 'tasks? [0-9,-]+: ' "$attempt_dir/launch.log")
  case $line in
    *"exit code "*) echo "${line##*exit code }" ;;
    *Killed*) echo 137 ;;
    *) echo 1 ;;
  esac
}

require_ownership() { # a launcher that was cut off from Slurm may wake up while the job runs elsewhere
  [ "$(cat "$run_dir/OWNER")" = "$attempt" ] || die 3 "attempt $(cat "$run_dir/OWNER") owns the run now"
}

count_failure() { # [LIMIT]; fails after LIMIT attempts of this job in a row without a new checkpoint
  local count=0 seen='' now checkpoints=("$run_dir"/checkpoints/step_*)
  now=$job:${checkpoints[-1]##*/}
  read -r count seen 2>/dev/null <"$run_dir/failures"
  [ "$seen" = "$now" ] && [[ $count =~ ^[1-9][0-9]{0,3}$ ]] || count=0
  echo "$((count + 1)) $now" >"$run_dir/failures"
  ((count + 1 < ${1:-${MAX_FAILURES:-3}}))
}

requeue() { # ends this script if Slurm agrees
  require_not_cancelled
  require_ownership
  scontrol requeue "$slurm_job" || return
  say requeued
  exit 0
}

requeue_without() { # NODE ...: requeues onto other nodes
  local excluded
  ((restart < max_restarts)) || return
  excluded=$(scontrol -o show job "$slurm_job" | sed -n 's/.* ExcNodeList=\([^ (]*\).*/\1/p')
  require_not_cancelled
  require_ownership
  scontrol requeuehold "$slurm_job" || return
  excluded=$(IFS=, && echo "$*")${excluded:+,$excluded}
  # The job can be changed only when Slurm has taken it off its nodes, and then this script has little time left.
  local end=$((SECONDS + 10)) is_excluded=no
  while [ "$is_excluded" = no ] && ((SECONDS < end)); do
    if scontrol update JobId="$slurm_job" ExcNodeList="$excluded" 2>/dev/null; then is_excluded=yes; else sleep 0.2; fi
  done
  scontrol release "$slurm_job"
  if [ "$is_excluded" = yes ]; then say "requeued without $excluded"; else say "requeued, maybe onto $excluded"; fi
  exit 0
}

require_not_cancelled() { # Slurm would requeue a cancelled job too
  local state
  # Wait up to 5 minutes for Slurm's controller.
  for _ in {1..30}; do state=$(squeue -h -j "$slurm_job" -o "%T %r") && break; sleep 10; done
  [[ $state =~ ^($alive)\  || $state == *TimeLimit ]] ||
    { say "cancelled: Slurm reports job $job as ${state:-unknown}"; exit 143; }
  trap '' TERM # comes with the requeue
}

# --- signals -----------------------------------------------------------------------------------------------

on_stop() {
  stop_asked=1
  say "asked to save and stop"
  [ -z "$attempt_dir" ] || touch "$attempt_dir/stop"
}

on_interrupt() { if ((stop_asked)); then on_term; else on_stop; fi; }

on_term() {
  cancelled=1
  # Too late to save; but with regular checkpoints the run still progresses in each job.
  if [ "$mode" = slurm ] && [ "$(squeue -h -j "$slurm_job" -o %r)" = TimeLimit ]; then
    say "time limit"
    [ "$attempt_dir" ] && require_ownership && count_failure && ((restart < max_restarts)) && requeue
  fi
  [ "$child" ] || exit 143
  kill -TERM "$child" 2>/dev/null
}

stop_asked=0 && trap 'stop_asked=1' USR1 USR2 # until main sets its traps
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -e "$tree/slurm/launch.sh" ] || die 2 "$0 is outside its checkout: submit slurm/gapo.sbatch, which finds it"
# A restart uses the code that the job froze at its first start, whatever has changed in the checkout.
if [ "${SLURM_RESTART_COUNT:-0}" != 0 ] && [ -e "$tree/.jobs/$SLURM_JOB_ID/config.toml" ]; then
  GAPO_CODE=$(cd -P "$tree/.jobs/$SLURM_JOB_ID" && pwd)
  export GAPO_CODE
  exec "$GAPO_CODE/slurm/launch.sh" "$GAPO_CODE/config.toml"
fi
# A job that was submitted within a step (an interactive shell) inherits its number and the cores it is bound to.
unset "${!SLURM_STEP_@}" "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}"
[ -z "${SITE_FILE:-}" ] || [ -e "$SITE_FILE" ] || die 2 "SITE_FILE ($SITE_FILE) does not exist"
[ ! -e "${SITE_FILE:=$tree/slurm/site.sh}" ] || . "$SITE_FILE"
if [ "${SECRETS:-}" ]; then # nothing of it is shown, not even what bash says of a wrong line
  { [[ $(stat -Lc %a -- "$SECRETS" 2>/dev/null) == ?00 ]] && bash -e -- "$SECRETS" &>/dev/null; } ||
    die 2 "SECRETS ($SECRETS) must be a file of lines NAME=VALUE that only you can read (chmod 600)"
  set -a && . "$SECRETS" &>/dev/null && set +a
fi
set -uo pipefail
# Slurm's commands answer as this script reads them, whatever a user has set, and of this job's own cluster.
unset "${!SQUEUE_@}" SLURM_CLUSTERS
export SLURM_TIME_FORMAT=standard
alive="RUNNING|SUSPENDED|STOPPED|SIGNALING|RESIZING" # states of a job whose processes go on, or will
if [ "${SLURM_JOB_ID:-}" ]; then mode=slurm; else mode=local NODE_ADDRESS=; fi
read -ra python <<<"${CONTAINER:-}"
python+=("${PYTHON:-.venv/bin/python}")
# Ranks get this environment and the job's memory, whatever sbatch was told (--export=NONE) or has inherited.
read -ra srun <<<"srun --export=ALL --mem=0 ${SRUN_OPTIONS:-}"
NODE_ADDRESS=${NODE_ADDRESS:-%s}
# With SRUN_OPTIONS the interpreter is inside a container that only srun enters.
[ "${SRUN_OPTIONS:-}" ] || command -v "${python[0]}" >/dev/null || die 2 "no ${python[0]}: set PYTHON or CONTAINER"
# Import the package from PYTHONPATH, not from the working directory.
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
# On CPUs the number of threads changes results bit by bit: use one. With GPUs, threads shard weights and checkpoints.
threads=1
[ "${SLURM_GPUS_ON_NODE:-0}" = 0 ] || threads=$((${SLURM_CPUS_PER_TASK:-1} < 8 ? ${SLURM_CPUS_PER_TASK:-1} : 8))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
# Thousands of small locked files: in the home folder all ranks would wait for one file server.
export CACHE_DIR=${CACHE_DIR:-/tmp/gapo_cache_$UID}
export VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-$CACHE_DIR/vllm} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$CACHE_DIR/triton}
export FLASHINFER_WORKSPACE_BASE=${FLASHINFER_WORKSPACE_BASE:-$CACHE_DIR}
ulimit -n "$(ulimit -Hn)"
python_path=${PYTHONPATH:+:$PYTHONPATH}
attempt='' attempt_dir='' child='' cancelled=0 max_restarts=${MAX_RESTARTS:-50}
main "$@"
