// Collectives of the stand-in device, between processes of one host: simple and slow, through a file in shared memory.
// Each runs in its stream, so it is as late as on a GPU: the rank writes its part, meets the others, and reads theirs.
#pragma once
#include <fcntl.h>

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
  char *mine() { return part(rank); }

  // Waits until every rank has come here as often as this one.
  void meet() {
    using std::chrono::steady_clock;
    expected += ranks;
    ++*arrived;
    auto deadline = steady_clock::now() + std::chrono::seconds(setting("STANDIN_CCL_SECONDS", 60));
    while (*arrived < expected) {
      if (steady_clock::now() > deadline) give_up("rank " + std::to_string(rank) + " waited in vain for the others");
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
void reduce_one(C_CCLReduceOp op, char *into, const char *from, size_t number, size_t ranks, bool last) {
  T *to = reinterpret_cast<T *>(into);
  const T *other = reinterpret_cast<const T *>(from);
  for (size_t i = 0; i < number; ++i) {
    switch (op) {
      case MAX: to[i] = to[i] < other[i] ? other[i] : to[i]; break;
      case MIN: to[i] = other[i] < to[i] ? other[i] : to[i]; break;
      case PRODUCT: to[i] = static_cast<T>(to[i] * other[i]); break;
      default: to[i] = static_cast<T>(to[i] + other[i]);
    }
    if (op == AVG && last) to[i] = static_cast<T>(to[i] / static_cast<T>(ranks));
  }
}

// Reduces the parts of all ranks, each from `offset` on, in the order of the ranks.
void reduce(Group *group, char *into, size_t offset, size_t number, C_DataType type, C_CCLReduceOp op) {
  memcpy(into, group->part(0) + offset, number * bytes_of(type));
  for (size_t rank = 1; rank < group->ranks; ++rank) {
    const char *from = group->part(rank) + offset;
    bool last = rank + 1 == group->ranks;
    switch (type) {
      case FLOAT32: reduce_one<float>(op, into, from, number, group->ranks, last); break;
      case FLOAT64: reduce_one<double>(op, into, from, number, group->ranks, last); break;
      case INT32: reduce_one<int32_t>(op, into, from, number, group->ranks, last); break;
      case INT64: reduce_one<int64_t>(op, into, from, number, group->ranks, last); break;
      case UINT8: case BOOL: reduce_one<uint8_t>(op, into, from, number, group->ranks, last); break;
      default: give_up("cannot reduce type " + std::to_string(type));
    }
  }
}

// Runs a collective in a stream: between `write` and `read` all ranks meet, and once more before the parts are reused.
C_Status exchange(C_CCLComm comm, C_Stream stream, size_t bytes, std::function<void(Group *)> write,
                  std::function<void(Group *)> read) {
  count(COLLECTIVE, bytes);
  if (bytes > kPart) give_up("a collective of " + std::to_string(bytes) + " bytes is too large");
  Group *group = of(comm);
  return in(stream, [=] {
    write(group);
    group->meet();
    read(group);
    group->meet();
  });
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
  return exchange(
      comm, stream, bytes, [=](Group *g) { memcpy(g->mine(), device_view(from), bytes); },
      [=](Group *g) { reduce(g, device_view(to), 0, number, type, op); });
}
C_Status reduce_to(void *from, void *to, size_t number, C_DataType type, C_CCLReduceOp op, size_t root, C_CCLComm comm,
                   C_Stream stream) {
  size_t bytes = number * bytes_of(type);
  return exchange(
      comm, stream, bytes, [=](Group *g) { memcpy(g->mine(), device_view(from), bytes); },
      [=](Group *g) {
        if (g->rank == root) reduce(g, device_view(to), 0, number, type, op);
      });
}
C_Status broadcast(void *at, size_t number, C_DataType type, size_t root, C_CCLComm comm, C_Stream stream) {
  size_t bytes = number * bytes_of(type);
  return exchange(
      comm, stream, bytes,
      [=](Group *g) {
        if (g->rank == root) memcpy(g->mine(), device_view(at), bytes);
      },
      [=](Group *g) {
        if (g->rank != root) memcpy(device_view(at), g->part(root), bytes);
      });
}
// It has ended when it returns: Paddle splits what was gathered by a kernel in this stream, and a device without kernels
// does that on the host, which waits for no stream.
C_Status all_gather(void *from, void *to, size_t number, C_DataType type, C_CCLComm comm, C_Stream stream) {
  size_t bytes = number * bytes_of(type);
  C_Status status = exchange(
      comm, stream, bytes, [=](Group *g) { memcpy(g->mine(), device_view(from), bytes); },
      [=](Group *g) {
        for (size_t rank = 0; rank < g->ranks; ++rank) memcpy(device_view(to) + rank * bytes, g->part(rank), bytes);
      });
  if (stream != nullptr) of(stream)->wait();
  return status;
}
C_Status reduce_scatter(void *from, void *to, size_t number, C_DataType type, C_CCLReduceOp op, C_CCLComm comm,
                        C_Stream stream) {
  size_t bytes = number * bytes_of(type);
  return exchange(
      comm, stream, bytes * of(comm)->ranks, [=](Group *g) { memcpy(g->mine(), device_view(from), bytes * g->ranks); },
      [=](Group *g) { reduce(g, device_view(to), g->rank * bytes, number, type, op); });
}

void collectives_into(C_DeviceInterface *api) {
  api->xccl_get_comm_name = ccl_name;
  api->xccl_get_unique_id_size = ccl_id_size;
  api->xccl_get_unique_id = ccl_id;
  api->xccl_comm_init_rank = ccl_begin;
  api->xccl_destroy_comm = ccl_end;
  api->xccl_all_reduce = all_reduce;
  api->xccl_reduce = reduce_to;
  api->xccl_broadcast = broadcast;
  api->xccl_all_gather = all_gather;
  api->xccl_reduce_scatter = reduce_scatter;
  api->xccl_group_start = nothing;
  api->xccl_group_end = nothing;
}

}  // namespace
