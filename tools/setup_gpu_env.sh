#!/usr/bin/env bash
# Makes the environment of a GPU site from requirements/gpu.txt: CUDA 13, CPython 3.12, Linux x86-64, glibc 2.31+.
# Needs g++ and 13 GB; neither a GPU nor a CUDA toolkit, for the lock has the toolkit's wheels.
#
#   tools/setup_gpu_env.sh [--apex] .venv
#
# PYTHON names the interpreter (default python3.12), MAX_JOBS how many files are compiled at a time (default 4,
# 1.5 GB each). Indexes, folders of wheels, proxy and certificates are those of pip's settings. Whatever
# they serve, a file is installed only if its hash is in the lock.
#
# Transformer Engine's PyTorch side comes as source. It is compiled against the torch, and the headers of CUDA,
# cuDNN and NCCL, that the lock has just installed: with a toolkit, be it that of the wheels, it would look in the
# toolkit alone, which has neither nccl.h nor cudnn.h. A build that somebody else made is not looked for.
#
# --apex also builds NVIDIA's apex with its CUDA extensions, which optimizer.implementation = "apex" needs: it has no
# release, so one commit of its repository, compiled by the nvcc of the lock's wheels. Needs git and that repository;
# git's own settings name a mirror (url.MIRROR.insteadOf). TORCH_CUDA_ARCH_LIST says for which GPUs (default: A100,
# H100, B200). NOT YET RUN to its end: amp_C was built for sm_90 this way, and loads.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
  printf '[setup] error: %s\n' "$*" >&2
  exit 1
}

with_apex=
if [ "${1:-}" = --apex ]; then
  with_apex=1
  shift
fi
if [ $# != 1 ] || [ "${1#-}" != "$1" ]; then fail "usage: tools/setup_gpu_env.sh [--apex] FOLDER"; fi
folder=$(realpath --canonicalize-missing "$1")
lock=requirements/gpu.txt
apex_commit=6424da3b4faa6c8f062da4a48c424fff3f02d42d # 8 July 2026
python=${PYTHON:-python3.12}
command -v "$python" > /dev/null || fail "$python not found. Install CPython 3.12, or name it: PYTHON=/path/to/python3.12"
"$python" -c '' || fail "$python does not run (its own words are above; a shim of pyenv is found on PATH" \
  "even where its version is not active). Name an interpreter: PYTHON=/path/to/python3.12"
"$python" - << 'EOF' || fail "$lock does not serve this machine"
import platform, sys
have = sys.version_info[:2], platform.machine(), platform.libc_ver()
libc = tuple(map(int, have[2][1].split("."))) if have[2][0] == "glibc" else (0,)
if have[:2] != ((3, 12), "x86_64") or libc < (2, 31):
    sys.exit(f"CPython {have[0]}, {have[1]}, {have[2]}: must be (3, 12), x86_64, glibc 2.31 or newer")
EOF
command -v g++ > /dev/null || fail "g++ not found: Transformer Engine's PyTorch side is compiled"
[ -z "$with_apex" ] || command -v git > /dev/null || fail "git not found: apex comes from its repository"

"$python" -m venv "$folder"
python=$folder/bin/python
# The entries of the lock, with their hashes, of the packages NAME|NAME: with 1 they alone, with 0 all others.
entries() { awk -v names="^($1)==" -v wanted="$2" '/^[^ ]/ {taken = ($0 ~ names) == wanted} taken' "$lock"; }
# The lock is complete: nothing is resolved, and what comes as source is built by what the lock has.
install() {
  "$python" -m pip install --disable-pip-version-check --no-deps --no-build-isolation --require-hashes \
    --requirement /dev/stdin
}
entries 'pip|setuptools|wheel' 1 | install
entries transformer-engine-torch 0 | install
"$python" -c 'import torch; raise SystemExit(not (torch.version.cuda or "").startswith("13."))' ||
  fail "the installed torch is no build for CUDA 13"
PATH=$folder/bin:$PATH NVTE_FRAMEWORK=pytorch NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE \
  MAX_JOBS=${MAX_JOBS:-4} install < <(entries transformer-engine-torch 1)
if [ -n "$with_apex" ]; then
  sources=$(mktemp -d)
  trap 'rm -rf "$sources"' EXIT
  git -C "$sources" init --quiet apex
  git -C "$sources/apex" fetch --quiet --depth 1 https://github.com/NVIDIA/apex "$apex_commit"
  git -C "$sources/apex" checkout --quiet "$apex_commit"
  cuda=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib") + "/nvidia/cu13")')
  ln -s "$cuda/lib/libcudart.so.13" "$sources/libcudart.so" # the name that is linked; the wheel has only the other
  PATH=$folder/bin:$PATH CUDA_HOME=$cuda LIBRARY_PATH=$sources MAX_JOBS=${MAX_JOBS:-4} \
    TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-8.0;9.0;10.0} APEX_CPP_EXT=1 APEX_CUDA_EXT=1 \
    "$python" -m pip install --disable-pip-version-check --no-deps --no-build-isolation "$sources/apex"
  "$python" -c 'import torch, apex.optimizers, apex.multi_tensor_apply, amp_C, fused_weight_gradient_mlp_cuda'
fi
"$python" -m pip check
"$python" -c 'import torch, transformer_engine.pytorch' # in this order: NCCL is found because torch has loaded it
echo "[setup] ready in $SECONDS s: $folder"
