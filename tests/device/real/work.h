// Kernels of the plug-in, in work.cu and, where there is no GPU, in fake/cudart.cc.
#pragma once
#include <cuda_runtime_api.h>

extern "C" {
cudaError_t work_spin(cudaStream_t stream, long long ns);
cudaError_t work_heavy(cudaStream_t stream, long long ns, void *scratch, size_t bytes);
cudaError_t work_gate(cudaStream_t stream, unsigned *word, long long longest_ns);
cudaError_t work_sum(cudaStream_t stream, const void *words, size_t number, unsigned long long *out);
}
