#!/usr/bin/env bash
# Makes .venv from the locks in requirements/; does nothing when it is already up to date.
#
#   tools/setup_env.sh run      what the demo and training on CPU need   (requirements/cpu.txt)
#   tools/setup_env.sh dev      the same + what `make test` needs        (requirements/dev.txt)
#   tools/setup_env.sh system   the same + a second Megatron-core beside it, in .mcore-alt
#
# PYTHON names the interpreter (default python3.11). Nothing outside this folder is touched. Indexes,
# folders of wheels and certificates are those that pip is configured with (or uv, by UV_*).
set -euo pipefail
cd "$(dirname "$0")/.."

what=${1:-run}
python=${PYTHON:-python3.11}
uv_version=0.13.9
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

pip_setting() { "$venv_python" -m pip config get "$1" 2> /dev/null || true; }

use_pips_settings() { # uv does not read them, and a cluster's mirror is set there
  "$venv_python" -m pip install --quiet --disable-pip-version-check "uv==$uv_version"
  export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-$(pip_setting global.index-url)}}
  export UV_INDEX=${UV_INDEX:-${PIP_EXTRA_INDEX_URL:-$(pip_setting global.extra-index-url)}}
  export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-$(pip_setting global.find-links)}}
  export SSL_CERT_FILE=${SSL_CERT_FILE:-${PIP_CERT:-$(pip_setting global.cert)}}
  local name
  for name in UV_DEFAULT_INDEX UV_INDEX UV_FIND_LINKS SSL_CERT_FILE; do
    [ -n "${!name}" ] || unset "$name"
  done
}

# Bytecode is compiled here, on every core: where PYTHONDONTWRITEBYTECODE is set, as images like to,
# or .venv cannot be written to later, every process would compile all that it imports.
install() {
  .venv/bin/uv pip install --quiet --python "$venv_python" --no-deps --compile-bytecode \
    --index-strategy unsafe-best-match "$@"
}

install_torch() {
  local pin
  pin=$(grep '^torch==' requirements/cpu.txt)
  say "installing $pin (the CPU build)"
  # An index that lacks the +cpu build answers at once, without downloading the CUDA one.
  install "$pin" 2> .venv/torch.log ||
    install "$pin" --default-index https://download.pytorch.org/whl/cpu ||
    { cat .venv/torch.log >&2 && fail "no CPU build of torch ($pin) could be installed"; }
}

install_run() {
  local stamp=.venv/.stamp-run key
  key=$(fingerprint requirements/cpu.txt)
  is_fresh "$stamp" "$key" && return
  make_venv
  use_pips_settings
  install_torch
  say "installing $(grep -c '==' requirements/cpu.txt) packages of requirements/cpu.txt"
  install -r requirements/cpu.txt
  install --no-build-isolation --editable .
  "$venv_python" -c 'import torch; raise SystemExit(torch.version.cuda is not None)' ||
    fail "the installed torch is a CUDA build; the CPU emulation of Megatron-core refuses to run on it"
  echo "$key" > "$stamp"
  say "ready in $SECONDS s"
}

install_dev() {
  local stamp=.venv/.stamp-dev key
  key=$(fingerprint requirements/cpu.txt requirements/dev.txt)
  is_fresh "$stamp" "$key" && return
  use_pips_settings
  say "installing $(grep -c '==' requirements/dev.txt) packages of requirements/dev.txt"
  install -r requirements/dev.txt
  echo "$key" > "$stamp"
}

install_alt() { # its absence costs a few skipped tests, which say so
  local stamp=.mcore-alt/.stamp
  is_fresh "$stamp" "$alt_version" && return
  use_pips_settings
  say "installing megatron-core $alt_version beside it, in .mcore-alt"
  rm -rf .mcore-alt
  # It declares CPython 3.12 and has a build for 3.11.
  if "$venv_python" -m pip install --quiet --disable-pip-version-check --no-deps \
    --ignore-requires-python --target .mcore-alt "megatron-core==$alt_version"; then
    echo "$alt_version" > "$stamp"
  else
    rm -rf .mcore-alt
    say "megatron-core $alt_version could not be had: the tests that need it will be skipped"
  fi
}

case $what in
  run) install_run ;;
  dev) install_run; install_dev ;;
  system) install_run; install_dev; install_alt ;;
  *) fail "unknown environment '$what': run, dev or system" ;;
esac
