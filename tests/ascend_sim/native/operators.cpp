// Runs aten operators of torch_npu's device as work of the current stream of the simulated runtime.
//
// torch_npu's own code stays for allocation, views, storages, streams and events. Every operator that computes gets its
// result's shape from PyTorch's Meta kernel, memory from torch_npu's allocator, and is computed later, by the stream's
// worker, with PyTorch's CPU kernel over aliases of that memory. Work holds no reference to device memory: what is
// freed too early is overwritten, as on a device.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <unordered_set>

#include "queue.h"
#include "torch_npu/csrc/core/npu/NPUFunctions.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"

using c10::IValue;
using torch::jit::Stack;

namespace {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;
constexpr int kFailed = 507015;  // "aicore exception": what a device says of a kernel that went wrong

std::mutex counters;
std::map<std::string, int64_t> calls, waits;
std::unordered_set<std::string> native, unshaped;
bool strict = false;
thread_local int depth = 0;  // inside an emulated npu operator, whose parts are not counted

bool on_npu(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kNpu; }

aclrtStream stream() { return c10_npu::getCurrentNPUStream().stream(); }

void check(int code, const std::string& what) {
  TORCH_CHECK(!code, "simulated device: ", what, " failed with error ", code);
}

// The host waits for the current stream.
void wait(const std::string& what) {
  {
    std::lock_guard<std::mutex> lock(counters);
    waits[what]++;
  }
  auto mode = c10_npu::warning_state().get_sync_debug_mode();
  TORCH_CHECK(mode != c10_npu::SyncDebugMode::L_ERROR, what, " makes the host wait for the device");
  aclrtStream current = stream();
  TORCH_CHECK(!sim_capturing(current), what, " makes the host wait for the device, which a graph capture forbids");
  check(aclrtSynchronizeStream(current), what);
}

// Hand work to the current stream. It runs in inference mode, which may write to any tensor; what it throws becomes the
// error of the stream.
void enqueue(const std::string& what, std::function<void()> work) {
  auto guarded = [what, work = std::move(work)] {
    c10::InferenceMode free_of_autograd;
    try {
      work();
    } catch (const std::exception& error) {
      fprintf(stderr, "simulated device: %s: %s\n", what.c_str(), error.what());
      return kFailed;
    }
    return 0;
  };
  check(sim_enqueue(stream(), guarded), what);
}

// A CPU tensor over memory of the device, without a reference to it.
at::Tensor host_alias(const at::Tensor& tensor) {
  if (!on_npu(tensor)) return tensor;
  const auto& storage = tensor.storage();
  c10::DataPtr pointer(const_cast<void*>(storage.data()), c10::Device(c10::kCPU));
  c10::Storage view(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer), nullptr, false);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(view), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return result;
}

at::Tensor shape_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (tensor.device().is_cpu() && tensor.dim() == 0) return tensor;  // a number
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
}

using Change = std::function<at::Tensor(const at::Tensor&)>;

IValue map_tensors(const IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> list;
    for (const auto& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : tensor);
    return list;
  }
  return value;
}

void each_tensor(const IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  map_tensors(value, [&](const at::Tensor& tensor) {
    if (tensor.defined()) visit(tensor);
    return tensor;
  });
}

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

std::string full_name(const c10::OperatorName& name) {
  return name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
}

// ---- copies between host and device

const std::unordered_set<std::string> kCopies = {
    "aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize"};

void copy_across(const at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  const bool to_host = target.device().is_cpu(), from_host = source.device().is_cpu();
  auto there = host_alias(target);
  if (!to_host && !from_host) {
    auto here = host_alias(source);
    enqueue("copy", [there, here] { there.copy_(here); });
    return;
  }
  if (!non_blocking) {
    wait(to_host ? "copy to the host" : "copy from the host");
    c10::InferenceMode free_of_autograd;
    there.copy_(host_alias(source));
    return;
  }
  // Pinned memory is read and written when the stream comes to it; other host memory is staged at the call.
  at::Tensor here = from_host ? (source.is_pinned() ? source : source.clone()) : host_alias(source);
  if (to_host && target.is_contiguous() && target.numel())
    memset(target.mutable_data_ptr(), 0xFF, target.nbytes());  // nobody may read it before the stream was waited for
  enqueue("copy", [there, here] { there.copy_(here); });
}

// ---- computing operators

void check_devices(const std::string& name, const c10::ArrayRef<IValue> arguments) {
  static const std::unordered_set<std::string> mixed = {
      "aten::index.Tensor", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"};
  std::optional<c10::Device> device;
  bool host = false;
  for (const auto& value : arguments)
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (on_npu(tensor)) {
        TORCH_CHECK(!device || *device == tensor.device(), name, ": tensors on ", *device, " and ", tensor.device());
        device = tensor.device();
      } else if (tensor.dim()) {
        host = true;
      }
    });
  TORCH_CHECK(mixed.count(name) || !device || !host, name, ": tensors on ", *device, " and cpu");
}

c10::Device device_for(const c10::FunctionSchema& schema, const c10::ArrayRef<IValue> arguments) {
  std::optional<c10::Device> device;
  for (const auto& value : arguments) {
    if (value.isDevice()) return value.toDevice();
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (on_npu(tensor) && !device) device = tensor.device();
    });
  }
  return device ? *device : c10::Device(kNpu, c10_npu::current_device());
}

at::Tensor allocate_like(const at::Tensor& model, c10::Device device) {
  if (!model.defined()) return model;
  return at::empty_strided(model.sizes(), model.strides(), model.options().device(device));
}

Stack change_arguments(const c10::ArrayRef<IValue> arguments, const Change& change, c10::Device device) {
  Stack changed;
  for (const auto& value : arguments)
    changed.push_back(value.isDevice() ? IValue(device) : map_tensors(value, change));
  return changed;
}

// Results of the Meta kernel, or nothing where only data can tell the shape or no such kernel exists.
std::optional<Stack> shapes(const c10::OperatorHandle& op, const c10::ArrayRef<IValue> arguments) {
  static const std::unordered_set<std::string> data_dependent = {
      "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::bincount",
      "aten::_unique2", "aten::unique_consecutive", "aten::repeat_interleave.Tensor", "aten::unique_dim"};
  const auto name = full_name(op.operator_name());
  if (data_dependent.count(name)) return std::nullopt;
  for (const auto& argument : op.schema().arguments())
    if (argument.type()->str().find("Generator") != std::string::npos) return std::nullopt;
  Stack stack = change_arguments(arguments, shape_of, c10::Device(c10::kMeta));
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  } catch (const c10::NotImplementedError&) {
    std::lock_guard<std::mutex> lock(counters);
    unshaped.insert(name);
    return std::nullopt;
  }
  return stack;
}

// Index of the argument that a result is, for in-place and out= forms; -1 for a new tensor.
int written_argument(const c10::FunctionSchema& schema, size_t result) {
  const auto* info = schema.returns()[result].alias_info();
  if (!info || !info->isWrite()) return -1;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other && *other == *info) return (int)i;
  }
  return -1;
}

void store(const IValue& target, const IValue& computed) {
  if (target.isTensor()) {
    if (target.toTensor().defined()) target.toTensor().copy_(computed.toTensor());
    return;
  }
  const auto targets = target.toTensorVector(), values = computed.toTensorVector();
  for (size_t i = 0; i < targets.size(); i++) targets[i].copy_(values[i]);
}

// Compute on the CPU what was asked; `outs` are aliases of the new results, none for results that are arguments.
void compute(const c10::OperatorHandle& op, const Stack& arguments, const std::vector<IValue>& outs) {
  Stack stack(arguments.begin(), arguments.end());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  for (size_t i = 0; i < outs.size(); i++)
    if (!outs[i].isNone()) store(outs[i], stack[i]);
}

// The caller learns the result's shape from the result: the host waits and computes.
void compute_now(const c10::OperatorHandle& op, Stack* stack, const Stack& arguments, c10::Device device) {
  wait(full_name(op.operator_name()));
  const auto& schema = op.schema();
  Stack result = change_arguments(arguments, host_alias, c10::Device(c10::kCPU));
  at::AutoDispatchBelowADInplaceOrView below;
  for (size_t i = 0; i < schema.arguments().size(); i++)
    if (schema.arguments()[i].type()->str().find("Generator") != std::string::npos) result[i] = IValue();
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &result);
  for (size_t i = 0; i < schema.returns().size(); i++) {
    const int written = written_argument(schema, i);
    stack->push_back(written >= 0 ? arguments[written] : map_tensors(result[i], [&](const at::Tensor& value) {
      auto placed = allocate_like(value, device);
      // In stream order: the memory is still to be poisoned.
      if (placed.defined()) enqueue("result", [there = host_alias(placed), value] { there.copy_(value); });
      return placed;
    }));
  }
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto name = full_name(op.operator_name());
  const size_t count = schema.arguments().size();
  const Stack arguments(stack->end() - count, stack->end());
  stack->erase(stack->end() - count, stack->end());
  if (!depth) {
    std::lock_guard<std::mutex> lock(counters);
    calls[name]++;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      !strict || depth || native.count(name), name, " has no kernel in torch_npu: a device would run it on the CPU");
  if (kCopies.count(name)) {
    const bool forward = name == "aten::copy_";
    const auto target = arguments[forward ? 0 : 1].toTensor(), source = arguments[forward ? 1 : 0].toTensor();
    if (target.sizes() != source.sizes() && name == "aten::_copy_from_and_resize") target.resize_(source.sizes());
    copy_across(target, source.expand_as(target), count > 2 && arguments[2].toBool());
    stack->push_back(target);
    return;
  }
  check_devices(name, arguments);
  at::AutoDispatchBelowADInplaceOrView below;
  c10::Device device = device_for(schema, arguments);
  if (device.type() == kNpu && !device.has_index()) device = c10::Device(kNpu, c10_npu::current_device());
  auto shaped = shapes(op, arguments);
  if (!shaped) return compute_now(op, stack, arguments, device);
  std::vector<IValue> results, outs;
  for (size_t i = 0; i < schema.returns().size(); i++) {
    const int written = written_argument(schema, i);
    if (written >= 0) {
      const auto& target = arguments[written].toTensor();
      const auto& shape = (*shaped)[i].toTensor();
      if (target.sizes() != shape.sizes()) target.resize_(shape.sizes());
      results.push_back(arguments[written]);
      outs.push_back(IValue());
    } else {
      results.push_back(map_tensors((*shaped)[i], [&](const at::Tensor& model) { return allocate_like(model, device); }));
      outs.push_back(map_tensors(results.back(), host_alias));
    }
  }
  const Change reach = [](const at::Tensor& tensor) {  // host operands are taken as they are now
    return on_npu(tensor) ? host_alias(tensor) : tensor.defined() && tensor.dim() ? tensor.clone() : tensor;
  };
  Stack reached = change_arguments(arguments, reach, c10::Device(c10::kCPU));
  enqueue(name, [op, reached, outs] { compute(op, reached, outs); });
  for (auto& result : results) stack->push_back(std::move(result));
}

// ---- fresh memory is poisoned in stream order, whoever had it before

std::map<std::string, c10::SafeKernelFunction>& allocators() {
  static auto* kernels = new std::map<std::string, c10::SafeKernelFunction>;
  return *kernels;
}

void poisoned(const c10::OperatorHandle& op, Stack* stack) {
  auto found = allocators().find(full_name(op.operator_name()));
  found->second.callBoxed(op, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), stack);
  const auto tensor = stack->back().toTensor();
  const size_t bytes = tensor.numel() ? tensor.storage().nbytes() : 0;
  if (!bytes || !on_npu(tensor)) return;
  void* start = const_cast<void*>(tensor.storage().data());
  enqueue("allocation", [start, bytes] { memset(start, 0xFF, bytes); });
}

const std::unordered_set<std::string> kOwn = {
    "aten::set_", "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor",
    "aten::resize_", "aten::resize_as_", "aten::record_stream", "aten::is_pinned", "aten::_pin_memory",
    "aten::is_set_to", "aten::empty_like", "aten::new_empty_strided", "aten::empty.memory_format",
    "aten::empty_strided", "aten::as_strided", "aten::view", "aten::unfold"};

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

std::unique_ptr<torch::Library> library, autograd;

int64_t install() {
  auto key = c10::DispatchKey::PrivateUse1;
  library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  int64_t replaced = 0;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const char* name : {"empty.memory_format", "empty_strided"}) {
    std::string text(name);
    auto dot = text.find('.');
    auto op = dispatcher.findSchemaOrThrow(
        ("aten::" + text.substr(0, dot)).c_str(), dot == std::string::npos ? "" : text.substr(dot + 1).c_str());
    allocators().emplace("aten::" + text, op.getComputedKernelForDispatchKey(key));
    library->impl(name, torch::CppFunction::makeFromBoxedFunction<&poisoned>());
  }
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findSchema(name);
    if (!op) continue;
    const auto full = full_name(name);
    const bool has_own = op->hasKernelForDispatchKey(key);
    if (has_own) native.insert(full);
    if (kOwn.count(full) || is_view(op->schema())) continue;
    if (!has_own && !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (full == "aten::_to_copy") continue;
    library->impl(full.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    replaced++;
  }
  // Composites that torch_npu claims at the autograd key, where it hands them to one kernel of the device.
  autograd = std::make_unique<torch::Library>(
      torch::Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
  for (auto name : {"softmax.int", "scaled_dot_product_attention"})
    autograd->impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  return replaced;
}

std::map<std::string, int64_t> taken(std::map<std::string, int64_t>& counts) {
  std::lock_guard<std::mutex> lock(counters);
  auto copied = counts;
  counts.clear();
  return copied;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "Operators of the simulated device.";
  module.def("install", &install, "Replace torch_npu's kernels; returns how many.");
  module.def("take_calls", [] { return taken(calls); }, "Calls by operator since the last call of this.");
  module.def("take_waits", [] { return taken(waits); }, "Waits of the host by cause since the last call of this.");
  module.def("native", [] { return std::vector<std::string>(native.begin(), native.end()); });
  module.def("unshaped", [] { return std::vector<std::string>(unshaped.begin(), unshaped.end()); });
  module.def("strict", [](bool on) { strict = on; }, "Refuse operators without a kernel in torch_npu.");
  module.def("enter", [](const std::string& name) {
    if (!depth++) {
      std::lock_guard<std::mutex> lock(counters);
      calls[name]++;
    }
  });
  module.def("leave", [] { depth--; });
  module.def("lose_device", &sim_lose_device, "Everything that a device is asked for from now on fails.");
}
