#!/usr/bin/env bash
# Before a machine with a GPU is there: download, build and pack all that it needs into .real (ignored by git).
# .real/built has the plug-in; .real/1, .real/2 .. have what each call carries of Paddle.
set -euo pipefail
cd "$(dirname "$0")/../../.."
here=tests/device/real work=.real/work python=${PYTHON:-python3}
mkdir -p $work/wheels $work/cuda
rm -rf .real/[0-9] .real/built
download() { "$python" -m pip download -q --no-deps --only-binary=:all: -d $work/wheels "$@"; }
if ! ls $work/wheels/paddlepaddle-*.whl >/dev/null 2>&1; then
  download --python-version 3.12 --implementation cp --platform manylinux1_x86_64 paddlepaddle==3.3.1
  download --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
    nvidia-cuda-runtime==13.0.* nvidia-cuda-crt==13.0.* nvidia-cuda-nvcc==13.0.* nvidia-nvvm==13.0.*
fi
for wheel in $work/wheels/nvidia_*.whl; do "$python" -m zipfile -e "$wheel" $work/cuda; done
"$python" -m zipfile -e $work/wheels/paddlepaddle-*.whl $work/paddle
export CUDA_HOME=$PWD/$work/cuda/nvidia/cu13 PADDLE_INCLUDE=$PWD/$work/paddle/paddle/include
chmod +x "$CUDA_HOME"/bin/* "$CUDA_HOME"/nvvm/bin/*
$here/build.sh real .real/built
strip --strip-debug .real/built/libstandin.so
"$python" $here/pack.py $work/wheels/paddlepaddle-*.whl .real
du -sm .real/built .real/[0-9]
