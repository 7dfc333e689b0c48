// A device for tests: its memory is the host's, its operators are the CPU's, and it raises where CUDA raises.
//
// An operator on tensors of this device runs on CPU tensors that share their memory's content (at::native::cpu_fallback).
// What CUDA refuses is refused here: an operator with tensors of the device and of the CPU, an allocation beyond a
// limit. What CUDA computes wrongly without a word is refused as well: work on memory that another stream may still be
// using. What costs time on CUDA is counted: copies between host and device, and reads of a number by the host.

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_cpu_dispatch.h>
#include <ATen/ops/view_as_complex_cpu_dispatch.h>
#include <ATen/ops/view_as_real_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <string>
#include <unordered_set>
#include <vector>

#include "collectives.h"
#include "memory.h"
#include "random.h"
#include "streams.h"

namespace {

using namespace sim;

c10::DeviceIndex num_devices = 2;
DeviceMemory device_memory;
REGISTER_ALLOCATOR(kDevice, &device_memory)
PinnedMemory pinned_memory;

// --- what is counted

struct Counters {
  std::atomic<int64_t> to_device{0}, to_device_pageable{0}, to_device_in_line{0}, to_host{0}, reads{0};
  std::atomic<int64_t> synchronizations{0}, operators{0};
};
Counters counters;

// --- device, streams and events

c10::Device indexed(c10::Device device) { return device.has_index() ? device : c10::Device(kDevice, current_device); }

int stream_number(c10::Device device) { return Streams::all().number(current_stream(indexed(device).index())); }

std::atomic<c10::StreamId> last_stream{0};

using Time = std::chrono::steady_clock;

struct Event {
  Clock clock;  // of its stream at the time
  Time::time_point time;
};

void synchronize_device() {
  ++counters.synchronizations;
  Streams::all().host_waits_for_all();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto former = getDevice();
    setDevice(device);
    return former;
  }
  c10::Device getDevice() const override { return {kDevice, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < num_devices, "sim:", int(device.index()), " is not there: there are ", int(num_devices));
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(indexed(device).index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, indexed(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, indexed(device), ++last_stream);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto former = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return former;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    *static_cast<Event*>(*event) = {Streams::all().clock(Streams::all().number(stream)), Time::now()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) Streams::all().wait(Streams::all().number(stream), static_cast<Event*>(event)->clock);
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    const auto time = static_cast<Event*>(to)->time - static_cast<Event*>(from)->time;
    return std::chrono::duration<double, std::milli>(time).count();
  }
  bool queryEvent(void*) const override { return true; }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    ++counters.synchronizations;
    Streams::all().host_waits(Streams::all().clock(Streams::all().number(stream)));
  }
  void synchronizeEvent(void* event) const override {
    ++counters.synchronizations;
    if (event != nullptr) Streams::all().host_waits(static_cast<Event*>(event)->clock);
  }
  void synchronizeDevice(c10::DeviceIndex) const override { synchronize_device(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Memory::all().record(data.get(), Streams::all().number(stream));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice({kDevice, index}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice({kDevice, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return at::make_generator<Generator>(index); }
  at::Device getDeviceFromPtr(void*) const override { return {kDevice, current_device}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto grown = device_memory.allocate(size);
    if (const auto kept = std::min(size, impl->nbytes()); kept > 0) {  // else there is nothing to copy, as on CUDA
      const auto work = Streams::all().next(stream_number({kDevice, current_device}));
      Memory::all().use(impl->data(), work, false, "resize_");
      Memory::all().use(grown.get(), work, true, "resize_");
      std::memcpy(grown.get(), impl->data(), kept);
    }
    impl->set_data_ptr_noswap(std::move(grown));
    impl->set_nbytes(size);
  }
};

// --- operators

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(indexed(device.value_or(c10::Device(kDevice))));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &device_memory, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(indexed(device.value_or(c10::Device(kDevice))));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &device_memory, keys, c10::dtype_or_default(dtype));
}

// The operator that runs on the host now, in this thread.
struct Running {
  Work work;
  std::string name;
};
thread_local const Running* running = nullptr;

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  auto& streams = Streams::all();
  if (running != nullptr) {  // its arguments to the host, or its results to the device
    Memory::all().use(to, running->work, true, running->name);
  } else {
    const bool is_to_host = to.device().is_cpu();
    const auto number = stream_number(is_to_host ? self.device() : to.device());
    if (!is_to_host && !self.device().is_cpu() && self.device() != to.device()) {  // both streams take part
      const auto other = stream_number(self.device());
      streams.wait(number, streams.clock(other));
      streams.wait(other, streams.clock(number));
    }
    const auto work = streams.next(number);
    Memory::all().use(self, work, false, "copy_");
    Memory::all().use(to, work, true, "copy_");
    if (self.device().is_cpu()) {
      ++counters.to_device;
      if (self.numel() > 0 && !is_pinned(self.data_ptr())) ++counters.to_device_pageable;
      // The default stream's, which computes: such a copy begins when all that was launched before is done.
      if (current_stream(indexed(to.device()).index()).id() == 0) ++counters.to_device_in_line;
    } else if (is_to_host) {
      ++counters.to_host;
      if (!non_blocking || !is_pinned(to.data_ptr())) streams.host_waits(streams.clock(number));
    }
  }
  const at::NoGradGuard no_grad;
  on_host(to).copy_(on_host(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (self.sizes() != to.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  if (running == nullptr) {
    ++counters.reads;
    const auto number = stream_number(self.device());
    Memory::all().use(self, Streams::all().next(number), false, "item");
    Streams::all().host_waits(Streams::all().clock(number));
  }
  return on_host(self).item();
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto bytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (bytes > self.storage().nbytes()) at::native::resize_bytes_nocuda(self.storage(), bytes);
  impl->set_sizes_contiguous(size);
  if (format.has_value()) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::cpu::set_(self, std::move(source), offset, size, stride);
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::cpu::set_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto length = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return at::cpu::set_(self, std::move(source), 0, {length}, {});
}

void record_stream(at::Tensor& self, at::Stream stream) {
  Memory::all().record(self.storage().data(), Streams::all().number(stream));
}

// --- all other operators

// Those that CUDA lets have tensors of the CPU beside its own.
const std::unordered_set<std::string> kTakesBoth = {
    "aten::_copy_from", "aten::_index_put_impl_", "aten::_pack_padded_sequence", "aten::_pad_packed_sequence",
    "aten::index", "aten::index_put", "aten::index_put_"};

void check_devices(const c10::OperatorHandle& op, const std::vector<at::Tensor>& tensors) {
  const at::Tensor* first = nullptr;
  for (const auto& tensor : tensors) {
    if (tensor.defined() && tensor.device().type() == kDevice) {
      TORCH_CHECK(
          first == nullptr || first->device() == tensor.device(),
          "Expected all tensors to be on the same device, but found at least two devices, ", first->device(), " and ",
          tensor.device(), "! (", op.schema().name(), ")");
      first = &tensor;
    }
  }
  if (first == nullptr || kTakesBoth.count(op.schema().name())) return;
  for (const auto& tensor : tensors) {
    TORCH_CHECK(
        !tensor.defined() || tensor.device() == first->device() || tensor.dim() == 0,
        "Expected all tensors to be on the same device, but found at least two devices, ", first->device(), " and ",
        tensor.device(), "! (", op.schema().name(), ")");
  }
}

template <typename Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor.has_value()) visit(*tensor);
    }
  }
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  std::vector<at::Tensor> tensors;
  for (const auto& value : values) {
    for_each_tensor(value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  }
  check_devices(op, tensors);
  c10::Device device(kDevice, current_device);
  for (const auto& tensor : tensors) {
    if (tensor.defined() && tensor.device().type() == kDevice) device = tensor.device();
  }
  const Running own{Streams::all().next(stream_number(device)), op.schema().name()};
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    const bool writes = alias != nullptr && alias->isWrite();
    for_each_tensor(values[i], [&](const at::Tensor& tensor) {
      Memory::all().use(tensor, own.work, writes, own.name);
    });
  }
  const auto* outer = running;
  if (outer == nullptr) ++counters.operators;
  running = &own;
  const DrawsThere draws(op, values, device.index());
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    running = outer;
    throw;
  }
  running = outer;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", TORCH_FN(at::cpu::as_strided));
  m.impl("view", TORCH_FN(static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(at::cpu::view)));
  m.impl("_reshape_alias", TORCH_FN(static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef, at::IntArrayRef)>(at::cpu::_reshape_alias)));
  m.impl("unfold", TORCH_FN(at::cpu::unfold));
  m.impl("view_as_real", TORCH_FN(at::cpu::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::cpu::view_as_complex));
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("record_stream", &record_stream);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FLOAT)
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("set_num_devices", [](int number) { num_devices = static_cast<c10::DeviceIndex>(number); });
  m.def("device_count", [] { return int(num_devices); });
  m.def("current_device", [] { return int(current_device); });
  m.def("set_device", [](int index) { Guard().setDevice({kDevice, static_cast<c10::DeviceIndex>(index)}); });
  m.def("counts", [] {
    return std::unordered_map<std::string, int64_t>{
        {"to_device", counters.to_device}, {"to_device_pageable", counters.to_device_pageable},
        {"to_device_in_line", counters.to_device_in_line}, {"to_host", counters.to_host}, {"reads", counters.reads},
        {"operators", counters.operators}, {"synchronizations", counters.synchronizations}};
  });
  m.def("default_generator", [](int index) { return default_generator(static_cast<c10::DeviceIndex>(index)); });
  m.def("synchronize", &synchronize_device);
  m.def("memory", [] { return Memory::all().figures(); });
  m.def("reset_peak", [] { Memory::all().reset_peak(); });
  m.def("limit", [] { return Memory::all().limit; });
  m.def("set_limit", [](size_t bytes) { Memory::all().limit = bytes; });
  m.def("over_gloo", [](const c10::intrusive_ptr<c10d::Backend>& gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Backend>(gloo);
  });
}
