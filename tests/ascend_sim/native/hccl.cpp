// libhccl over POSIX shared memory of one host. Collectives are work of their stream; sums run in rank order.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <string>
#include <vector>

#include "acl/acl.h"
#include "hccl/hccl.h"
#include "hccl/hccl_types.h"
#include "queue.h"

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t kSlot = 4u << 20;   // bytes that a rank shows to all others at once
constexpr size_t kBox = 256u << 10;  // bytes on their way from one rank to another
constexpr uint32_t kMaxRanks = 64;
constexpr int kTimeout = 507048;  // what the stream reports when another rank does not come

struct Box {
  std::atomic<uint32_t> full;
  uint64_t size;
};

struct Control {
  std::atomic<uint32_t> joined, count, phase;
  Box boxes[kMaxRanks][kMaxRanks];  // [from][to]
};

struct Comm {
  uint32_t size, rank;
  Control* control;
  char* slots;
  uint32_t phase = 0;
  std::string name;
  std::atomic<int> error{0};

  char* slot(uint32_t owner) { return slots + kSlot * owner; }
  char* box(uint32_t from, uint32_t to) { return slots + kSlot * size + (size_t(from) * size + to) * kBox; }
};

size_t shared_size(uint32_t size) { return sizeof(Control) + kSlot * size + size_t(size) * size * kBox; }

using Clock = std::chrono::steady_clock;

Clock::time_point deadline() {
  const char* seconds = getenv("HCCL_EXEC_TIMEOUT");
  return Clock::now() + std::chrono::milliseconds(int64_t(1000 * (seconds ? atof(seconds) : 60)));
}

template <class Condition>
int until(Condition condition) {
  const auto end = deadline();
  for (long turn = 0; !condition(); turn++)
    if (turn > 2000) {
      usleep(50);
      if (Clock::now() > end) return kTimeout;
    }
  return 0;
}

int barrier(Comm& comm) {
  const uint32_t phase = comm.phase ^= 1;
  if (comm.control->count.fetch_add(1) + 1 == comm.size) {
    comm.control->count = 0;
    comm.control->phase = phase;
    return 0;
  }
  return until([&] { return comm.control->phase == phase; });
}

size_t width(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8:
    case HCCL_DATA_TYPE_FP8E4M3:
    case HCCL_DATA_TYPE_FP8E5M2:
    case HCCL_DATA_TYPE_FP8E8M0:
      return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16:
      return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32:
      return 4;
    default:
      return 8;
  }
}

// ---- sums

float widen(uint16_t bits) {
  uint32_t word = uint32_t(bits) << 16;
  float value;
  memcpy(&value, &word, 4);
  return value;
}

uint16_t narrow(float value) {
  uint32_t word;
  memcpy(&word, &value, 4);
  if ((word & 0x7fffffff) > 0x7f800000) return (word >> 16) | 64;
  return (word + 0x7fff + ((word >> 16) & 1)) >> 16;
}

template <class T>
void fold(T* total, const T* part, size_t count, HcclReduceOp op) {
  for (size_t i = 0; i < count; i++) {
    const T a = total[i], b = part[i];
    total[i] = op == HCCL_REDUCE_SUM ? a + b : op == HCCL_REDUCE_PROD ? a * b : op == HCCL_REDUCE_MAX ? (a > b ? a : b)
                                                                                                : (a < b ? a : b);
  }
}

int reduce(void* total, const void* part, size_t count, HcclDataType type, HcclReduceOp op) {
  switch (type) {
    case HCCL_DATA_TYPE_FP32:
      return fold((float*)total, (const float*)part, count, op), 0;
    case HCCL_DATA_TYPE_FP64:
      return fold((double*)total, (const double*)part, count, op), 0;
    case HCCL_DATA_TYPE_INT32:
      return fold((int32_t*)total, (const int32_t*)part, count, op), 0;
    case HCCL_DATA_TYPE_INT64:
      return fold((int64_t*)total, (const int64_t*)part, count, op), 0;
    case HCCL_DATA_TYPE_UINT8:
      return fold((uint8_t*)total, (const uint8_t*)part, count, op), 0;
    case HCCL_DATA_TYPE_INT8:
      return fold((int8_t*)total, (const int8_t*)part, count, op), 0;
    case HCCL_DATA_TYPE_BFP16: {
      auto* sums = (uint16_t*)total;
      auto* parts = (const uint16_t*)part;
      for (size_t i = 0; i < count; i++) {
        float value = widen(sums[i]);
        const float other = widen(parts[i]);
        fold(&value, &other, 1, op);
        sums[i] = narrow(value);
      }
      return 0;
    }
    default:
      return HCCL_E_NOT_SUPPORT;
  }
}

// ---- collectives, each run by a stream's worker

#define TRY(expression) \
  if (int code_ = (expression)) return code_

int all_reduce(Comm& comm, const char* in, char* out, size_t count, HcclDataType type, HcclReduceOp op) {
  const size_t size = width(type), most = kSlot / size;
  for (size_t start = 0; start < count; start += most) {
    const size_t part = std::min(most, count - start);
    memcpy(comm.slot(comm.rank), in + start * size, part * size);
    TRY(barrier(comm));
    std::vector<char> total(comm.slot(0), comm.slot(0) + part * size);
    for (uint32_t rank = 1; rank < comm.size; rank++) TRY(reduce(total.data(), comm.slot(rank), part, type, op));
    memcpy(out + start * size, total.data(), part * size);
    TRY(barrier(comm));
  }
  return 0;
}

int all_gather(Comm& comm, const char* in, char* out, size_t bytes) {
  for (size_t start = 0; start < bytes; start += kSlot) {
    const size_t part = std::min(kSlot, bytes - start);
    memcpy(comm.slot(comm.rank), in + start, part);
    TRY(barrier(comm));
    for (uint32_t rank = 0; rank < comm.size; rank++) memcpy(out + rank * bytes + start, comm.slot(rank), part);
    TRY(barrier(comm));
  }
  return 0;
}

int broadcast(Comm& comm, char* buffer, size_t bytes, uint32_t root) {
  for (size_t start = 0; start < bytes; start += kSlot) {
    const size_t part = std::min(kSlot, bytes - start);
    if (comm.rank == root) memcpy(comm.slot(root), buffer + start, part);
    TRY(barrier(comm));
    if (comm.rank != root) memcpy(buffer + start, comm.slot(root), part);
    TRY(barrier(comm));
  }
  return 0;
}

struct Message {
  char* data;
  size_t size = 0, moved = 0;
};

// Moves at most one box per pair and turn, sends and receives alike, so sizes may differ and nothing blocks.
int exchange(Comm& comm, std::vector<Message> sends, std::vector<Message> receives) {
  const uint32_t me = comm.rank;
  if (sends[me].size != receives[me].size) return HCCL_E_PARA;
  if (sends[me].size) memmove(receives[me].data, sends[me].data, sends[me].size);
  sends[me].moved = receives[me].moved = sends[me].size;
  const auto end = deadline();
  while (true) {
    bool left = false, moved = false;
    for (uint32_t peer = 0; peer < comm.size; peer++) {
      Message &send = sends[peer], &receive = receives[peer];
      if (send.moved < send.size) {
        left = true;
        Box& box = comm.control->boxes[me][peer];
        if (!box.full) {
          const size_t part = std::min(kBox, send.size - send.moved);
          memcpy(comm.box(me, peer), send.data + send.moved, part);
          box.size = part;
          box.full = 1;
          send.moved += part;
          moved = true;
        }
      }
      if (receive.moved < receive.size) {
        left = true;
        Box& box = comm.control->boxes[peer][me];
        if (box.full) {
          if (box.size > receive.size - receive.moved) return HCCL_E_PARA;
          memcpy(receive.data + receive.moved, comm.box(peer, me), box.size);
          receive.moved += box.size;
          box.full = 0;
          moved = true;
        }
      }
    }
    if (!left) return 0;
    if (!moved) {
      usleep(20);
      if (Clock::now() > end) return kTimeout;
    }
  }
}

// Hand a collective to its stream. Capture is refused: what HCCL would record is not modelled.
HcclResult launch(HcclComm handle, aclrtStream stream, std::function<int(Comm&)> run) {
  if (sim_capturing(stream)) return HCCL_E_NOT_SUPPORT;
  auto* comm = (Comm*)handle;
  const int code = sim_enqueue(stream, [comm, run] {
    const int error = run(*comm);
    if (error) comm->error = error == kTimeout ? HCCL_E_TIMEOUT : HCCL_E_INTERNAL;
    return error;
  });
  return code ? HCCL_E_RUNTIME : HCCL_SUCCESS;
}

HcclResult join(uint32_t size, const char* name, uint32_t rank, HcclComm* out) {
  if (size > kMaxRanks) return HCCL_E_PARA;
  const int file = shm_open(name, O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, shared_size(size))) return HCCL_E_SYSCALL;
  void* memory = mmap(nullptr, shared_size(size), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return HCCL_E_MEMORY;
  auto* comm = new Comm{size, rank, (Control*)memory, (char*)memory + sizeof(Control)};
  comm->name = std::string("sim") + (name + 1);
  comm->control->joined++;
  if (until([&] { return comm->control->joined >= size; })) return HCCL_E_TIMEOUT;
  if (barrier(*comm)) return HCCL_E_TIMEOUT;
  if (rank == 0) shm_unlink(name);
  *out = comm;
  return HCCL_SUCCESS;
}

}  // namespace

API HcclResult HcclGetRootInfo(HcclRootInfo* info) {
  static int made;
  memset(info, 0, sizeof *info);
  const long now = Clock::now().time_since_epoch().count();
  snprintf((char*)info, 64, "/simhccl-%d-%d-%ld", getpid(), made++, now);
  return HCCL_SUCCESS;
}
API HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo* info, uint32_t rank, HcclComm* out) {
  return join(size, (const char*)info, rank, out);
}
API HcclResult HcclCommInitRootInfoConfig(
    uint32_t size, const HcclRootInfo* info, uint32_t rank, const HcclCommConfig*, HcclComm* out) {
  return join(size, (const char*)info, rank, out);
}
API HcclResult HcclCommDestroy(HcclComm handle) {
  auto* comm = (Comm*)handle;
  munmap(comm->control, shared_size(comm->size));
  delete comm;
  return HCCL_SUCCESS;
}
API HcclResult HcclGetCommName(HcclComm comm, char* name) {
  strcpy(name, ((Comm*)comm)->name.c_str());
  return HCCL_SUCCESS;
}
API HcclResult HcclGetRankSize(HcclComm comm, uint32_t* size) {
  *size = ((Comm*)comm)->size;
  return HCCL_SUCCESS;
}
API HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) {
  *rank = ((Comm*)comm)->rank;
  return HCCL_SUCCESS;
}
API HcclResult HcclGetCommAsyncError(HcclComm comm, HcclResult* error) {
  *error = (HcclResult)((Comm*)comm)->error.load();
  return HCCL_SUCCESS;
}
API const char* HcclGetErrorString(HcclResult error) {
  thread_local char text[48];
  snprintf(text, sizeof text, "simulated HCCL error %d", (int)error);
  return text;
}
API uint32_t HcclGetCommConfigCapability(void) { return HCCL_COMM_CONFIG_COMM_NAME + 1; }
API HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }
API HcclResult HcclGroupStart(void) { return HCCL_SUCCESS; }
API HcclResult HcclGroupEnd(void) { return HCCL_SUCCESS; }

API HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
  return launch(comm, stream, [](Comm& comm) { return barrier(comm); });
}
API HcclResult HcclAllReduce(
    void* in, void* out, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  return launch(comm, stream, [=](Comm& comm) { return all_reduce(comm, (char*)in, (char*)out, count, type, op); });
}
API HcclResult HcclReduce(
    void* in, void* out, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root, HcclComm comm,
    aclrtStream stream) {
  return launch(comm, stream, [=](Comm& comm) {
    std::vector<char> total(count * width(type));
    TRY(all_reduce(comm, (char*)in, total.data(), count, type, op));
    if (comm.rank == root) memcpy(out, total.data(), total.size());
    return 0;
  });
}
API HcclResult HcclReduceScatter(
    void* in, void* out, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  return launch(comm, stream, [=](Comm& comm) {
    const size_t bytes = count * width(type);
    std::vector<char> total(bytes * comm.size);
    TRY(all_reduce(comm, (char*)in, total.data(), count * comm.size, type, op));
    memcpy(out, total.data() + bytes * comm.rank, bytes);
    return 0;
  });
}
API HcclResult HcclBroadcast(
    void* buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, aclrtStream stream) {
  return launch(comm, stream, [=](Comm& comm) { return broadcast(comm, (char*)buffer, count * width(type), root); });
}
API HcclResult HcclAllGather(
    void* in, void* out, uint64_t count, HcclDataType type, HcclComm comm, aclrtStream stream) {
  return launch(comm, stream, [=](Comm& comm) { return all_gather(comm, (char*)in, (char*)out, count * width(type)); });
}
API HcclResult HcclSend(
    void* buffer, uint64_t count, HcclDataType type, uint32_t target, HcclComm comm, aclrtStream stream) {
  return launch(comm, stream, [=](Comm& comm) {
    std::vector<Message> sends(comm.size), receives(comm.size);
    sends[target] = {(char*)buffer, count * width(type)};
    return exchange(comm, sends, receives);
  });
}
API HcclResult HcclRecv(
    void* buffer, uint64_t count, HcclDataType type, uint32_t source, HcclComm comm, aclrtStream stream) {
  return launch(comm, stream, [=](Comm& comm) {
    std::vector<Message> sends(comm.size), receives(comm.size);
    receives[source] = {(char*)buffer, count * width(type)};
    return exchange(comm, sends, receives);
  });
}
API HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm comm, aclrtStream stream) {
  const std::vector<HcclSendRecvItem> all(items, items + count);
  return launch(comm, stream, [=](Comm& comm) {
    std::vector<Message> sends(comm.size), receives(comm.size);
    for (const auto& item : all)
      (item.sendRecvType == HCCL_SEND ? sends : receives)[item.remoteRank] = {
          (char*)item.buf, item.count * width(item.dataType)};
    return exchange(comm, sends, receives);
  });
}
API HcclResult HcclAlltoAllV(
    const void* in, const void* in_counts, const void* in_starts, HcclDataType in_type, const void* out,
    const void* out_counts, const void* out_starts, HcclDataType out_type, HcclComm handle, aclrtStream stream) {
  const uint32_t size = ((Comm*)handle)->size;
  std::vector<Message> sends(size), receives(size);  // the tables belong to the caller: read them now
  for (uint32_t peer = 0; peer < size; peer++) {
    const size_t a = width(in_type), b = width(out_type);
    sends[peer] = {(char*)in + ((const uint64_t*)in_starts)[peer] * a, ((const uint64_t*)in_counts)[peer] * a};
    receives[peer] = {(char*)out + ((const uint64_t*)out_starts)[peer] * b, ((const uint64_t*)out_counts)[peer] * b};
  }
  return launch(handle, stream, [=](Comm& comm) { return exchange(comm, sends, receives); });
}
API HcclResult HcclAlltoAll(
    const void* in, uint64_t in_count, HcclDataType in_type, const void* out, uint64_t out_count, HcclDataType out_type,
    HcclComm handle, aclrtStream stream) {
  const size_t send = in_count * width(in_type), receive = out_count * width(out_type);
  return launch(handle, stream, [=](Comm& comm) {
    std::vector<Message> sends(comm.size), receives(comm.size);
    for (uint32_t peer = 0; peer < comm.size; peer++) {
      sends[peer] = {(char*)in + peer * send, send};
      receives[peer] = {(char*)out + peer * receive, receive};
    }
    return exchange(comm, sends, receives);
  });
}
API HcclResult HcclScatter(
    void* in, void* out, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle, aclrtStream stream) {
  const size_t bytes = count * width(type);
  return launch(handle, stream, [=](Comm& comm) {
    std::vector<Message> sends(comm.size), receives(comm.size);
    if (comm.rank == root)
      for (uint32_t peer = 0; peer < comm.size; peer++) sends[peer] = {(char*)in + peer * bytes, bytes};
    receives[root] = {(char*)out, bytes};
    return exchange(comm, sends, receives);
  });
}
