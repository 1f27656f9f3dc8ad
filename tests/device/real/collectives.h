// Collectives between processes of one host: simple and slow, through a file in shared memory. NCCL is not used.
// Each runs in its stream, so it is as late as NCCL's: the rank's part is copied to the host, a host function exchanges it
// with the other ranks, and the result is copied back.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>

#include <functional>
#include <memory>
#include <thread>

namespace {

constexpr size_t kPart = 64 << 20;  // most bytes of a rank in one call; the file is sparse

[[noreturn]] void give_up(const std::string &why) {
  fprintf(stderr, "standin: %s\n", why.c_str());
  _exit(86);
}

struct Group {
  size_t ranks, rank;
  std::atomic<uint64_t> *arrived;
  char *parts;
  uint64_t expected = 0;

  char *part(size_t of_rank) { return parts + of_rank * kPart; }

  // Waits until every rank has arrived here as often as this one.
  void meet() {
    using std::chrono::steady_clock;
    expected += ranks;
    ++*arrived;
    auto deadline = steady_clock::now() + std::chrono::seconds(setting("STANDIN_CCL_SECONDS", 60));
    while (*arrived < expected) {
      if (steady_clock::now() > deadline) give_up("rank " + std::to_string(rank) + " timed out waiting for the others");
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
};

Group *of(C_CCLComm comm) { return reinterpret_cast<Group *>(comm); }

size_t bytes_of(C_DataType type) {
  switch (type) {
    case BOOL: case UINT8: case INT8: return 1;
    case UINT16: case INT16: case FLOAT16: case BFLOAT16: return 2;
    case UINT32: case INT32: case FLOAT32: return 4;
    case COMPLEX128: return 16;
    default: return 8;
  }
}

template <typename T>
void reduce_into(C_CCLReduceOp op, char *into, const char *from, size_t number) {
  T *to = reinterpret_cast<T *>(into);
  const T *other = reinterpret_cast<const T *>(from);
  for (size_t i = 0; i < number; ++i) {
    switch (op) {
      case SUM: to[i] = static_cast<T>(to[i] + other[i]); break;
      case MAX: to[i] = std::max(to[i], other[i]); break;
      case MIN: to[i] = std::min(to[i], other[i]); break;
      default: give_up("cannot reduce by operation " + std::to_string(op));
    }
  }
}

// Reduces the parts of all ranks, in the order of the ranks.
void reduce(Group *group, char *into, size_t number, C_DataType type, C_CCLReduceOp op) {
  memcpy(into, group->part(0), number * bytes_of(type));
  for (size_t rank = 1; rank < group->ranks; ++rank) {
    const char *from = group->part(rank);
    switch (type) {
      case FLOAT32: reduce_into<float>(op, into, from, number); break;
      case FLOAT64: reduce_into<double>(op, into, from, number); break;
      case INT32: reduce_into<int32_t>(op, into, from, number); break;
      case INT64: reduce_into<int64_t>(op, into, from, number); break;
      default: give_up("cannot reduce type " + std::to_string(type));
    }
  }
}

struct Exchange {
  Group *group;
  size_t bytes;
  char *block;  // the rank's part, then the result
  std::function<void(Group *, char *)> read;
};
void run_exchange(void *data) {
  std::unique_ptr<Exchange> exchange(static_cast<Exchange *>(data));
  Group *group = exchange->group;
  memcpy(group->part(group->rank), exchange->block, exchange->bytes);
  group->meet();
  exchange->read(group, exchange->block);
  group->meet();  // before the parts are reused
}
void give_back(void *block) { pinned_give(block); }

// Queues a collective: `read` makes the result, of `result` bytes, from the parts of all ranks, of `bytes` bytes each.
C_Status exchange(C_CCLComm comm, C_Stream stream, const void *from, size_t bytes, void *to, size_t result,
                  std::function<void(Group *, char *)> read) {
  count(COLLECTIVE, bytes);
  ON(nullptr);
  if (bytes > kPart) give_up("a collective of " + std::to_string(bytes) + " bytes is too large");
  void *block = pinned_take(std::max(bytes, result));
  if (block == nullptr) return C_FAILED;
  auto *queued = new Exchange{of(comm), bytes, static_cast<char *>(block), read};
  MUST(cudaMemcpyAsync(block, from, bytes, cudaMemcpyDeviceToHost, of(stream)));
  MUST(cudaLaunchHostFunc(of(stream), run_exchange, queued));
  MUST(cudaMemcpyAsync(to, block, result, cudaMemcpyHostToDevice, of(stream)));
  MUST(cudaLaunchHostFunc(of(stream), give_back, block));
  return C_SUCCESS;
}

struct Id {
  char path[64];
};

C_Status ccl_name(C_CCLComm, char *name) {
  strcpy(name, "standin");
  return C_SUCCESS;
}
C_Status ccl_id_size(size_t *size) {
  *size = sizeof(Id);
  return C_SUCCESS;
}
C_Status ccl_id(C_CCLRootId *id) {
  static std::atomic<int> made{0};
  snprintf(static_cast<Id *>(id->data)->path, sizeof(Id), "/dev/shm/standin-%d-%d", getpid(), made++);
  id->sz = sizeof(Id);
  return C_SUCCESS;
}
C_Status ccl_begin(size_t ranks, C_CCLRootId *id, size_t rank, C_CCLComm *out) {
  constexpr size_t kHead = 4096;
  const char *path = static_cast<Id *>(id->data)->path;
  size_t whole = kHead + ranks * kPart;
  int file = open(path, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, static_cast<off_t>(whole)) != 0) return C_FAILED;
  void *at = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (at == MAP_FAILED) return C_FAILED;
  auto *group = new Group{ranks, rank, static_cast<std::atomic<uint64_t> *>(at), static_cast<char *>(at) + kHead};
  group->meet();
  if (rank == 0) unlink(path);
  *out = reinterpret_cast<C_CCLComm>(group);
  return C_SUCCESS;
}
C_Status ccl_end(C_CCLComm) { return C_SUCCESS; }

C_Status all_reduce(void *from, void *to, size_t number, C_DataType type, C_CCLReduceOp op, C_CCLComm comm, C_Stream stream) {
  size_t bytes = number * bytes_of(type);
  return exchange(comm, stream, from, bytes, to, bytes,
                  [=](Group *group, char *into) { reduce(group, into, number, type, op); });
}
C_Status broadcast(void *at, size_t number, C_DataType type, size_t root, C_CCLComm comm, C_Stream stream) {
  size_t bytes = number * bytes_of(type);
  return exchange(comm, stream, at, bytes, at, bytes,
                  [=](Group *group, char *into) { memcpy(into, group->part(root), bytes); });
}
// It has ended when it returns: Paddle splits what was gathered by a kernel in this stream, and a device without kernels
// does that on the host, which waits for no stream.
C_Status all_gather(void *from, void *to, size_t number, C_DataType type, C_CCLComm comm, C_Stream stream) {
  size_t bytes = number * bytes_of(type);
  C_Status status = exchange(comm, stream, from, bytes, to, bytes * of(comm)->ranks, [=](Group *group, char *into) {
    for (size_t rank = 0; rank < group->ranks; ++rank) memcpy(into + rank * bytes, group->part(rank), bytes);
  });
  MUST(cudaStreamSynchronize(of(stream)));
  return status;
}

void collectives_into(C_DeviceInterface *api) {
  api->xccl_get_comm_name = ccl_name;
  api->xccl_get_unique_id_size = ccl_id_size;
  api->xccl_get_unique_id = ccl_id;
  api->xccl_comm_init_rank = ccl_begin;
  api->xccl_destroy_comm = ccl_end;
  api->xccl_all_reduce = all_reduce;
  api->xccl_broadcast = broadcast;
  api->xccl_all_gather = all_gather;
  api->xccl_group_start = nothing;
  api->xccl_group_end = nothing;
}

}  // namespace
