#!/usr/bin/env bash
# On the machine with a GPU: bash tests/device/real/run.sh .real/1 [options of check_real_device.py], then .real/2 ..
# Tests CUDA without Paddle, unpacks the pieces, and runs the checks once all pieces are there.
set -euo pipefail
cd "$(dirname "$0")/../../.."
here=tests/device/real pieces=$1 unpacked=${TMPDIR:-/tmp}/paddle_shard-real
shift
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
date +%T
selftest="import ctypes, sys; sys.exit(ctypes.CDLL('.real/built/libstandin.so').standin_selftest())"
python3 -c "$selftest" || { echo "selftest failed: $?. No other check means anything."; exit 2; }
python3 $here/unpack.py "$pieces" "$unpacked/site" "$unpacked/chunks"
date +%T
if [ ! -e "$unpacked/site/paddle" ]; then
  nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader || true
  python3 - <<'PYTHON'
import importlib.metadata, sys
print("Python", sys.version.split()[0])
for name in "numpy protobuf networkx httpx opt-einsum pillow safetensors setuptools typing-extensions pytest pytest-xdist hypothesis".split():
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        print(name, "IS MISSING: carry its wheel")
PYTHON
  df -m /dev/shm | tail -1
  exit 0
fi
ldconfig -p | grep -q libgomp.so.1 || export LD_LIBRARY_PATH=$unpacked/site/paddle/libs
PYTHONPATH=$unpacked/site python3 $here/check_real_device.py --built .real/built "$@"
