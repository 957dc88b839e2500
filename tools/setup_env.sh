#!/usr/bin/env bash
# Makes .venv from the locks in requirements/; does nothing when it is already up to date.
#
#   tools/setup_env.sh run     what the demo and training on CPU need   (requirements/cpu.txt)
#   tools/setup_env.sh dev     the same + test tools                    (requirements/dev.txt)
#   tools/setup_env.sh test    the same + a second Megatron-core beside it, in .mcore-alt, and the
#                              programs of Slurm, bubblewrap and a browser, where apt-get may be used
#
# PYTHON names the interpreter (default python3.11). Nothing else outside this folder is touched.
set -euo pipefail
cd "$(dirname "$0")/.."

what=${1:-run}
python=${PYTHON:-python3.11}
alt_version=0.19.2 # GPU images have it; on CPython 3.11 pip would pick 0.16.1 (see docs/debugging.md)
venv_python=.venv/bin/python

say() { printf '\033[1m[setup]\033[0m %s\n' "$*"; }
fail() {
  printf '[setup] error: %s\n' "$*" >&2
  exit 1
}

# The stamp holds what the environment was made from; any change of a lock, of this script or of the
# folder (a moved .venv is broken) makes it stale.
fingerprint() { { cat tools/setup_env.sh "$@" && pwd; } | sha256sum | cut -c1-64; }
is_fresh() { [ -e "$1" ] && [ "$(cat "$1")" = "$2" ]; }

install() { # pip, one line per package instead of four; `compile_all` compiles on every core
  "$venv_python" -m pip install --disable-pip-version-check --no-deps --no-compile --progress-bar off "$@" |
    sed -u -n -e 's/^Collecting \([^ ]*\).*/  \1/p'
}

# Once, here: where PYTHONDONTWRITEBYTECODE is set, as images like to, or .venv cannot be written to later,
# every process would compile all that it imports: 40 s of CPU instead of 15.
compile_all() { # some packages carry templates that are no Python
  say "compiling what is in $1"
  "$venv_python" -m compileall -qq -j 0 -x '/tests?/' "$1" > /dev/null || true
}

is_311() { "$1" -c 'import sys; raise SystemExit(sys.version_info[:2] != (3, 11))'; }

make_venv() {
  [ -x "$venv_python" ] && is_311 "$venv_python" && return
  command -v "$python" > /dev/null || fail "$python not found. Install CPython 3.11, or name it:" \
    "make PYTHON=/path/to/python3.11"
  is_311 "$python" ||
    fail "$python is not CPython 3.11, which the locks in requirements/ are for." \
      "Name one: make PYTHON=/path/to/python3.11"
  say "making .venv with $("$python" --version)"
  rm -rf .venv
  "$python" -m venv .venv || fail "cannot make .venv (on Debian and Ubuntu: apt install python3.11-venv)"
}

install_torch() {
  local pin
  pin=$(grep '^torch==' requirements/cpu.txt)
  say "installing $pin (the CPU build)"
  # An index that lacks the +cpu build answers at once, without downloading the CUDA one.
  install "$pin" 2> .venv/torch.log ||
    install "$pin" --index-url https://download.pytorch.org/whl/cpu ||
    { cat .venv/torch.log >&2 && fail "no CPU build of torch ($pin) could be installed"; }
}

install_run() {
  local stamp=.venv/.stamp-run key
  key=$(fingerprint requirements/cpu.txt)
  is_fresh "$stamp" "$key" && return
  make_venv
  install_torch
  say "installing $(grep -c '==' requirements/cpu.txt) packages of requirements/cpu.txt"
  install -r requirements/cpu.txt
  install --no-build-isolation --editable .
  "$venv_python" -c 'import torch; raise SystemExit(torch.version.cuda is not None)' ||
    fail "the installed torch is a CUDA build; the CPU emulation of Megatron-core refuses to run on it"
  compile_all .venv/lib
  echo "$key" > "$stamp"
  say "ready in $SECONDS s"
}

install_dev() {
  local stamp=.venv/.stamp-dev key
  key=$(fingerprint requirements/cpu.txt requirements/dev.txt)
  is_fresh "$stamp" "$key" && return
  say "installing $(grep -c '==' requirements/dev.txt) packages of requirements/dev.txt"
  install -r requirements/dev.txt
  compile_all .venv/lib
  echo "$key" > "$stamp"
}

install_alt() { # its absence costs a few skipped tests, which say so
  local stamp=.mcore-alt/.stamp
  is_fresh "$stamp" "$alt_version" && return
  say "installing megatron-core $alt_version beside it, in .mcore-alt"
  rm -rf .mcore-alt
  if install --ignore-requires-python --target .mcore-alt "megatron-core==$alt_version"; then
    compile_all .mcore-alt
    echo "$alt_version" > "$stamp"
  else
    rm -rf .mcore-alt
    say "megatron-core $alt_version could not be had: the tests that need it will be skipped"
  fi
}

has() { PATH=$PATH:/usr/sbin:/sbin command -v "$1" > /dev/null; }

install_programs() { # their absence costs the tests that need them, which say so
  local packages=()
  { has slurmctld && has slurmd && has sbatch && has munged; } || packages+=(slurm-wlm munge)
  has bwrap || packages+=(bubblewrap)
  # Ubuntu's chromium is a snap, which a container cannot run.
  has chromium || ! grep -qx ID=debian /etc/os-release || packages+=(chromium)
  [ ${#packages[@]} -gt 0 ] || return 0
  local as_root=() without="the tests that need it will be skipped"
  [ "$(id -u)" = 0 ] || as_root=(sudo --non-interactive)
  if ! has apt-get || ! "${as_root[@]}" true 2> /dev/null; then
    say "not installed: ${packages[*]}; only root could do it with apt-get: $without"
    return
  fi
  say "installing ${packages[*]} with apt-get; no service is started"
  # The policy is Debian's own way to install a daemon without starting it: the tests start theirs.
  # shellcheck disable=SC2016 # its variables are its own
  "${as_root[@]}" bash -euc '
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
      trap "rm -f $policy" EXIT
      printf "#!/bin/sh\nexit 101\n" > "$policy"
      chmod +x "$policy"
    fi
    apt-get update
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "$@"
    if [ "$1" = slurm-wlm ] && [ -d /run/systemd/system ]; then # nor at the next boot
      systemctl disable --quiet munge slurmctld slurmd
    fi
  ' setup "${packages[@]}" > .venv/apt.log 2>&1 || say "that failed, see .venv/apt.log: $without"
}

case $what in
  run) install_run ;;
  dev) install_run; install_dev ;;
  test) install_run; install_dev; install_alt; install_programs ;;
  *) fail "unknown environment '$what': run, dev or test" ;;
esac
