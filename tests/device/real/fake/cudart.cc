// The part of CUDA's runtime that the plug-in uses, and its kernels, on threads of the CPU: to test the plug-in, and what
// delivers to it, where there is no GPU. What CUDA forbids or makes slow is forbidden or slow here, too:
//  * The host cannot read or write device memory.
//  * A copy from pageable memory of more than 64 KB waits for its stream; one to pageable memory always does.
//  * cudaFree waits for all streams. cudaMemcpy waits for the streams that are not cudaStreamNonBlocking.
//  * Calls fail in a forked child, and in a host function of a stream.
// Settings (environment): STANDIN_GPUS (1), STANDIN_COPY_US (0, what each copy takes longer), STANDIN_ALL_PINNED (0; 1: no
// host memory is pageable).
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "../work.h"

namespace {

using Clock = std::chrono::steady_clock;
long setting(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text != nullptr && *text != 0 ? atol(text) : otherwise;
}
const int kGpus = static_cast<int>(setting("STANDIN_GPUS", 1));
const auto kCopyTakes = std::chrono::microseconds(setting("STANDIN_COPY_US", 0));
const bool kAllPinned = setting("STANDIN_ALL_PINNED", 0) != 0;
const size_t kMemory = size_t{16} << 30;

thread_local cudaError_t last = cudaSuccess;
thread_local int current = 0;
thread_local bool in_host_function = false;
pid_t first_call_in = 0;
std::once_flag first_call;

cudaError_t with(cudaError_t error) { return error == cudaSuccess ? error : last = error; }
cudaError_t entered(const char *call) {
  std::call_once(first_call, [] { first_call_in = getpid(); });
  if (getpid() != first_call_in) return with(cudaErrorInitializationError);
  if (in_host_function) {
    fprintf(stderr, "fake CUDA: %s in a host function\n", call);
    return with(cudaErrorNotPermitted);
  }
  return cudaSuccess;
}
#define ENTER                                     \
  if (cudaError_t error = entered(__func__)) { \
    return error;                               \
  }

// ---- memory ----
struct Block {
  char *view;  // where it can be touched
  size_t size;
};
auto &lock_of_blocks = *new std::mutex;
auto &device_blocks = *new std::map<char *, Block>;
auto &pinned_blocks = *new std::map<char *, size_t>;

char *touchable(const void *address) {
  char *at = static_cast<char *>(const_cast<void *>(address));
  std::lock_guard<std::mutex> hold(lock_of_blocks);
  auto next = device_blocks.upper_bound(at);
  if (next == device_blocks.begin()) return at;
  auto &[start, block] = *std::prev(next);
  return at < start + block.size ? block.view + (at - start) : at;
}
bool on_device(const void *at) { return touchable(at) != at; }
bool pinned(const void *address) {
  if (kAllPinned) return true;
  char *at = static_cast<char *>(const_cast<void *>(address));
  std::lock_guard<std::mutex> hold(lock_of_blocks);
  auto next = pinned_blocks.upper_bound(at);
  if (next == pinned_blocks.begin()) return false;
  auto &[start, size] = *std::prev(next);
  return at < start + size;
}

// ---- streams ----
class Queue {
 public:
  explicit Queue(bool blocking) : blocking(blocking), thread_([this] { run(); }) { thread_.detach(); }
  void put(std::function<void()> job) {
    std::lock_guard<std::mutex> hold(lock_);
    jobs_.push_back(std::move(job));
    left_++;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> hold(lock_);
    changed_.wait(hold, [this] { return left_ == 0; });
  }
  bool idle() {
    std::lock_guard<std::mutex> hold(lock_);
    return left_ == 0;
  }
  const bool blocking;

 private:
  void run() {
    std::unique_lock<std::mutex> hold(lock_);
    for (;;) {
      changed_.wait(hold, [this] { return !jobs_.empty(); });
      auto job = std::move(jobs_.front());
      jobs_.pop_front();
      hold.unlock();
      job();
      hold.lock();
      left_--;
      changed_.notify_all();
    }
  }
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  size_t left_ = 0;
  std::thread thread_;
};
auto &lock_of_queues = *new std::mutex;
auto &queues = *new std::map<Queue *, bool>;  // never destroyed, only forgotten
Queue *of(cudaStream_t stream) { return reinterpret_cast<Queue *>(stream); }

void wait_for_all(bool only_blocking = false) {
  std::map<Queue *, bool> all;
  {
    std::lock_guard<std::mutex> hold(lock_of_queues);
    all = queues;
  }
  for (auto &[queue, lives] : all)
    if (!only_blocking || queue->blocking) queue->wait();
}
cudaError_t in(cudaStream_t stream, std::function<void()> job) {
  if (stream == nullptr) {
    wait_for_all(true);
    job();
  } else {
    of(stream)->put(std::move(job));
  }
  return cudaSuccess;
}
void move(void *to, const void *from, size_t size) {
  if (kCopyTakes.count() != 0) std::this_thread::sleep_for(kCopyTakes);
  memcpy(touchable(to), touchable(from), size);
}

// ---- events ----
struct Moment {
  std::mutex lock;
  std::condition_variable changed;
  bool passed = false;
  Clock::time_point at;
  void pass() {
    std::lock_guard<std::mutex> hold(lock);
    passed = true;
    at = Clock::now();
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> hold(lock);
    changed.wait(hold, [this] { return passed; });
  }
  bool over() {
    std::lock_guard<std::mutex> hold(lock);
    return passed;
  }
};
struct Event {
  std::mutex lock;
  std::shared_ptr<Moment> newest;
  std::shared_ptr<Moment> get() {
    std::lock_guard<std::mutex> hold(lock);
    return newest;
  }
};
Event *of(cudaEvent_t event) { return reinterpret_cast<Event *>(event); }

}  // namespace

extern "C" {

cudaError_t cudaGetLastError() {
  cudaError_t found = last;
  last = cudaSuccess;
  return found;
}
const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorNotReady ? "not ready" : error == cudaErrorMemoryAllocation ? "out of memory" : "fake error";
}
cudaError_t cudaGetDeviceCount(int *count) {
  ENTER;
  *count = kGpus;
  return kGpus ? cudaSuccess : with(cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int device) {
  ENTER;
  if (device < 0 || device >= kGpus) return with(cudaErrorInvalidDevice);
  current = device;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
  ENTER;
  *unused = *total = kMemory;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void **out, size_t size) {
  ENTER;
  size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), whole = (size + page - 1) / page * page;
  int file = static_cast<int>(syscall(SYS_memfd_create, "fakecuda", 0));
  if (file < 0 || ftruncate(file, static_cast<off_t>(whole)) != 0) return with(cudaErrorMemoryAllocation);
  void *shown = mmap(nullptr, whole, PROT_NONE, MAP_SHARED, file, 0);
  void *view = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (shown == MAP_FAILED || view == MAP_FAILED) return with(cudaErrorMemoryAllocation);
  std::lock_guard<std::mutex> hold(lock_of_blocks);
  device_blocks[static_cast<char *>(shown)] = Block{static_cast<char *>(view), whole};
  *out = shown;
  return cudaSuccess;
}
cudaError_t cudaFree(void *at) {
  ENTER;
  if (at == nullptr) return cudaSuccess;
  wait_for_all();
  std::lock_guard<std::mutex> hold(lock_of_blocks);
  auto found = device_blocks.find(static_cast<char *>(at));
  if (found == device_blocks.end()) return with(cudaErrorInvalidValue);
  munmap(found->second.view, found->second.size);
  munmap(found->first, found->second.size);
  device_blocks.erase(found);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **out, size_t size, unsigned) {
  ENTER;
  if (posix_memalign(out, 4096, size) != 0) return with(cudaErrorMemoryAllocation);
  std::lock_guard<std::mutex> hold(lock_of_blocks);
  pinned_blocks[static_cast<char *>(*out)] = size;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *found, const void *at) {
  ENTER;
  memset(found, 0, sizeof *found);
  found->type = pinned(at) ? cudaMemoryTypeHost : on_device(at) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) {
  ENTER;
  auto *made = new Queue((flags & cudaStreamNonBlocking) == 0);
  std::lock_guard<std::mutex> hold(lock_of_queues);
  queues[made] = true;
  *out = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  ENTER;
  std::lock_guard<std::mutex> hold(lock_of_queues);
  return queues.erase(of(stream)) ? cudaSuccess : with(cudaErrorInvalidResourceHandle);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  ENTER;
  return stream == nullptr || of(stream)->idle() ? cudaSuccess : with(cudaErrorNotReady);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ENTER;
  if (stream == nullptr)
    wait_for_all(true);
  else
    of(stream)->wait();
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  ENTER;
  wait_for_all();
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) {
  ENTER;
  return in(stream, [=] {
    in_host_function = true;
    call(data);
    in_host_function = false;
  });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned) {
  ENTER;
  *out = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  ENTER;
  delete of(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  ENTER;
  auto moment = std::make_shared<Moment>();
  {
    std::lock_guard<std::mutex> hold(of(event)->lock);
    of(event)->newest = moment;
  }
  return in(stream, [moment] { moment->pass(); });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  ENTER;
  auto moment = of(event)->get();
  return moment == nullptr || moment->over() ? cudaSuccess : with(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ENTER;
  if (auto moment = of(event)->get()) moment->wait();
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begun, cudaEvent_t ended) {
  ENTER;
  *ms = std::chrono::duration<float, std::milli>(of(ended)->get()->at - of(begun)->get()->at).count();
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  ENTER;
  auto moment = of(event)->get();
  return moment == nullptr ? cudaSuccess : in(stream, [moment] { moment->wait(); });
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
  ENTER;
  const void *host = kind == cudaMemcpyHostToDevice ? from : kind == cudaMemcpyDeviceToHost ? to : nullptr;
  if ((kind != cudaMemcpyDeviceToHost) != on_device(to) || (kind != cudaMemcpyHostToDevice) != on_device(from)) {
    fprintf(stderr, "fake CUDA: a copy of kind %d with other memory\n", static_cast<int>(kind));
    return with(cudaErrorInvalidValue);
  }
  if (host == nullptr || pinned(host)) return in(stream, [=] { move(to, from, size); });
  if (kind == cudaMemcpyHostToDevice && size <= 65536) {
    std::shared_ptr<char> staged(new char[size], std::default_delete<char[]>());
    memcpy(staged.get(), from, size);
    return in(stream, [=] { move(to, staged.get(), size); });
  }
  in(stream, [=] { move(to, from, size); });
  return cudaStreamSynchronize(stream);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind) {
  ENTER;
  wait_for_all(true);
  move(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *at, int value, size_t size, cudaStream_t stream) {
  ENTER;
  return in(stream, [=] { memset(touchable(at), value, size); });
}
cudaError_t cudaMemset(void *at, int value, size_t size) {
  ENTER;
  wait_for_all(true);
  memset(touchable(at), value, size);
  return cudaSuccess;
}

// ---- kernels ----
cudaError_t work_spin(cudaStream_t stream, long long ns) {
  ENTER;
  return in(stream, [=] { std::this_thread::sleep_for(std::chrono::nanoseconds(ns)); });
}
cudaError_t work_heavy(cudaStream_t stream, long long ns, void *, size_t) { return work_spin(stream, ns); }
cudaError_t work_gate(cudaStream_t stream, unsigned *word, long long longest_ns) {
  ENTER;
  return in(stream, [=] {
    auto end = Clock::now() + std::chrono::nanoseconds(longest_ns);
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == 0 && Clock::now() < end)
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  });
}
cudaError_t work_sum(cudaStream_t stream, const void *words, size_t number, unsigned long long *out) {
  ENTER;
  return in(stream, [=] {
    unsigned long long sum = 0;
    auto *at = reinterpret_cast<const unsigned *>(touchable(words));
    for (size_t i = 0; i < number; ++i) sum += at[i] * (2 * static_cast<unsigned long long>(i) + 1);
    memcpy(touchable(out), &sum, sizeof sum);
  });
}

}  // extern "C"
