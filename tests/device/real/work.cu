#include "work.h"

namespace {

__device__ long long now() {
  long long ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}
__global__ void spin(long long ns) {
  long long end = now() + ns;
  while (now() < end) __nanosleep(1000);
}
// Computes and moves memory on every multiprocessor for `ns` nanoseconds.
__global__ void heavy(long long ns, float4 *at, size_t number) {
  long long end = now() + ns;
  size_t step = static_cast<size_t>(gridDim.x) * blockDim.x, i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  while (now() < end) {
    float4 x = at[i % number];
    for (int turn = 0; turn < 64; ++turn) {
      x.x = x.x * 1.0001f + x.y;
      x.y = x.y * 0.9999f + x.z;
      x.z = x.z * 1.0001f + x.w;
      x.w = x.w * 0.9999f + x.x;
    }
    at[i % number] = x;
    i += step;
  }
}
__global__ void gate(volatile unsigned *word, long long longest_ns) {
  long long end = now() + longest_ns;
  while (*word == 0 && now() < end) __nanosleep(2000);
}
__global__ void zero(unsigned long long *out) { *out = 0; }
__global__ void sum(const unsigned *words, size_t number, unsigned long long *out) {
  unsigned long long mine = 0;
  size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < number; i += step)
    mine += words[i] * (2 * static_cast<unsigned long long>(i) + 1);
  for (int far = 16; far > 0; far /= 2) mine += __shfl_down_sync(0xffffffffu, mine, far);
  if (threadIdx.x % 32 == 0) atomicAdd(out, mine);
}
int multiprocessors() {
  int device = 0, found = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, device);
  return found;
}

}  // namespace

cudaError_t work_spin(cudaStream_t stream, long long ns) {
  spin<<<1, 1, 0, stream>>>(ns);
  return cudaGetLastError();
}
cudaError_t work_heavy(cudaStream_t stream, long long ns, void *scratch, size_t bytes) {
  heavy<<<multiprocessors() * 4, 256, 0, stream>>>(ns, static_cast<float4 *>(scratch), bytes / sizeof(float4));
  return cudaGetLastError();
}
cudaError_t work_gate(cudaStream_t stream, unsigned *word, long long longest_ns) {
  gate<<<1, 1, 0, stream>>>(word, longest_ns);
  return cudaGetLastError();
}
cudaError_t work_sum(cudaStream_t stream, const void *words, size_t number, unsigned long long *out) {
  zero<<<1, 1, 0, stream>>>(out);
  sum<<<multiprocessors(), 256, 0, stream>>>(static_cast<const unsigned *>(words), number, out);
  return cudaGetLastError();
}
