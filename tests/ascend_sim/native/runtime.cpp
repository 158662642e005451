// libascendcl on host memory: one worker thread a stream, events, memory accounting and graph capture.
// Operator kernels (aclnn*, aclop*) are absent; `operators.cpp` runs them as work of a stream.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "acl/acl_op_compiler.h"
#include "queue.h"

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kInvalidDevice = 107001, kNoContext = 107002, kBadArgument = 107000, kOutOfMemory = 207001;
constexpr int kDeviceLost = 507899, kNotInCapture = 107025;
constexpr int kMaxDevices = 64;

int number(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}

int devices() { return number("SIM_DEVICES", 2); }
size_t memory_size() { return (size_t)number("SIM_MEMORY_GB", 64) << 30; }

thread_local int current_device = -1;
std::atomic<bool> lost[kMaxDevices];

// ---- graphs

struct Graph {
  int id;
  std::vector<Work> work;
};

std::atomic<int> graph_count{0};
std::mutex graphs_mutex;
std::map<Graph*, std::shared_ptr<Graph>> graphs;  // by the handle that callers hold

// ---- streams

struct Task {
  Work work;
  bool always;  // runs even on a failed stream, so that nobody waits forever
};

struct Stream {
  int id, device;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> tasks;
  uint64_t queued = 0, done = 0;
  int error = 0;
  bool stop = false;
  std::shared_ptr<Graph> graph;  // while captured
  std::thread worker;

  Stream(int id, int device) : id(id), device(device), worker([this] { run(); }) {}

  ~Stream() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      stop = true;
    }
    changed.notify_all();
    worker.join();
  }

  void push(Task task) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      tasks.push_back(std::move(task));
      queued++;
    }
    changed.notify_all();
  }

  int drain() {
    std::unique_lock<std::mutex> lock(mutex);
    const uint64_t goal = queued;
    changed.wait(lock, [&] { return done >= goal; });
    return error;
  }

  int failure() {
    std::lock_guard<std::mutex> lock(mutex);
    return error;
  }

  bool idle() {
    std::lock_guard<std::mutex> lock(mutex);
    return done == queued;
  }

 private:
  void run() {
    const int delay = number("SIM_DELAY_US", 0);
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return stop || !tasks.empty(); });
      if (tasks.empty()) return;
      Task task = std::move(tasks.front());
      tasks.pop_front();
      if (lost[device] && !error) error = kDeviceLost;
      const bool wanted = task.always || !error;
      lock.unlock();
      if (delay) usleep(delay);
      const int code = wanted ? task.work() : 0;
      task.work = nullptr;  // what it holds may be freed before anyone is told
      lock.lock();
      if (code && !error) error = code;
      done++;
      changed.notify_all();
    }
  }
};

std::mutex streams_mutex;
std::set<Stream*> streams;
std::atomic<int> stream_count{0};

Stream* make_stream(int device) {
  auto* stream = new Stream(++stream_count, device);
  std::lock_guard<std::mutex> lock(streams_mutex);
  streams.insert(stream);
  return stream;
}

Stream* get(aclrtStream handle) {
  if (handle) return (Stream*)handle;
  static std::mutex mutex;
  static std::map<int, Stream*> defaults;
  std::lock_guard<std::mutex> lock(mutex);
  Stream*& stream = defaults[current_device < 0 ? 0 : current_device];
  if (!stream) stream = make_stream(current_device < 0 ? 0 : current_device);
  return stream;
}

int drain_device(int device) {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    for (auto* stream : streams)
      if (stream->device == device) all.push_back(stream);
  }
  int code = 0;
  for (auto* stream : all)
    if (int error = stream->drain()) code = error;
  return code;
}

// ---- events

using Clock = std::chrono::steady_clock;

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, passed = 0;
  int error = 0;  // of the stream when it came to the last record
  Clock::time_point when;
  std::shared_ptr<Graph> graph;  // recorded inside a capture

  void pass(uint64_t number, int failure) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      error = failure;
      if (number > passed) passed = number;
      when = Clock::now();
    }
    changed.notify_all();
  }

  uint64_t last() {
    std::lock_guard<std::mutex> lock(mutex);
    return recorded;
  }

  void wait_for(uint64_t number) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return passed >= number; });
  }
};

// An event outlives its destruction by the caller for as long as work refers to it.
using EventHandle = std::shared_ptr<Event>;
EventHandle& event_of(aclrtEvent event) { return *(EventHandle*)event; }

// ---- memory

struct Block {
  size_t size;
  int device;
};

std::mutex memory_mutex;
std::map<void*, Block> blocks;
size_t used[kMaxDevices];

int here() { return current_device < 0 ? 0 : current_device; }

bool take(size_t size, int device) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  if (used[device] + size > memory_size()) return false;
  used[device] += size;
  return true;
}

void give(size_t size, int device) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  used[device] -= size;
}

}  // namespace

__attribute__((visibility("default"))) int sim_enqueue(aclrtStream handle, Work work) {
  Stream* stream = get(handle);
  if (lost[stream->device]) return kDeviceLost;
  if (stream->graph) {
    stream->graph->work.push_back(std::move(work));
    return 0;
  }
  stream->push({std::move(work), false});
  return 0;
}

__attribute__((visibility("default"))) bool sim_capturing(aclrtStream stream) { return (bool)get(stream)->graph; }

__attribute__((visibility("default"))) void sim_lose_device(int device) { lost[device] = true; }

// ---- lifecycle and devices

API aclError aclInit(const char*) { return 0; }
API aclError aclFinalize(void) { return 0; }
API const char* aclrtGetSocName(void) {
  const char* name = getenv("SIM_SOC");
  return name ? name : "Ascend950DT_9595";
}
API const char* aclGetRecentErrMsg(void) { return "simulated runtime"; }
API void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}
API aclError aclrtGetVersion(int32_t* major, int32_t* minor, int32_t* patch) {
  *major = 1;
  *minor = *patch = 0;
  return 0;
}
API aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = devices();
  return 0;
}
API aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= devices()) return kInvalidDevice;
  current_device = device;
  return 0;
}
API aclError aclrtResetDevice(int32_t) { return 0; }
API aclError aclrtGetDevice(int32_t* device) {
  if (current_device < 0) return kNoContext;
  *device = current_device;
  return 0;
}
static char contexts[kMaxDevices];
API aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (current_device < 0) return kNoContext;
  *context = &contexts[current_device];
  return 0;
}
API aclError aclrtSetCurrentContext(aclrtContext context) {
  current_device = (int)((char*)context - contexts);
  return 0;
}
API aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
  if (flags) *flags = 0;
  *active = current_device == device;
  return 0;
}
API aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t a, int32_t b) {
  *can = a != b;
  return 0;
}
API aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return 0; }
API aclError aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = getpid();
  return 0;
}
API aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t* value) {
  *value = 32;
  return 0;
}
API aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t* value) {
  *value = 32;
  return 0;
}
API aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  *total = memory_size();
  *free_bytes = *total - used[here()];
  return 0;
}
API aclError aclrtSynchronizeDevice(void) { return drain_device(here()); }
API aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return drain_device(here()); }
API aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return 0; }
API aclError aclrtSetOpWaitTimeout(uint32_t) { return 0; }
API aclError aclrtSetOpExecuteTimeOut(uint32_t) { return 0; }
API aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return 0; }
API aclError aclrtGetLastError(aclrtLastErrLevel) { return 0; }
static int64_t options[64];
API aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  options[option & 63] = value;
  return 0;
}
API aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  *value = options[option & 63];
  return 0;
}
API aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
API aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  return aclrtGetSysParamOpt(option, value);
}
API aclError aclGetCannAttributeList(const aclCannAttr** list, size_t* count) {
  static aclCannAttr none[1];
  *list = none;
  *count = 0;
  return 0;
}
API aclError aclrtGetDeviceUtilizationRate(int32_t, aclrtUtilizationInfo*) { return 0; }
API aclError aclrtGetDeviceResLimit(int32_t, aclrtDevResLimitType, uint32_t* value) {
  *value = 32;
  return 0;
}
API aclError aclrtGetStreamResLimit(aclrtStream, aclrtDevResLimitType, uint32_t* value) {
  *value = 32;
  return 0;
}
API aclError aclrtGetResInCurrentThread(aclrtDevResLimitType, uint32_t* value) {
  *value = 32;
  return 0;
}
API aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t* flag) {
  *flag = 0;
  return 0;
}
API aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return 0; }

// ---- memory: fresh memory is 0xFF, and giving memory back waits for the device

API aclError aclrtMalloc(void** out, size_t size, aclrtMemMallocPolicy) {
  const size_t alignment = size >= (2u << 20) ? (2u << 20) : 512;
  if (!take(size, here())) return kOutOfMemory;
  if (posix_memalign(out, alignment, size + 32)) {
    give(size, here());
    return kOutOfMemory;
  }
  memset(*out, 0xFF, size);
  std::lock_guard<std::mutex> lock(memory_mutex);
  blocks[*out] = {size, here()};
  return 0;
}
API aclError aclrtMallocAlign32(void** out, size_t size, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(out, size, policy);
}
API aclError aclrtFree(void* block) {
  if (!block) return 0;
  Block found;
  {
    std::lock_guard<std::mutex> lock(memory_mutex);
    auto entry = blocks.find(block);
    if (entry == blocks.end()) return kBadArgument;
    found = entry->second;
    blocks.erase(entry);
  }
  drain_device(found.device);
  give(found.size, found.device);
  free(block);
  return 0;
}
API aclError aclrtMallocHost(void** out, size_t size) {
  return posix_memalign(out, 4096, size ? size : 1) ? kOutOfMemory : 0;
}
API aclError aclrtFreeHost(void* block) {
  for (int device = 0; device < devices(); device++) drain_device(device);
  free(block);
  return 0;
}
API aclError aclrtMemcpy(void* target, size_t room, const void* source, size_t size, aclrtMemcpyKind) {
  if (size > room) return kBadArgument;
  memmove(target, source, size);
  return 0;
}
API aclError aclrtMemcpyAsync(
    void* target, size_t room, const void* source, size_t size, aclrtMemcpyKind, aclrtStream stream) {
  if (size > room) return kBadArgument;
  return sim_enqueue(stream, [=] {
    memmove(target, source, size);
    return 0;
  });
}
API aclError aclrtMemset(void* target, size_t room, int32_t value, size_t size) {
  if (size > room) return kBadArgument;
  memset(target, value, size);
  return 0;
}
API aclError aclrtMemsetAsync(void* target, size_t room, int32_t value, size_t size, aclrtStream stream) {
  if (size > room) return kBadArgument;
  return sim_enqueue(stream, [=] {
    memset(target, value, size);
    return 0;
  });
}
API aclError aclrtHostRegisterV2(void*, uint64_t, uint32_t) { return 0; }
API aclError aclrtHostUnregister(void*) { return 0; }
API aclError aclrtPointerGetAttributes(const void*, aclrtPtrAttributes* attributes) {
  memset(attributes, 0, sizeof *attributes);
  return 0;
}

// virtual memory, for segments that grow

struct Physical {
  size_t size;
  int device;
};
API aclError aclrtReserveMemAddress(void** out, size_t size, size_t, void*, uint64_t) {
  void* block = mmap(0, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (block == MAP_FAILED) return kOutOfMemory;
  *out = block;
  return 0;
}
API aclError aclrtReleaseMemAddress(void*) { return 0; }
API aclError aclrtMallocPhysical(aclrtDrvMemHandle* out, size_t size, const aclrtPhysicalMemProp*, uint64_t) {
  if (!take(size, here())) return kOutOfMemory;
  *out = (aclrtDrvMemHandle) new Physical{size, here()};
  return 0;
}
API aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  auto* physical = (Physical*)handle;
  give(physical->size, physical->device);
  delete physical;
  return 0;
}
API aclError aclrtMapMem(void* address, size_t size, size_t, aclrtDrvMemHandle, uint64_t) {
  if (mprotect(address, size, PROT_READ | PROT_WRITE)) return kBadArgument;
  memset(address, 0xFF, size);
  return 0;
}
API aclError aclrtUnmapMem(void*) { return drain_device(here()); }
API aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle, aclrtMemHandleType, uint64_t, uint64_t*) {
  return 207000;
}
API aclError aclrtMemImportFromShareableHandle(uint64_t, int32_t, aclrtDrvMemHandle*) { return 207000; }
API aclError aclrtMemSetPidToShareableHandle(uint64_t, int32_t*, size_t) { return 207000; }

// ---- streams and events

API aclError aclrtCreateStreamWithConfig(aclrtStream* out, uint32_t, uint32_t) {
  *out = make_stream(here());
  return 0;
}
API aclError aclrtCreateStream(aclrtStream* out) { return aclrtCreateStreamWithConfig(out, 0, 0); }
API aclError aclrtDestroyStream(aclrtStream handle) {
  auto* stream = (Stream*)handle;
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    streams.erase(stream);
  }
  delete stream;
  return 0;
}
API aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
API aclError aclrtSynchronizeStream(aclrtStream handle) {
  Stream* stream = get(handle);
  return stream->graph ? kNotInCapture : stream->drain();
}
API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) { return aclrtSynchronizeStream(stream); }
API aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  *status = get(stream)->idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return 0;
}
API aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = get(stream)->id;
  return 0;
}
API aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return 0; }
API aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) { return 0; }

API aclError aclrtCreateEventExWithFlag(aclrtEvent* out, uint32_t) {
  *out = new EventHandle(std::make_shared<Event>());
  return 0;
}
API aclError aclrtCreateEventWithFlag(aclrtEvent* out, uint32_t flag) { return aclrtCreateEventExWithFlag(out, flag); }
API aclError aclrtCreateEvent(aclrtEvent* out) { return aclrtCreateEventExWithFlag(out, 0); }
API aclError aclrtDestroyEvent(aclrtEvent event) {
  delete (EventHandle*)event;
  return 0;
}
API aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream target) {
  EventHandle event = event_of(handle);
  Stream* stream = get(target);
  event->graph = stream->graph;
  if (stream->graph) return 0;
  uint64_t number;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    number = ++event->recorded;
  }
  stream->push({[event, number, stream] {
                  event->pass(number, stream->failure());
                  return 0;
                },
                true});
  return 0;
}
API aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return 0; }
API aclError aclrtStreamWaitEvent(aclrtStream target, aclrtEvent handle) {
  EventHandle event = event_of(handle);
  Stream* stream = get(target);
  if (event->graph) {  // a stream that waits for captured work joins the capture; work keeps the order of the calls
    stream->graph = event->graph;
    return 0;
  }
  if (stream->graph) return 0;
  const uint64_t number = event->last();
  stream->push({[event, number] {
                  event->wait_for(number);
                  return 0;
                },
                true});
  return 0;
}
API aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  EventHandle event = event_of(handle);
  if (event->graph) return kNotInCapture;
  event->wait_for(event->last());
  return event->error;
}
API aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  Event& event = *event_of(handle);
  std::lock_guard<std::mutex> lock(event.mutex);
  *status = event.passed >= event.recorded ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return 0;
}
API aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return 0;
}
API aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  auto span = event_of(end)->when - event_of(start)->when;
  *milliseconds = std::chrono::duration<float, std::milli>(span).count();
  return 0;
}
API aclError aclrtProcessReport(int32_t) { return 0; }
API aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return 0; }
API aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return 0; }
API aclError aclrtLaunchCallback(aclrtCallback call, void* data, aclrtCallbackBlockType, aclrtStream stream) {
  return sim_enqueue(stream, [=] {
    call(data);
    return 0;
  });
}
API aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc call, void* data) {
  return sim_enqueue(stream, [=] {
    call(data);
    return 0;
  });
}

// ---- graphs

API aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode) {
  Stream* stream = get(handle);
  if (stream->graph) return kNotInCapture;
  stream->graph = std::make_shared<Graph>();
  stream->graph->id = ++graph_count;
  std::lock_guard<std::mutex> lock(graphs_mutex);
  graphs[stream->graph.get()] = stream->graph;
  return 0;
}
API aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* out) {
  auto graph = get(handle)->graph;
  if (!graph) return kNotInCapture;
  std::lock_guard<std::mutex> lock(streams_mutex);
  for (auto* stream : streams)
    if (stream->graph == graph) stream->graph = nullptr;
  *out = (aclmdlRI)graph.get();
  return 0;
}
API aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus* status, aclmdlRI* out) {
  Stream* stream = get(handle);
  *status = stream->graph ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  if (out) *out = (aclmdlRI)stream->graph.get();
  return 0;
}
API aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode*) { return 0; }
API aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream stream) {
  std::shared_ptr<Graph> graph;
  {
    std::lock_guard<std::mutex> lock(graphs_mutex);
    graph = graphs.at((Graph*)handle);
  }
  return sim_enqueue(stream, [graph] {
    for (auto& work : graph->work)
      if (int code = work()) return code;
    return 0;
  });
}
API aclError aclmdlRIDestroy(aclmdlRI handle) {
  std::lock_guard<std::mutex> lock(graphs_mutex);
  graphs.erase((Graph*)handle);
  return 0;
}
API aclError aclmdlRIGetId(aclmdlRI handle, uint32_t* id) {
  *id = ((Graph*)handle)->id;
  return 0;
}
