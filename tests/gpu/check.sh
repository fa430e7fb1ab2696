#!/bin/sh
# Proves the CRIU+CUDA engine on a machine with an NVIDIA GPU, in under 5 minutes, and prints its figures.
#
# usage: tests/gpu/check.sh [MIB]   (memory on the GPU, 2048 by default)
#
# Needs root, an NVIDIA driver from 570 on, and a checkout that `./run setup` has set up. Elsewhere it says
# what is missing and ends with status 0; status 1 means that the engine failed.
set -eu

cd "$(dirname "$0")/../.."
mib=${1:-2048}

skip() {
    printf 'SKIP: %s\n' "$*"
    exit 0
}

case $mib in
    '' | *[!0-9]*) printf 'usage: %s [MIB]\n' "$0" >&2; exit 2 ;;
esac
[ "$(id -u)" = 0 ] || skip "this needs root"
[ "$(uname -m)" = x86_64 ] || skip "the driver checkpoints on x86-64 only, this is $(uname -m)"
command -v nvidia-smi >/dev/null 2>&1 || skip "there is no nvidia-smi, so no NVIDIA driver"
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || driver=
[ -n "$driver" ] || skip "nvidia-smi finds no GPU"
[ "${driver%%.*}" -ge 570 ] 2>/dev/null || skip "the driver is $driver, checkpoints need 570 or later"
[ -x .venv/bin/python ] || skip "there is no .venv; run ./run setup first"
.venv/bin/python -c 'import cuda.bindings.driver, pynvml, pytest' 2>/dev/null ||
    skip "the Python packages are missing; run .venv/bin/pip install -e '.[dev]'"
prefix=${TORPOR_PREFIX:-$PWD/.toolchain}
for tool in criu runc; do
    PATH="$prefix/bin:$PATH" command -v "$tool" >/dev/null 2>&1 || skip "there is no $tool; run ./run setup first"
done

exec timeout --kill-after=10 300 .venv/bin/python -m tests.gpu.check --mib "$mib"
