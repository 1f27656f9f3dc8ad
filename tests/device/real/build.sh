#!/usr/bin/env bash
# Build the plug-in: PYTHON=python tests/device/real/build.sh fake|real FOLDER
#   fake  on fake/cudart.cc, where there is no GPU; needs a C++ compiler only
#   real  on CUDA, with nvcc of CUDA_HOME or of PATH
# CUDA_HOME: /usr/local/cuda, or the folder nvidia/cu13 of the packages nvidia-cuda-runtime, -crt, -nvcc and nvidia-nvvm.
# PADDLE_INCLUDE: Paddle's headers, by default those of PYTHON's Paddle. CUDA_ARCH (sm_90): the GPU's architecture.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
kind=$1 out=$2
cuda=${CUDA_HOME:-/usr/local/cuda}
find_headers="import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec('paddle').origin).parent / 'include')"
include=${PADDLE_INCLUDE:-$("${PYTHON:-python3}" -c "$find_headers")}
mkdir -p "$out"
flags=(-std=c++17 -O2 -g -Wall -fPIC -fvisibility=hidden -pthread -isystem "$include")
if [ "$kind" = fake ]; then
  "${CXX:-g++}" "${flags[@]}" -I "$here/fake" -shared "$here/realcuda.cc" "$here/fake/cudart.cc" -o "$out/libstandin.so"
else
  nvcc=$(PATH=$cuda/bin:$PATH command -v nvcc)
  "$nvcc" -std=c++17 -O2 -arch="${CUDA_ARCH:-sm_90}" -Xcompiler -fPIC,-fvisibility=hidden -c "$here/work.cu" -o "$out/work.o"
  "${CXX:-g++}" "${flags[@]}" -isystem "$cuda/include" -c "$here/realcuda.cc" -o "$out/realcuda.o"
  static=$(ls "$cuda"/{lib64,lib,targets/x86_64-linux/lib}/libcudart_static.a 2>/dev/null | head -1 || true)
  "${CXX:-g++}" -shared -pthread "$out/realcuda.o" "$out/work.o" "$static" -ldl -lrt -o "$out/libstandin.so"
  rm "$out"/*.o
fi
