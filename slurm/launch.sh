#!/usr/bin/env bash
# Trains on the tasks of a Slurm job, or on local ranks where there is no Slurm, and goes on after what can be
# survived: a time limit, preemption, a rank or a node that dies. docs/slurm.md describes the files it writes.
#
#   slurm/launch.sh CONFIG.toml [section.key=value ...]
#
# DRY_RUN=1         print the resolved config and its arithmetic, start nothing
# WORLD_SIZE        without Slurm: ranks on this machine (default 1; of a dry run: what BATCH_FILE asks for)
# PREPARE           python script and arguments to run once, before everything else
# NUM_NODES         nodes to run on (default all); the others of the job are spare
# GENERATION_NODES  of those, how many at the end generate and do not train: rollout.generation_nodes
# CHECK_NODES=0     skip the check of the nodes
# MIN_FREE_GIB      free disk space that the check asks for (default 10)
# ON_STOP           after a stop, under Slurm: requeue (default) or exit
# MAX_RESTARTS      of one job (default 50)
# MAX_FAILURES      failed attempts in a row without a new checkpoint (default 3)
# CACHE_DIR         where kernels are compiled to, on a disk of each node's own (default /tmp/gapo_cache_UID)
# PYTHON, CONTAINER, SRUN_OPTIONS     see slurm/site.example.sh
#
# Exit codes: 0 finished, or stopped as asked; 2 a mistake in config, data or usage; 75 stopped, to be started
# again; 90 too few healthy nodes; 143 cancelled; else that of the rank that failed first (1 if it has none).

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
    conclude # ends this script, unless the next attempt is its own business: without Slurm
    restart=$((restart + 1))
  done
}

say() { echo "[launch $(date +%FT%T)${attempt:+ $attempt}] $*"; }

die() { # CODE MESSAGE
  echo "[launch] $2" >&2
  exit "$1"
}

# --- before the ranks --------------------------------------------------------------------------------------

dry_run() {
  # What a launcher would set, so that the arithmetic is that of the whole job.
  local world tasks asked="/^#SBATCH --nodes/ { n = \$2 } /^#SBATCH --ntasks-p/ { t = \$2 } END { print n * t, t }"
  read -r world tasks < <(awk -F= "$asked" "${BATCH_FILE:-/dev/null}")
  WORLD_SIZE=${SLURM_NTASKS:-${WORLD_SIZE:-$world}} tasks=${SLURM_NTASKS_PER_NODE:-$tasks}
  [ "$WORLD_SIZE" != 0 ] || die 2 "set WORLD_SIZE"
  [ -z "$tasks" ] || export LOCAL_WORLD_SIZE=$((WORLD_SIZE < tasks ? WORLD_SIZE : tasks)) # a node takes so many
  export RANK=0 LOCAL_RANK=0 WORLD_SIZE MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 PYTHONPATH=$tree$python_path
  exec "${python[@]}" -m gapo_megatron.train "$@" --dry-run
}

describe_job() {
  restart=${SLURM_RESTART_COUNT:-0}
  if [ "$mode" = slurm ]; then
    job=$SLURM_JOB_ID
    # By hand in an allocation (salloc), where nothing counts: every start is a job of its own.
    [ "${SLURM_PROCID:-}" ] || job+=-$(date -u +%Y%m%dT%H%M%S)
    # For Slurm's commands: the number of an array's last task stands for all of them.
    slurm_job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    slurm_job=${slurm_job:-$SLURM_JOB_ID}
    tasks_per_node=${SLURM_NTASKS_PER_NODE:-}
    [ "$tasks_per_node" ] || die 2 "ask Slurm for --ntasks-per-node: one task per GPU"
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  else
    job=local-$(date -u +%Y%m%dT%H%M%S)-$$
    tasks_per_node=${WORLD_SIZE:-1} nodes=(localhost)
    export LOCAL_WORLD_SIZE=$tasks_per_node && unset WORLD_SIZE # to PREPARE it would be a launcher's
  fi
  num_nodes=${NUM_NODES:-${#nodes[@]}}
  ((0 < num_nodes && num_nodes <= ${#nodes[@]})) ||
    die 2 "NUM_NODES ($num_nodes) must be at least 1 and at most the job's nodes (${#nodes[@]})"
  [[ ${GENERATION_NODES:-0} =~ ^(0|[1-9][0-9]{0,4})$ && ${GENERATION_NODES:-0} -lt $num_nodes ]] ||
    die 2 "GENERATION_NODES ($GENERATION_NODES) must be below the nodes to run on ($num_nodes): the others train"
  world_size=$((num_nodes * tasks_per_node))
}

prepare() {
  local answer state
  if [ "${PREPARE:-}" ]; then
    # shellcheck disable=SC2086 # words of a command
    PYTHONPATH=$tree$python_path start here $PREPARE
    await || exit
  fi
  answer=$(PYTHONPATH=$tree$python_path here -m gapo_megatron.ops.launch.prepare "$@" \
    --world-size "$world_size" --ranks-per-node "$tasks_per_node" --job "$job") || exit
  { read -r run_dir && read -r code && read -r state; } <<<"$answer" || die 1 "prepare printed: $answer"
  [ "$state" != finished ] || { say "$run_dir is finished" && exit 0; }
  if [ "$mode" = slurm ] && ! [ "$tree" -ef "$code" ]; then
    mkdir -p "$tree/.jobs"
    ln -sfn "$code" "$tree/.jobs/$job" || say "a restart will depend on what this checkout is then"
  fi
  export PYTHONPATH=$code$python_path
}

here() { # one python process on this node: by srun where only srun enters the container
  local step=()
  [ "$mode" = local ] || [ -z "${SRUN_OPTIONS:-}" ] ||
    step=("${srun[@]}" --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="${nodes[0]}")
  "${step[@]}" "${python[@]}" "$@"
}

begin_attempt() {
  local owner end
  attempt=$job.$restart
  attempt_dir=$run_dir/attempts/$attempt
  owner=$(cat "$run_dir/OWNER" 2>/dev/null)
  owner=${owner%.*}
  [ "$owner" = "$job" ] || ! is_running "$owner" || die 2 "$run_dir is in use: job $owner is running"
  # One writer: an older attempt that lives on, cut off from Slurm, finds another name in OWNER and ends.
  mkdir -p "$attempt_dir/check" && ln -sfn "$attempt" "$run_dir/attempts/latest" &&
    echo "$attempt" >"$attempt_dir/OWNER" && mv "$attempt_dir/OWNER" "$run_dir/OWNER" || exit 1
  export GAPO_ATTEMPT=$attempt GAPO_ATTEMPT_DIR=$attempt_dir
  keep_output
  if [ "$mode" = slurm ]; then
    end=$(squeue -h -j "$slurm_job" -o %e) # NONE where there is no limit
    ! GAPO_JOB_END=$(date -d "${end:-NONE}" +%s 2>/dev/null) || export GAPO_JOB_END
  fi
  say "$world_size ranks on $num_nodes of ${nodes[*]}, until ${end:-they are done}; code $code"
}

keep_output() { # moves what Slurm opened where sbatch was called to the run folder; an --output of your own stays
  local opened=${SLURM_SUBMIT_DIR:-}/${SLURM_JOB_NAME:-}-${SLURM_JOB_ID:-}.out
  [ "$mode" = slurm ] && [ /proc/self/fd/1 -ef "$opened" ] || return 0
  # By its names alone: Slurm still writes to it. (Where mv cannot rename, it copies.)
  { ln "$opened" "$attempt_dir/job.out" && rm "$opened"; } 2>/dev/null || ln -sfn "$opened" "$attempt_dir/job.out"
}

is_running() { # JOB, as OWNER names it
  case $1 in
    local-*) grep -qs launch.sh "/proc/${1##*-}/cmdline" ;;
    "${SLURM_JOB_ID:-}"-*) false ;; # an earlier start in this allocation
    [0-9]*) squeue -h -j "${1%%-*}" -t RUNNING,SUSPENDED -o %A 2>/dev/null | grep -qx "${1%%-*}" ;;
    *) false ;;
  esac
}

check_nodes() { # leaves the nodes to train on in `used`
  local node bad=() count=${#nodes[@]} step=(env SLURMD_NODENAME=localhost)
  used=("${nodes[@]:0:num_nodes}")
  [ "${CHECK_NODES:-1}" != 0 ] || return 0
  [ "$mode" = local ] || step=("${srun[@]}" --overlap --nodes="$count" --ntasks="$count" --ntasks-per-node=1
    --kill-on-bad-exit=0 --wait=0)
  # Its own limit is 300 s: a cold disk takes long to read torch.
  start timeout --kill-after=10 330 "${step[@]}" "${python[@]}" -m gapo_megatron.ops.launch.preflight \
    --output "$attempt_dir/check" --run-dir "$run_dir" --num-nodes "$count" \
    ${MIN_FREE_GIB:+--min-free-gib "$MIN_FREE_GIB"}
  await
  used=()
  for node in "${nodes[@]}"; do # one that said nothing is bad
    if [ -e "$attempt_dir/check/$node.ok" ]; then used+=("$node"); else bad+=("$node"); fi
  done
  local reasons=""
  for node in "${bad[@]}"; do # each with what it lacks
    reasons+="${reasons:+; }$node: $(cat "$attempt_dir/check/$node.why" 2>/dev/null || echo "said nothing")"
  done
  [ ${#bad[@]} = 0 ] || say "bad nodes: ${bad[*]} ($reasons; see $attempt_dir/check)"
  if ((${#used[@]} < num_nodes)); then
    # Where no node of several is healthy it is not the nodes: leaving them out would not help.
    [ "$mode" = slurm ] && ((${#used[@]} > 0 || count == 1)) && count_failure && requeue_without "${bad[@]}"
    die 90 "$num_nodes healthy nodes needed, ${#used[@]} found ($reasons)"
  fi
  used=("${used[@]:0:num_nodes}")
}

# --- the ranks ---------------------------------------------------------------------------------------------

run_ranks() {
  export MASTER_ADDR=${used[0]} MASTER_PORT
  if [ "$mode" = slurm ]; then
    # Below those the kernel hands out; jobs with neighbouring numbers may share a node.
    MASTER_PORT=$((20000 + (SLURM_JOB_ID * 50 + restart) % 10000))
  else
    # A free one. Should another program take it before rank 0 does, the next attempt has another.
    MASTER_PORT=$("${python[@]}" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])') ||
      die 1 "no free port"
  fi
  touch "$attempt_dir/launch.log" "$attempt_dir/rank_0.log"
  ((!stop_asked)) || { echo stopped >"$attempt_dir/outcome"; return; } # before anything began
  start "${mode}_ranks"
  tail -q -n +1 -f -s 0.2 --pid="$child" "$attempt_dir/launch.log" "$attempt_dir/rank_0.log" &
  await
  wait # for the tail
}

start() { # COMMAND: in the background, because bash runs no trap while a process is in the foreground
  "$@" &
  child=$!
}

await() { # its exit code; a trap interrupts `wait`
  local exit_code
  while wait "$child"; exit_code=$?; kill -0 "$child" 2>/dev/null; do :; done
  child=
  ((!cancelled)) || { say cancelled; exit 143; }
  return "$exit_code"
}

slurm_ranks() {
  # Every task sees all GPUs of its node (peer-to-peer needs that). srun does not inherit --cpus-per-task.
  # In blocks: the last ranks are on the last nodes. In a session of its own: a terminal's Ctrl-C is for this script.
  exec setsid "${srun[@]}" --nodes="$num_nodes" --nodelist="$(IFS=, && echo "${used[*]}")" --ntasks="$world_size" \
    --ntasks-per-node="$tasks_per_node" --distribution=block --kill-on-bad-exit=1 --wait=60 \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} --output="$attempt_dir/rank_%t.log" \
    "${python[@]}" -m gapo_megatron.train "$code/config.toml" 2>"$attempt_dir/launch.log"
}

local_ranks() { # what srun does: the first rank that fails ends the others
  local left ended=0 ranks=()
  # Of a terminal, Ctrl-C and its end are for this script, which asks the ranks.
  trap '' INT QUIT HUP
  trap 'ended=1; signal_ranks TERM' TERM
  for ((left = 0; left < world_size && !ended; left++)); do
    # Each leads a session, so that its children end with it. Not by job control (set -m), which
    # would take the terminal, and Ctrl-C with it, from this script.
    RANK=$left LOCAL_RANK=$left WORLD_SIZE=$world_size setsid bash -c "$(declare -f local_rank)"'; local_rank "$@"' \
      "$0" "${python[@]}" -m gapo_megatron.train "$code/config.toml" </dev/null &
    ranks+=("$!")
  done
  while ((left-- > 0 && !ended)); do wait -n || break; done
  signal_ranks TERM
  for _ in {1..100}; do
    signal_ranks 0 || return
    sleep 0.1
  done
  signal_ranks KILL
} 2>/dev/null

signal_ranks() { # SIGNAL: to their groups, and to a rank that leads none yet; fails if none of them is there
  kill "-$1" -- "${ranks[@]/#/-}" "${ranks[@]}"
}

local_rank() { # COMMAND ...; says in launch.log how it failed, in srun's words
  trap : TERM
  "$@" >"$GAPO_ATTEMPT_DIR/rank_$RANK.log" 2>&1
  local exit_code=$?
  case $exit_code in
    0) ;;
    137) echo "task $RANK: Killed" ;;
    143) echo "task $RANK: Terminated" ;;
    *) echo "task $RANK: Exited with exit code $exit_code" ;;
  esac >>"$GAPO_ATTEMPT_DIR/launch.log"
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
      # Stopped before anything was done, again and again: a time limit below the lead of --signal?
      count_failure 10 || die 75 "10 attempts in a row without a new checkpoint: giving up"
      ;;
    *)
      local verdict=0
      here -m gapo_megatron.ops.launch.postmortem "$attempt_dir" || verdict=$?
      exit_code=$(grep -xE '[0-9]{1,3}' "$attempt_dir/exit_code" 2>/dev/null || first_exit_code)
      ((verdict != 4)) || exit "$exit_code" # it would fail again
      count_failure || die "$exit_code" "MAX_FAILURES in a row without a new checkpoint: giving up"
      ;;
  esac
  ((restart < max_restarts)) || die "$exit_code" "$restart restarts (MAX_RESTARTS): giving up"
  if [ "$mode" = local ]; then
    ((stop_asked == 0)) || exit "$exit_code"
    return
  fi
  requeue
  die "$exit_code" "Slurm does not start this job again: do it with the same command, to go on"
}

first_exit_code() { # where the postmortem does not know one
  local line
  line=$(grep -m1 -E 'tasks? [0-9,-]+: ' "$attempt_dir/launch.log")
  case $line in
    *"exit code "*) echo "${line##*exit code }" ;;
    *Killed*) echo 137 ;;
    *) echo 1 ;;
  esac
}

require_ownership() { # a launcher cut off from Slurm may wake up when the job runs elsewhere
  [ "$(cat "$run_dir/OWNER")" = "$attempt" ] || die 3 "attempt $(cat "$run_dir/OWNER") owns the run by now"
}

count_failure() { # [LIMIT]; fails when so many attempts of this job in a row made no new checkpoint
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

requeue_without() { # NODE ...: as requeue, on other nodes
  local excluded
  ((restart < max_restarts)) || return
  excluded=$(scontrol -o show job "$slurm_job" | sed -n 's/.* ExcNodeList=\([^ (]*\).*/\1/p')
  require_not_cancelled
  require_ownership
  scontrol requeuehold "$slurm_job" || return
  excluded=$(IFS=, && echo "$*")${excluded:+,$excluded}
  # The job can be changed once Slurm has taken it off its nodes; then this script has little time left.
  local end=$((SECONDS + 10)) is_excluded=no
  while [ "$is_excluded" = no ] && ((SECONDS < end)); do
    if scontrol update JobId="$slurm_job" ExcNodeList="$excluded" 2>/dev/null; then is_excluded=yes; else sleep 0.2; fi
  done
  scontrol release "$slurm_job"
  if [ "$is_excluded" = yes ]; then say "requeued without $excluded"; else say "requeued, perhaps onto $excluded"; fi
  exit 0
}

require_not_cancelled() { # Slurm would requeue a cancelled job too, and so bring it back to life
  local state
  for _ in {1..30}; do # minutes, in which Slurm's controller may come back
    state=$(squeue -h -j "$slurm_job" -o "%T %r") && break
    sleep 10
  done
  case $state in
    RUNNING* | *TimeLimit) trap '' TERM ;; # comes with the requeue
    *) say "cancelled: Slurm says ${state:-nothing} of job $job"; exit 143 ;;
  esac
}

# --- signals -----------------------------------------------------------------------------------------------

on_stop() {
  stop_asked=1
  say "asked to save and end"
  [ -z "$attempt_dir" ] || touch "$attempt_dir/stop"
}

on_interrupt() { if ((stop_asked)); then on_term; else on_stop; fi; }

on_term() {
  cancelled=1
  # Too late to save; but a run that saves on its way gets further each time.
  if [ "$mode" = slurm ] && [ "$(squeue -h -j "$slurm_job" -o %r)" = TimeLimit ]; then
    say "time limit"
    [ "$attempt_dir" ] && require_ownership && count_failure && ((restart < max_restarts)) && requeue
  fi
  [ "$child" ] || exit 143
  kill -TERM "$child" 2>/dev/null
}

stop_asked=0
trap 'stop_asked=1' USR1 USR2 # until main has something to stop
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -e "$tree/slurm/launch.sh" ] || die 2 "$0 is a copy without its checkout: submit slurm/gapo.sbatch, which finds it"
# A restart goes on with what its job froze at its first start, whatever the checkout has become.
if [ "${SLURM_RESTART_COUNT:-0}" != 0 ] && [ -e "$tree/.jobs/$SLURM_JOB_ID/config.toml" ]; then
  GAPO_CODE=$(cd -P "$tree/.jobs/$SLURM_JOB_ID" && pwd)
  export GAPO_CODE
  exec "$GAPO_CODE/slurm/launch.sh" "$GAPO_CODE/config.toml"
fi
# shellcheck source=/dev/null
[ ! -e "$tree/slurm/site.sh" ] || . "$tree/slurm/site.sh"
set -uo pipefail
if [ "${SLURM_JOB_ID:-}" ]; then mode=slurm; else mode=local; fi
read -ra python <<<"${CONTAINER:-}"
python+=("${PYTHON:-.venv/bin/python}")
read -ra srun <<<"srun ${SRUN_OPTIONS:-}"
# With SRUN_OPTIONS the interpreter is in a container that only srun enters.
[ "${SRUN_OPTIONS:-}" ] || command -v "${python[0]}" >/dev/null || die 2 "no ${python[0]}: set PYTHON or CONTAINER (docs/slurm.md)"
# The package is the one of PYTHONPATH, not one of the working directory.
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
# On a CPU threads decide a run's bits: one. Beside a GPU they cut weights and fill checkpoints.
threads=1
[ "${SLURM_GPUS_ON_NODE:-0}" = 0 ] || threads=$((${SLURM_CPUS_PER_TASK:-1} < 8 ? ${SLURM_CPUS_PER_TASK:-1} : 8))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
# Thousands of small files with locks: in the home folder all ranks of all nodes would wait for one file server.
export CACHE_DIR=${CACHE_DIR:-/tmp/gapo_cache_$UID}
export VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-$CACHE_DIR/vllm} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$CACHE_DIR/triton}
export FLASHINFER_WORKSPACE_BASE=${FLASHINFER_WORKSPACE_BASE:-$CACHE_DIR}
ulimit -n "$(ulimit -Hn)"
python_path=${PYTHONPATH:+:$PYTHONPATH}
attempt='' attempt_dir='' child='' cancelled=0 max_restarts=${MAX_RESTARTS:-50}
main "$@"
