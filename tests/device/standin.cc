// "standin": a device for Paddle's pluggable-device interface that stands in for a GPU where there is none.
//
// It has memory, streams, events, copies and collectives, and no kernels: Paddle runs each operator on the CPU and moves
// the operands with the copies below. What a GPU does, and plain memory would hide, it does too:
//  * A stream is a queue with a thread of its own. An asynchronous copy happens later, so that a host buffer that is
//    freed or reused too early gives wrong numbers.
//  * With STANDIN_GUARD=1 the addresses that Paddle is given cannot be read or written by the host.
//  * Every copy and synchronisation is counted, by kind and by thread. Tests read the counters through ctypes.
//
// Settings (environment): STANDIN_DEVICES (2), STANDIN_MEMORY_MB (1024), STANDIN_GUARD (0), STANDIN_COPY_US (0, what
// each copy takes longer), STANDIN_CCL_SECONDS (60).
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "paddle/phi/backends/device_ext.h"

namespace {

long setting(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text != nullptr && *text != 0 ? atol(text) : otherwise;
}

const size_t kDevices = static_cast<size_t>(setting("STANDIN_DEVICES", 2));
const size_t kMemory = static_cast<size_t>(setting("STANDIN_MEMORY_MB", 1024)) << 20;
const bool kGuarded = setting("STANDIN_GUARD", 0) != 0;
const auto kCopyTakes = std::chrono::microseconds(setting("STANDIN_COPY_US", 0));

// ---- counters ----------------------------------------------------------------------------------------------------------

enum What { H2D, D2H, D2D, H2D_ASYNC, D2H_ASYNC, D2D_ASYNC, SYNC_DEVICE, SYNC_STREAM, SYNC_EVENT, COLLECTIVE, WHATS };
const char *const kNames[WHATS] = {"h2d",       "d2h",         "d2d",         "h2d_async",  "d2h_async",
                                   "d2d_async", "sync_device", "sync_stream", "sync_event", "collective"};
struct Count {
  std::atomic<long> calls{0}, bytes{0}, on_main{0};
};
Count counts[WHATS];

void count(What what, size_t bytes = 0) {
  counts[what].calls++;
  counts[what].bytes += static_cast<long>(bytes);
  if (syscall(SYS_gettid) == getpid()) counts[what].on_main++;
}

// ---- memory ------------------------------------------------------------------------------------------------------------

struct Block {
  char *device_view;  // the only addresses through which guarded memory can be touched
  size_t size;
};
// Never destroyed, as the streams below: at exit, other threads may still use them.
auto &blocks_lock = *new std::mutex;
auto &blocks = *new std::map<char *, Block>;  // by the address that Paddle knows
std::atomic<size_t> allocated{0};

char *device_view(const void *address) {
  char *at = static_cast<char *>(const_cast<void *>(address));
  if (!kGuarded) return at;
  std::lock_guard<std::mutex> hold(blocks_lock);
  auto next = blocks.upper_bound(at);
  if (next == blocks.begin()) return at;  // host memory
  auto &[start, block] = *std::prev(next);
  return at < start + block.size ? block.device_view + (at - start) : at;
}

void say_who_touched(int, siginfo_t *info, void *) {
  char *at = static_cast<char *>(info->si_addr);
  for (auto &[start, block] : blocks) {  // without the lock: the process is about to end
    if (at >= start && at < start + block.size) {
      const char text[] = "standin: the host touched device memory\n";
      if (write(2, text, sizeof text - 1) < 0) break;
    }
  }
  signal(SIGSEGV, SIG_DFL);
  raise(SIGSEGV);
}

C_Status allocate(const C_Device, void **out, size_t size) {
  *out = nullptr;
  if (allocated + size > kMemory) return C_FAILED;
  char *view = nullptr;
  if (kGuarded) {
    size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), whole = (size + page - 1) / page * page;
    int file = static_cast<int>(syscall(SYS_memfd_create, "standin", 0));
    if (file < 0 || ftruncate(file, static_cast<off_t>(whole)) != 0) return C_FAILED;
    void *shown = mmap(nullptr, whole, PROT_NONE, MAP_SHARED, file, 0);
    void *hidden = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (shown == MAP_FAILED || hidden == MAP_FAILED) return C_FAILED;
    view = static_cast<char *>(hidden);
    std::lock_guard<std::mutex> hold(blocks_lock);
    blocks[static_cast<char *>(shown)] = Block{view, whole};
    *out = shown;
  } else {
    if (posix_memalign(out, 256, size ? size : 1) != 0) return C_FAILED;
    view = static_cast<char *>(*out);
  }
  memset(view, 0xA5, size);  // so that memory that was never written is seen
  allocated += size;
  return C_SUCCESS;
}

C_Status release(const C_Device, void *at, size_t size) {
  if (kGuarded) {
    std::lock_guard<std::mutex> hold(blocks_lock);
    auto found = blocks.find(static_cast<char *>(at));
    if (found == blocks.end()) return C_ERROR;
    munmap(found->second.device_view, found->second.size);
    munmap(found->first, found->second.size);
    blocks.erase(found);
  } else {
    free(at);
  }
  allocated -= size;
  return C_SUCCESS;
}

C_Status fill(const C_Device, void *at, unsigned char value, size_t size) {
  memset(device_view(at), value, size);
  return C_SUCCESS;
}
C_Status host_allocate(const C_Device, void **out, size_t size) {
  return posix_memalign(out, 4096, size ? size : 1) == 0 ? C_SUCCESS : C_FAILED;
}
C_Status host_release(const C_Device, void *at, size_t) {
  free(at);
  return C_SUCCESS;
}

// ---- streams and events ------------------------------------------------------------------------------------------------

class Stream {
 public:
  Stream() : thread_([this] { run(); }) { pthread_setname_np(thread_.native_handle(), "standin-stream"); }
  ~Stream() {
    wait();
    {
      std::lock_guard<std::mutex> hold(lock_);
      over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void put(std::function<void()> job) {
    {
      std::lock_guard<std::mutex> hold(lock_);
      jobs_.push_back(std::move(job));
      left_++;
    }
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

 private:
  void run() {
    std::unique_lock<std::mutex> hold(lock_);
    for (;;) {
      changed_.wait(hold, [this] { return over_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
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
  size_t left_ = 0;  // jobs that were put and have not ended
  bool over_ = false;
  std::thread thread_;
};

class Moment {  // one recording of an event
 public:
  void pass() {
    {
      std::lock_guard<std::mutex> hold(lock_);
      passed_ = true;
    }
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> hold(lock_);
    changed_.wait(hold, [this] { return passed_; });
  }
  bool passed() {
    std::lock_guard<std::mutex> hold(lock_);
    return passed_;
  }

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  bool passed_ = false;
};

struct Event {
  std::mutex lock;
  std::shared_ptr<Moment> newest;
  std::shared_ptr<Moment> get() {
    std::lock_guard<std::mutex> hold(lock);
    return newest;
  }
};

auto &streams_lock = *new std::mutex;
auto &streams = *new std::map<Stream *, std::unique_ptr<Stream>>;

Stream *of(C_Stream stream) { return reinterpret_cast<Stream *>(stream); }
Event *of(C_Event event) { return reinterpret_cast<Event *>(event); }

// Runs a job in a stream; at once in the null stream.
C_Status in(C_Stream stream, std::function<void()> job) {
  if (stream != nullptr)
    of(stream)->put(std::move(job));
  else
    job();
  return C_SUCCESS;
}

C_Status stream_make(const C_Device, C_Stream *out) {
  auto made = std::make_unique<Stream>();
  *out = reinterpret_cast<C_Stream>(made.get());
  std::lock_guard<std::mutex> hold(streams_lock);
  streams[made.get()] = std::move(made);
  return C_SUCCESS;
}
C_Status stream_end(const C_Device, C_Stream stream) {
  std::unique_ptr<Stream> gone;
  {
    std::lock_guard<std::mutex> hold(streams_lock);
    auto found = streams.find(of(stream));
    if (found == streams.end()) return C_SUCCESS;
    gone = std::move(found->second);
    streams.erase(found);
  }
  return C_SUCCESS;  // `gone` waits for its jobs, without the lock
}
C_Status stream_query(const C_Device, C_Stream stream) {
  return stream == nullptr || of(stream)->idle() ? C_SUCCESS : C_FAILED;
}
C_Status stream_sync(const C_Device, C_Stream stream) {
  count(SYNC_STREAM);
  if (stream != nullptr) of(stream)->wait();
  return C_SUCCESS;
}
C_Status device_sync(const C_Device) {
  count(SYNC_DEVICE);
  std::lock_guard<std::mutex> hold(streams_lock);
  for (auto &[stream, owner] : streams) stream->wait();
  return C_SUCCESS;
}
C_Status stream_callback(const C_Device device, C_Stream stream, C_Callback call, void *data) {
  return in(stream, [=] {
    C_Status status = C_SUCCESS;
    call(device, stream, data, &status);
  });
}
C_Status event_make(const C_Device, C_Event *out) {
  *out = reinterpret_cast<C_Event>(new Event);
  return C_SUCCESS;
}
C_Status event_end(const C_Device, C_Event event) {
  delete of(event);
  return C_SUCCESS;
}
C_Status event_record(const C_Device, C_Stream stream, C_Event event) {
  auto moment = std::make_shared<Moment>();
  {
    std::lock_guard<std::mutex> hold(of(event)->lock);
    of(event)->newest = moment;
  }
  return in(stream, [moment] { moment->pass(); });
}
C_Status event_query(const C_Device, C_Event event) {
  auto moment = of(event)->get();
  return moment == nullptr || moment->passed() ? C_SUCCESS : C_FAILED;
}
C_Status event_sync(const C_Device, C_Event event) {
  count(SYNC_EVENT);
  if (auto moment = of(event)->get()) moment->wait();
  return C_SUCCESS;
}
C_Status stream_waits(const C_Device, C_Stream stream, C_Event event) {
  auto moment = of(event)->get();
  return moment == nullptr ? C_SUCCESS : in(stream, [moment] { moment->wait(); });
}

// ---- copies ------------------------------------------------------------------------------------------------------------

void move(void *to, const void *from, size_t size) {
  if (kCopyTakes.count() != 0) std::this_thread::sleep_for(kCopyTakes);
  memcpy(device_view(to), device_view(from), size);
}
// A blocking copy waits for itself only, not for the streams, as with a GPU's non-blocking streams.
template <What what>
C_Status copy(const C_Device, void *to, const void *from, size_t size) {
  count(what, size);
  move(to, from, size);
  return C_SUCCESS;
}
template <What what>
C_Status copy_async(const C_Device, C_Stream stream, void *to, const void *from, size_t size) {
  count(what, size);
  return in(stream, [=] { move(to, from, size); });
}
C_Status copy_peer(const C_Device, const C_Device, void *to, const void *from, size_t size) {
  return copy<D2D>(nullptr, to, from, size);
}
C_Status copy_peer_async(const C_Device, const C_Device, C_Stream stream, void *to, const void *from, size_t size) {
  return copy_async<D2D_ASYNC>(nullptr, stream, to, from, size);
}

// ---- the device --------------------------------------------------------------------------------------------------------

thread_local int current = 0;  // as CUDA has it: one for each thread of the host

C_Status start() {
  if (!kGuarded) return C_SUCCESS;
  struct sigaction action = {};
  action.sa_sigaction = say_who_touched;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
  return C_SUCCESS;
}
C_Status nothing() { return C_SUCCESS; }
C_Status nothing_for(const C_Device) { return C_SUCCESS; }
C_Status set_device(const C_Device device) {
  current = device->id;
  return C_SUCCESS;
}
C_Status get_device(const C_Device device) {
  device->id = current;
  return C_SUCCESS;
}
C_Status device_count(size_t *number) {
  *number = kDevices;
  return C_SUCCESS;
}
C_Status device_list(size_t *list) {
  for (size_t device = 0; device < kDevices; ++device) list[device] = device;
  return C_SUCCESS;
}
C_Status memory_stats(const C_Device, size_t *total, size_t *unused) {
  *total = kMemory;
  *unused = kMemory - allocated;
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
C_Status version(const C_Device, size_t *number) {
  *number = 1;
  return C_SUCCESS;
}

}  // namespace

#include "standin_collectives.h"

static std::shared_ptr<Moment> &newest_gate() {
  static auto &gate = *new std::shared_ptr<Moment>;
  return gate;
}

#define EXPORTED extern "C" __attribute__((visibility("default")))

// For tests, through ctypes. A stream is `paddle.device.current_stream(...).stream_base.raw_stream`.

// Queues work that takes so many microseconds, as if a model's kernels ran in the stream. Nobody waits for it.
EXPORTED void standin_work(void *stream, long us) {
  in(static_cast<C_Stream>(stream), [us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); });
}
// Queues work that ends only when `standin_open` is called.
EXPORTED void standin_close(void *stream) {
  auto gate = std::make_shared<Moment>();
  newest_gate() = gate;
  in(static_cast<C_Stream>(stream), [gate] { gate->wait(); });
}
EXPORTED void standin_open() { newest_gate()->pass(); }
EXPORTED void standin_wait(void *stream) {
  if (stream != nullptr) of(static_cast<C_Stream>(stream))->wait();
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
  api.get_runtime_version = version;
  api.get_driver_version = version;

  collectives_into(&api);
}
