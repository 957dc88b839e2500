#!/usr/bin/env bash
# Makes .venv from the locks in requirements/; does nothing when it is already up to date.
#
#   tools/setup_env.sh run      what the demo and training on CPU need   (requirements/cpu.txt)
#   tools/setup_env.sh dev      the same + what `make test` needs        (requirements/dev.txt)
#   tools/setup_env.sh system   the same + a second Megatron-core beside it, in .mcore-alt
#
# PYTHON names the interpreter (default python3.11). Nothing outside this folder is touched but the
# caches of pip and uv. Indexes, folders of wheels, proxy and certificates are those of pip's settings.
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

# What pip is configured with holds for uv, which does not read it: a cluster's mirror is set there.
pip_setting() { # a name like find-links: PIP_FIND_LINKS, or the [install] or [global] section of pip.conf
  local variable=PIP_${1^^}
  variable=${variable//-/_}
  if [ -n "${!variable:-}" ]; then echo "${!variable}" && return; fi
  "$venv_python" -m pip config get "install.$1" 2> /dev/null ||
    "$venv_python" -m pip config get "global.$1" 2> /dev/null || true
}

uv_options=()
prepare_uv() {
  "$venv_python" -m pip install --quiet --disable-pip-version-check "uv==$uv_version"
  local value
  value=$(pip_setting index-url)
  [ -z "$value" ] || uv_options+=(--default-index "$value")
  for value in $(pip_setting extra-index-url); do uv_options+=(--index "$value"); done
  for value in $(pip_setting find-links); do uv_options+=(--find-links "$value"); done
  for value in $(pip_setting trusted-host); do uv_options+=(--allow-insecure-host "$value"); done
  case $(pip_setting no-index) in 1 | [Tt]rue | [Yy]es | on) uv_options+=(--no-index) ;; esac
  value=$(pip_setting cert)
  [ -z "$value" ] || export SSL_CERT_FILE=${SSL_CERT_FILE:-$value}
  value=$(pip_setting proxy)
  [ -z "$value" ] || export HTTPS_PROXY=${HTTPS_PROXY:-$value} HTTP_PROXY=${HTTP_PROXY:-$value}
}

# Bytecode is compiled here, on every core: where PYTHONDONTWRITEBYTECODE is set, as images like to,
# or .venv cannot be written to later, every process would compile all that it imports.
install() {
  local quiet=(--quiet)
  [ ! -t 2 ] || quiet=() # gigabytes, with a bar of uv's
  .venv/bin/uv pip install "${quiet[@]}" --python "$venv_python" --no-deps --compile-bytecode \
    --index-strategy unsafe-best-match "${uv_options[@]}" "$@"
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
  prepare_uv
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
  [ ${#uv_options[@]} -gt 0 ] || prepare_uv
  say "installing $(grep -c '==' requirements/dev.txt) packages of requirements/dev.txt"
  install -r requirements/dev.txt
  echo "$key" > "$stamp"
}

install_alt() { # its absence costs a few skipped tests, which say so
  local stamp=.mcore-alt/.stamp
  is_fresh "$stamp" "$alt_version" && return
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
