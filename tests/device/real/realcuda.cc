// "standin": a device for Paddle's pluggable-device interface whose memory, streams, events, copies and kernels are CUDA's.
// It stands in for Paddle's own GPU place: Paddle's CPU wheel delivers to it where there is no GPU (on fake/cudart.cc), and
// to a real GPU where there is no GPU build of Paddle. It has no operators: Paddle runs each on the CPU and moves the
// operands with the copies below.
//
// A stream of Paddle's is a cudaStream_t and an event is a cudaEvent_t, so `raw_stream` can be given to other libraries.
// Every copy and synchronization is counted, by kind and by thread. Tests read the counters through ctypes.
//
// Settings (environment):
//   STANDIN_DEVICES      devices that Paddle sees, possibly several on one GPU (2)
//   STANDIN_MEMORY_MB    memory of each device, in MB (8192)
//   STANDIN_LEGACY       1: streams that wait for CUDA's legacy default stream, and blocking copies in that one, as in
//                        Paddle's own GPU build. 0 (default): cudaStreamNonBlocking; a blocking copy waits for itself only.
//   STANDIN_HEAVY        1: queued work computes and moves memory on all multiprocessors. 0 (default): one thread waits.
//   STANDIN_CCL_SECONDS  seconds for which a rank waits for the others in a collective (60)
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "paddle/phi/backends/device_ext.h"
#include "work.h"

namespace {

long setting(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text != nullptr && *text != 0 ? atol(text) : otherwise;
}

const size_t kDevices = static_cast<size_t>(setting("STANDIN_DEVICES", 2));
const size_t kMemory = static_cast<size_t>(setting("STANDIN_MEMORY_MB", 8192)) << 20;
const bool kLegacy = setting("STANDIN_LEGACY", 0) != 0;
const bool kHeavy = setting("STANDIN_HEAVY", 0) != 0;
const size_t kPinnedFrom = 128 << 10;  // bytes from which numpy's arrays are pinned; CUDA stages smaller ones

// ---- counters ----------------------------------------------------------------------------------------------------------

enum What { H2D, D2H, D2D, H2D_ASYNC, D2H_ASYNC, D2D_ASYNC, SYNC_DEVICE, SYNC_STREAM, SYNC_EVENT, COLLECTIVE, WHATS };
const char *const kNames[WHATS] = {"h2d",       "d2h",         "d2d",         "h2d_async",  "d2h_async",
                                   "d2d_async", "sync_device", "sync_stream", "sync_event", "collective"};
struct Count {
  std::atomic<long> calls{0}, bytes{0}, on_main{0};
};
Count counts[WHATS];
// Read and set to 0 by standin_facts.
std::atomic<long> from_pinned{0}, from_pageable{0}, async_us{0}, async_longest_us{0}, errors{0};

void count(What what, size_t bytes = 0) {
  counts[what].calls++;
  counts[what].bytes += static_cast<long>(bytes);
  if (syscall(SYS_gettid) == getpid()) counts[what].on_main++;
}

// ---- calls of CUDA -----------------------------------------------------------------------------------------------------

pid_t started_in = 0;
std::atomic<bool> pinning{true};  // whether numpy's new arrays are pinned; those that forked workers read are not
bool forked() { return getpid() != started_in; }  // then CUDA may not be called
bool ok(cudaError_t found, const char *call) {
  if (found == cudaSuccess) return true;
  cudaGetLastError();
  if (found == cudaErrorNotReady || found == cudaErrorCudartUnloading) return false;
  errors++;
  fprintf(stderr, "standin: %s: %s (%d)\n", call, cudaGetErrorString(found), static_cast<int>(found));
  return false;
}
#define OK(call) ok((call), #call)
#define MUST(call) \
  if (!OK(call)) return C_FAILED

int gpus = 0;
thread_local int current = 0, chosen = -1;  // of each thread: the device that Paddle set, and CUDA's GPU
bool use(const C_Device device) {
  int gpu = (device == nullptr ? current : device->id) % std::max(gpus, 1);
  if (gpu == chosen) return true;
  if (!OK(cudaSetDevice(gpu))) return false;
  chosen = gpu;
  return true;
}
#define ON(device) \
  if (forked() || !use(device)) return C_FAILED

// A stream for one blocking call, which nothing else uses at the same time; kept for the next one.
class Own {
 public:
  Own() : gpu_(chosen) {
    {
      std::lock_guard<std::mutex> hold(lock());
      auto &kept = all()[gpu_];
      if (!kept.empty()) {
        stream = kept.back();
        kept.pop_back();
        return;
      }
    }
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  ~Own() {
    std::lock_guard<std::mutex> hold(lock());
    if (stream != nullptr) all()[gpu_].push_back(stream);
  }
  cudaStream_t stream = nullptr;

 private:
  static std::mutex &lock() {
    static auto &one = *new std::mutex;
    return one;
  }
  static std::map<int, std::vector<cudaStream_t>> &all() {
    static auto &kept = *new std::map<int, std::vector<cudaStream_t>>;
    return kept;
  }
  int gpu_;
};

// ---- pinned memory -----------------------------------------------------------------------------------------------------

// Blocks are powers of two and are kept for reuse, as in Paddle's allocator of pinned memory.
auto &pinned_lock = *new std::mutex;
auto &pinned_free = *new std::unordered_map<size_t, std::vector<void *>>;
auto &pinned_sizes = *new std::unordered_map<void *, size_t>;  // of blocks in use
std::atomic<long> pinned_bytes{0};

void *pinned_take(size_t size) {
  size_t whole = kPinnedFrom;
  while (whole < size) whole *= 2;
  void *block = nullptr;
  {
    std::lock_guard<std::mutex> hold(pinned_lock);
    auto &kept = pinned_free[whole];
    if (!kept.empty()) {
      block = kept.back();
      kept.pop_back();
      pinned_sizes[block] = whole;
      return block;
    }
  }
  // Without the lock: CUDA may wait for a host function, which may wait for the lock.
  if (!OK(cudaHostAlloc(&block, whole, cudaHostAllocPortable))) return nullptr;
  pinned_bytes += static_cast<long>(whole);
  std::lock_guard<std::mutex> hold(pinned_lock);
  pinned_sizes[block] = whole;
  return block;
}
bool pinned_give(void *block) {  // false if the memory is not pinned
  std::lock_guard<std::mutex> hold(pinned_lock);
  auto found = pinned_sizes.find(block);
  if (found == pinned_sizes.end()) return false;
  pinned_free[found->second].push_back(block);
  pinned_sizes.erase(found);
  return true;
}
bool is_pinned(const void *at) {
  cudaPointerAttributes found = {};
  if (cudaPointerGetAttributes(&found, at) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return found.type == cudaMemoryTypeHost;
}

// ---- memory ------------------------------------------------------------------------------------------------------------

std::atomic<size_t> allocated{0};

C_Status allocate(const C_Device device, void **out, size_t size) {
  *out = nullptr;
  if (allocated + size > kMemory) return C_FAILED;
  ON(device);
  MUST(cudaMalloc(out, size ? size : 1));
  Own own;
  MUST(cudaMemsetAsync(*out, 0xA5, size, own.stream));  // makes reads of uninitialized memory visible
  MUST(cudaStreamSynchronize(own.stream));
  allocated += size;
  return C_SUCCESS;
}
C_Status release(const C_Device device, void *at, size_t size) {
  if (forked()) return C_SUCCESS;
  if (!use(device)) return C_SUCCESS;  // at exit
  OK(cudaFree(at));
  allocated -= size;
  return C_SUCCESS;
}
C_Status fill(const C_Device device, void *at, unsigned char value, size_t size) {
  ON(device);
  Own own;
  MUST(cudaMemsetAsync(at, value, size, own.stream));
  MUST(cudaStreamSynchronize(own.stream));
  return C_SUCCESS;
}
C_Status host_allocate(const C_Device device, void **out, size_t size) {
  ON(device);
  *out = pinned_take(size ? size : 1);
  return *out != nullptr ? C_SUCCESS : C_FAILED;
}
C_Status host_release(const C_Device, void *at, size_t) { return pinned_give(at) ? C_SUCCESS : C_ERROR; }

// ---- streams and events ------------------------------------------------------------------------------------------------

cudaStream_t of(C_Stream stream) { return reinterpret_cast<cudaStream_t>(stream); }
cudaEvent_t of(C_Event event) { return reinterpret_cast<cudaEvent_t>(event); }

C_Status stream_make(const C_Device device, C_Stream *out) {
  ON(device);
  cudaStream_t made = nullptr;
  MUST(cudaStreamCreateWithFlags(&made, kLegacy ? cudaStreamDefault : cudaStreamNonBlocking));
  *out = reinterpret_cast<C_Stream>(made);
  return C_SUCCESS;
}
C_Status stream_end(const C_Device device, C_Stream stream) {
  if (forked() || !use(device)) return C_SUCCESS;
  OK(cudaStreamDestroy(of(stream)));
  return C_SUCCESS;
}
C_Status stream_query(const C_Device device, C_Stream stream) {
  ON(device);
  return OK(cudaStreamQuery(of(stream))) ? C_SUCCESS : C_FAILED;
}
C_Status stream_sync(const C_Device device, C_Stream stream) {
  count(SYNC_STREAM);
  if (forked()) return C_SUCCESS;
  ON(device);
  MUST(cudaStreamSynchronize(of(stream)));
  return C_SUCCESS;
}
C_Status device_sync(const C_Device device) {
  count(SYNC_DEVICE);
  if (forked()) return C_SUCCESS;
  ON(device);
  MUST(cudaDeviceSynchronize());
  return C_SUCCESS;
}
struct Call {
  C_Device device;
  C_Stream stream;
  C_Callback call;
  void *data;
};
void made_call(void *data) {
  Call *one = static_cast<Call *>(data);
  C_Status status = C_SUCCESS;
  one->call(one->device, one->stream, one->data, &status);
  delete one;
}
C_Status stream_callback(const C_Device device, C_Stream stream, C_Callback call, void *data) {
  ON(device);
  MUST(cudaLaunchHostFunc(of(stream), made_call, new Call{device, stream, call, data}));
  return C_SUCCESS;
}
C_Status event_make(const C_Device device, C_Event *out) {
  ON(device);
  cudaEvent_t made = nullptr;
  MUST(cudaEventCreateWithFlags(&made, cudaEventDisableTiming));
  *out = reinterpret_cast<C_Event>(made);
  return C_SUCCESS;
}
C_Status event_end(const C_Device device, C_Event event) {
  if (forked() || !use(device)) return C_SUCCESS;
  OK(cudaEventDestroy(of(event)));
  return C_SUCCESS;
}
C_Status event_record(const C_Device device, C_Stream stream, C_Event event) {
  ON(device);
  MUST(cudaEventRecord(of(event), of(stream)));
  return C_SUCCESS;
}
C_Status event_query(const C_Device device, C_Event event) {
  ON(device);
  return OK(cudaEventQuery(of(event))) ? C_SUCCESS : C_FAILED;
}
C_Status event_sync(const C_Device device, C_Event event) {
  count(SYNC_EVENT);
  if (forked()) return C_SUCCESS;
  ON(device);
  MUST(cudaEventSynchronize(of(event)));
  return C_SUCCESS;
}
C_Status stream_waits(const C_Device device, C_Stream stream, C_Event event) {
  ON(device);
  MUST(cudaStreamWaitEvent(of(stream), of(event), 0));
  return C_SUCCESS;
}

// ---- copies ------------------------------------------------------------------------------------------------------------

template <What what>
constexpr cudaMemcpyKind kind() {
  return what == H2D || what == H2D_ASYNC   ? cudaMemcpyHostToDevice
         : what == D2H || what == D2H_ASYNC ? cudaMemcpyDeviceToHost
                                            : cudaMemcpyDeviceToDevice;
}
template <What what>
C_Status copy(const C_Device device, void *to, const void *from, size_t size) {
  count(what, size);
  ON(device);
  if (kLegacy) {
    MUST(cudaMemcpy(to, from, size, kind<what>()));
    return C_SUCCESS;
  }
  Own own;
  MUST(cudaMemcpyAsync(to, from, size, kind<what>(), own.stream));
  MUST(cudaStreamSynchronize(own.stream));
  return C_SUCCESS;
}
template <What what>
C_Status copy_async(const C_Device device, C_Stream stream, void *to, const void *from, size_t size) {
  if (stream == nullptr) return copy<what>(device, to, from, size);
  count(what, size);
  ON(device);
  if (size == 0) return C_SUCCESS;
  auto began = std::chrono::steady_clock::now();
  if (what == H2D_ASYNC) (is_pinned(from) ? from_pinned : from_pageable)++;
  MUST(cudaMemcpyAsync(to, from, size, kind<what>(), of(stream)));
  if (what == H2D_ASYNC) {
    auto took = std::chrono::steady_clock::now() - began;
    long us = static_cast<long>(std::chrono::duration_cast<std::chrono::microseconds>(took).count());
    async_us += us;
    if (us > async_longest_us) async_longest_us = us;
  }
  return C_SUCCESS;
}
C_Status copy_peer(const C_Device to_device, const C_Device, void *to, const void *from, size_t size) {
  return copy<D2D>(to_device, to, from, size);
}
C_Status copy_peer_async(const C_Device to_device, const C_Device, C_Stream stream, void *to, const void *from,
                         size_t size) {
  return copy_async<D2D_ASYNC>(to_device, stream, to, from, size);
}

// ---- the device --------------------------------------------------------------------------------------------------------

volatile unsigned *gate_words = nullptr;  // pinned and mapped: kernels read them
const unsigned kGates = 4096;
std::atomic<unsigned> newest_gate{0};
void *scratch = nullptr;  // memory that heavy work reads and writes
const size_t kScratch = 256 << 20;
void *slots = nullptr;  // on the first GPU: one sum for each step
const size_t kSlots = 1 << 16;

C_Status start() {
  started_in = getpid();
  // In a forked child, no other thread may hold the lock.
  pthread_atfork([] { pinned_lock.lock(); }, [] { pinned_lock.unlock(); }, [] { pinned_lock.unlock(); });
  int version = 0;
  if (!OK(cudaGetDeviceCount(&gpus)) || gpus == 0) {
    gpus = 0;
    fprintf(stderr, "standin: no GPU\n");
    return C_SUCCESS;  // without a device, Paddle ignores this plug-in
  }
  OK(cudaDriverGetVersion(&version));
  if (!use(nullptr)) return C_FAILED;
  MUST(cudaFree(nullptr));
  void *words = nullptr;
  MUST(cudaHostAlloc(&words, kGates * sizeof(unsigned), cudaHostAllocMapped | cudaHostAllocPortable));
  memset(words, 0, kGates * sizeof(unsigned));
  gate_words = static_cast<volatile unsigned *>(words);
  if (kHeavy) {
    MUST(cudaMalloc(&scratch, kScratch));
    MUST(cudaMemset(scratch, 0, kScratch));
  }
  // CUDA loads a kernel at its first launch, and may wait for all queued work: launch each now, while nothing is queued.
  MUST(cudaMalloc(&slots, kSlots * sizeof(unsigned long long)));
  Own own;
  cudaStream_t stream = own.stream;
  gate_words[0] = 1;
  MUST(work_spin(stream, 1000));
  MUST(work_gate(stream, const_cast<unsigned *>(gate_words), 1000000));
  MUST(work_sum(stream, slots, 0, static_cast<unsigned long long *>(slots)));
  if (kHeavy) MUST(work_heavy(stream, 1000, scratch, kScratch));
  MUST(cudaStreamSynchronize(stream));
  return C_SUCCESS;
}
C_Status nothing() { return C_SUCCESS; }
C_Status nothing_for(const C_Device) { return C_SUCCESS; }
C_Status set_device(const C_Device device) {
  current = device->id;
  if (forked()) return C_SUCCESS;
  return use(device) ? C_SUCCESS : C_FAILED;
}
C_Status get_device(const C_Device device) {
  device->id = current;
  return C_SUCCESS;
}
C_Status device_count(size_t *number) {
  int found = 0;
  if (cudaGetDeviceCount(&found) != cudaSuccess) {
    cudaGetLastError();
    found = 0;
  }
  *number = found > 0 ? kDevices : 0;
  return C_SUCCESS;
}
C_Status device_list(size_t *list) {
  size_t number = 0;
  device_count(&number);
  for (size_t device = 0; device < number; ++device) list[device] = device;
  return C_SUCCESS;
}
C_Status memory_stats(const C_Device device, size_t *total, size_t *unused) {
  *total = kMemory;
  *unused = kMemory - allocated;
  if (forked() || !use(device)) return C_SUCCESS;
  size_t left = 0, all = 0;
  if (OK(cudaMemGetInfo(&left, &all))) {
    *total = std::min(*total, all);
    *unused = std::min(*unused, left);
  }
  return C_SUCCESS;
}
template <size_t bytes>
C_Status size_is(const C_Device, size_t *size) {
  *size = bytes;
  return C_SUCCESS;
}
C_Status all_memory(const C_Device, size_t *size) {
  *size = kMemory;
  return C_SUCCESS;
}
C_Status yes(const C_Device, bool *answer) {
  *answer = true;
  return C_SUCCESS;
}
C_Status runtime_version(const C_Device, size_t *number) {
  int found = 0;
  OK(cudaRuntimeGetVersion(&found));
  *number = static_cast<size_t>(found);
  return C_SUCCESS;
}
C_Status driver_version(const C_Device, size_t *number) {
  int found = 0;
  OK(cudaDriverGetVersion(&found));
  *number = static_cast<size_t>(found);
  return C_SUCCESS;
}

// ---- numpy's arrays in pinned memory -----------------------------------------------------------------------------------

// PyDataMem_Handler of version 1, in numpy/ndarraytypes.h. The default one, which all threads use, is changed in place.
struct Allocator {
  void *ctx;
  void *(*malloc)(void *, size_t);
  void *(*calloc)(void *, size_t, size_t);
  void *(*realloc)(void *, void *, size_t);
  void (*free)(void *, void *, size_t);
};
struct Handler {
  char name[127];
  unsigned char version;
  Allocator allocator;
};
Allocator before;

bool pins(size_t size) { return size >= kPinnedFrom && pinning && getpid() == started_in; }
void *array_malloc(void *ctx, size_t size) {
  void *block = pins(size) ? pinned_take(size) : nullptr;
  return block != nullptr ? block : before.malloc(ctx, size);
}
void *array_calloc(void *ctx, size_t count, size_t size) {
  void *block = pins(count * size) ? pinned_take(count * size) : nullptr;
  return block != nullptr ? memset(block, 0, count * size) : before.calloc(ctx, count, size);
}
void array_free(void *ctx, void *block, size_t size) {
  if (reinterpret_cast<size_t>(block) % 4096 == 0) {  // pinned blocks are aligned to pages
    if (pinned_give(block)) return;
  }
  before.free(ctx, block, size);
}
void *array_realloc(void *ctx, void *block, size_t size) {
  size_t held = 0;
  {
    std::lock_guard<std::mutex> hold(pinned_lock);
    auto found = pinned_sizes.find(block);
    if (found != pinned_sizes.end()) held = found->second;
  }
  if (held == 0) return before.realloc(ctx, block, size);
  if (size <= held && size > held / 4) return block;
  void *made = array_malloc(ctx, size);
  if (made == nullptr) return nullptr;
  memcpy(made, block, std::min(held, size));
  pinned_give(block);
  return made;
}

}  // namespace

#include "collectives.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

// For tests, through ctypes. A stream is `paddle.device.current_stream(...).stream_base.raw_stream`.

// Queues a kernel that takes `us` microseconds, and returns.
EXPORTED void standin_work(void *stream, long us) {
  if (us <= 0 || !use(nullptr)) return;
  cudaStream_t in = static_cast<cudaStream_t>(stream);
  if (kHeavy)
    OK(work_heavy(in, us * 1000, scratch, kScratch));
  else
    OK(work_spin(in, us * 1000));
}
// Queues a kernel that ends when `standin_open` is called, or after 60 seconds.
EXPORTED void standin_close(void *stream) {
  if (!use(nullptr)) return;
  unsigned gate = (++newest_gate) % kGates;
  gate_words[gate] = 0;
  OK(work_gate(static_cast<cudaStream_t>(stream), const_cast<unsigned *>(gate_words) + gate, 60000000000LL));
}
EXPORTED void standin_open() { gate_words[newest_gate % kGates] = 1; }
EXPORTED void standin_wait(void *stream) {
  if (use(nullptr)) OK(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}
// Writes the counters since the last call as JSON: {"h2d": [calls, bytes, calls on the main thread], ...}.
EXPORTED void standin_counters(char *out, size_t size) {
  std::string text = "{";
  for (int what = 0; what < WHATS; ++what) {
    Count &one = counts[what];
    text += (what == 0 ? "\"" : ", \"") + std::string(kNames[what]) + "\": [" + std::to_string(one.calls.exchange(0)) +
            ", " + std::to_string(one.bytes.exchange(0)) + ", " + std::to_string(one.on_main.exchange(0)) + "]";
  }
  snprintf(out, size, "%s}", text.c_str());
}
// Writes as JSON, since the last call: asynchronous copies to the device by kind of memory, how long their calls took, and
// calls of CUDA that failed.
EXPORTED void standin_facts(char *out, size_t size) {
  snprintf(out, size,
           "{\"from_pinned\": %ld, \"from_pageable\": %ld, \"call_us\": %ld, \"longest_call_us\": %ld, "
           "\"pinned_bytes\": %ld, \"errors\": %ld, \"gpus\": %d}",
           from_pinned.exchange(0), from_pageable.exchange(0), async_us.exchange(0), async_longest_us.exchange(0),
           pinned_bytes.load(), errors.exchange(0), gpus);
}
// Queues a kernel that writes the sum of word[i] * (2 i + 1), modulo 2^64, of 32-bit words on the device into a slot.
EXPORTED int standin_sum(void *stream, const void *words, size_t number, size_t slot) {
  auto *out = static_cast<unsigned long long *>(slots) + slot % kSlots;
  return use(nullptr) && OK(work_sum(static_cast<cudaStream_t>(stream), words, number, out)) ? 0 : 1;
}
// Waits for all queued work and copies the first slots to the host.
EXPORTED int standin_sums(unsigned long long *to, size_t number) {
  return use(nullptr) && OK(cudaDeviceSynchronize()) &&
                 OK(cudaMemcpy(to, slots, number * sizeof *to, cudaMemcpyDeviceToHost))
             ? 0
             : 1;
}
EXPORTED void *standin_pinned(size_t size) { return use(nullptr) ? pinned_take(size) : nullptr; }
// Copies without Paddle, and returns the microseconds between CUDA's events: the most that the GPU can do.
EXPORTED double standin_copy_us(void *to, const void *from, size_t size, int to_device) {
  if (!use(nullptr)) return -1;
  Own own;
  cudaStream_t stream = own.stream;
  cudaEvent_t begun = nullptr, ended = nullptr;
  float ms = -1;
  if (OK(cudaEventCreateWithFlags(&begun, cudaEventDefault)) && OK(cudaEventCreateWithFlags(&ended, cudaEventDefault)) &&
      OK(cudaEventRecord(begun, stream)) &&
      OK(cudaMemcpyAsync(to, from, size, to_device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost, stream)) &&
      OK(cudaEventRecord(ended, stream)) && OK(cudaEventSynchronize(ended)))
    OK(cudaEventElapsedTime(&ms, begun, ended));
  if (begun != nullptr) OK(cudaEventDestroy(begun));
  if (ended != nullptr) OK(cudaEventDestroy(ended));
  return ms * 1000.0;
}
// Puts large arrays into pinned memory from now on. `handler` is numpy's default one, from PyDataMem_GetHandler.
EXPORTED int standin_pin_numpy(void *handler) {
  Handler *its = static_cast<Handler *>(handler);
  if (its->version != 1 || gpus == 0) return 1;
  if (its->allocator.malloc == array_malloc) return 0;
  before = its->allocator;
  its->allocator = {before.ctx, array_malloc, array_calloc, array_realloc, array_free};
  return 0;
}

EXPORTED void standin_pinning(int on) { pinning = on != 0; }
// Tests CUDA without Paddle, `ctypes.CDLL(..).standin_selftest()`; prints its measurements, and returns 0 if it works.
EXPORTED int standin_selftest() {
  if (start() != C_SUCCESS || gpus == 0) return 1;
  const size_t size = 64 << 20;
  void *there = nullptr, *pageable = malloc(size), *pinned = pinned_take(size);
  if (pinned == nullptr || !OK(cudaMalloc(&there, size))) return 2;
  memset(pageable, 1, size);
  memset(pinned, 2, size);
  double slow = 1e9, fast = 1e9;
  for (int turn = 0; turn < 5; ++turn) {
    slow = std::min(slow, standin_copy_us(there, pageable, size, 1));
    fast = std::min(fast, standin_copy_us(there, pinned, size, 1));
  }
  memset(pinned, 0, size);
  standin_copy_us(pinned, there, size, 0);
  bool same = static_cast<char *>(pinned)[0] == 2 && memcmp(pinned, static_cast<char *>(pinned) + 1, size - 1) == 0;
  Own own;
  auto began = std::chrono::steady_clock::now();
  if (!OK(work_spin(own.stream, 20000000))) return 3;
  bool waits = cudaStreamQuery(own.stream) == cudaErrorNotReady;
  cudaGetLastError();
  if (!OK(cudaStreamSynchronize(own.stream))) return 4;
  double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count();
  int version = 0, runtime = 0;
  OK(cudaDriverGetVersion(&version));
  OK(cudaRuntimeGetVersion(&runtime));
  printf("selftest: driver %d, runtime %d, GPUs %d, pageable %.1f GB/s, pinned %.1f GB/s, bytes %s, 20 ms of work took %.1f ms, %s\n",
         version, runtime, gpus, size / slow / 1e3, size / fast / 1e3, same ? "right" : "WRONG", ms,
         waits ? "asynchronous" : "NOT ASYNCHRONOUS");
  fflush(stdout);
  return same && waits && ms > 19 && errors == 0 ? 0 : 5;
}

EXPORTED void InitPlugin(CustomRuntimeParams *params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  params->device_type = const_cast<char *>("standin");
  params->sub_device_type = const_cast<char *>("v1");
  C_DeviceInterface &api = *params->interface;
  size_t size = api.size;
  memset(&api, 0, sizeof api);
  api.size = size;

  api.initialize = start;
  api.finalize = nothing;
  api.init_device = nothing_for;
  api.deinit_device = nothing_for;
  api.set_device = set_device;
  api.get_device = get_device;
  api.get_device_count = device_count;
  api.get_device_list = device_list;

  api.device_memory_allocate = allocate;
  api.device_memory_deallocate = release;
  api.device_memory_set = fill;
  api.host_memory_allocate = host_allocate;
  api.host_memory_deallocate = host_release;
  api.device_memory_stats = memory_stats;
  api.device_min_chunk_size = size_is<512>;
  api.device_max_chunk_size = size_is<(64 << 20)>;
  api.device_max_alloc_size = all_memory;

  api.create_stream = stream_make;
  api.destroy_stream = stream_end;
  api.query_stream = stream_query;
  api.synchronize_stream = stream_sync;
  api.synchronize_device = device_sync;
  api.stream_add_callback = stream_callback;
  api.create_event = event_make;
  api.destroy_event = event_end;
  api.record_event = event_record;
  api.query_event = event_query;
  api.synchronize_event = event_sync;
  api.stream_wait_event = stream_waits;

  api.memory_copy_h2d = copy<H2D>;
  api.memory_copy_d2h = copy<D2H>;
  api.memory_copy_d2d = copy<D2D>;
  api.memory_copy_p2p = copy_peer;
  api.async_memory_copy_h2d = copy_async<H2D_ASYNC>;
  api.async_memory_copy_d2h = copy_async<D2H_ASYNC>;
  api.async_memory_copy_d2d = copy_async<D2D_ASYNC>;
  api.async_memory_copy_p2p = copy_peer_async;

  api.is_float16_supported = yes;
  api.is_bfloat16_supported = yes;
  api.get_runtime_version = runtime_version;
  api.get_driver_version = driver_version;

  collectives_into(&api);
}
