// A process group's backend, which hands the memory of its tensors to gloo. As NCCL's, it has a stream of its own, which
// waits for the caller's where a collective begins, and for which the caller's stream waits where the work is waited for.
#pragma once

#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>

#include "memory.h"

namespace sim {

using Tensors = std::vector<at::Tensor>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

// A CPU tensor with the memory of a tensor of the device.
inline at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kDevice) return tensor;
  const auto options = tensor.options().device(at::kCPU);
  auto alias = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

inline Tensors on_host(const Tensors& tensors) {
  Tensors all;
  for (const auto& tensor : tensors) all.push_back(on_host(tensor));
  return all;
}

inline std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> all;
  for (const auto& list : lists) all.push_back(on_host(list));
  return all;
}

inline Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

// Gloo's works of a group that may not be done. One that is waited for is let go of: it holds its tensors.
struct UnderWay {
  void add(const WorkPointer& work) {
    const std::lock_guard lock(mutex);
    works.erase(std::remove_if(works.begin(), works.end(), is_done), works.end());
    works.push_back(work);
  }
  void forget(const WorkPointer& work) {
    const std::lock_guard lock(mutex);
    works.erase(std::remove(works.begin(), works.end(), work), works.end());
  }
  bool is_empty() {
    const std::lock_guard lock(mutex);
    return std::all_of(works.begin(), works.end(), is_done);
  }
  static bool is_done(const WorkPointer& work) { return work->isCompleted() && work->isSuccess(); }

  std::mutex mutex;
  std::vector<WorkPointer> works;
};

// A collective under way. It keeps its tensors, as NCCL's does.
struct Collective final : c10d::Work {
  Collective(WorkPointer gloo, std::shared_ptr<UnderWay> under_way, c10::Stream stream, Clock done, Tensors inputs,
             Tensors outputs)
      : gloo_(std::move(gloo)), under_way_(std::move(under_way)), stream_(stream), done_(std::move(done)),
        inputs_(std::move(inputs)), outputs_(std::move(outputs)) {
    under_way_->add(gloo_);
  }

  bool isCompleted() override { return gloo_->isCompleted(); }
  bool isSuccess() const override { return gloo_->isSuccess(); }
  std::exception_ptr exception() const override { return gloo_->exception(); }
  int sourceRank() const override { return gloo_->sourceRank(); }
  uint64_t getSequencenumber() const override { return gloo_->getSequencenumber(); }
  Tensors result() override { return outputs_; }
  void abort() override { gloo_->abort(); }
  void synchronize() override {
    auto& streams = Streams::all();
    streams.wait(streams.number(current_stream(stream_.device_index())), done_);
  }
  void blockCurrentStream() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override {
    const bool is_done = gloo_->wait(timeout);
    if (is_done) under_way_->forget(gloo_);
    synchronize();
    return is_done;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (future_) return future_;
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream_.device()});
    gloo_->getFuture()->addCallback([future = future_, stream = stream_, outputs = outputs_](auto& done) {
      if (done.hasError()) return future->setError(done.exception_ptr());
      const c10::StreamGuard guard(stream);  // which those who wait for the future wait for
      future->markCompleted(c10::IValue(outputs));
    });
    return future_;
  }

 private:
  WorkPointer gloo_;
  std::shared_ptr<UnderWay> under_way_;
  c10::Stream stream_;
  Clock done_;
  Tensors inputs_, outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

struct Backend final : c10d::Backend {
  explicit Backend(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "simccl"; }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override {
    auto part = gloo_->split(c10::make_intrusive<c10d::PrefixStore>("simccl", store), ranks, options);
    return part ? c10::make_intrusive<Backend>(part) : nullptr;
  }
  // As NCCL's, waits for all collectives, and for one that a peer never joins as long as the group has patience.
  void shutdown() override {
    using std::chrono::steady_clock;
    const auto deadline = steady_clock::now() + gloo_->getBackendOptions()->timeout;
    while (!under_way_->is_empty() && steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }
  // Waits for nothing. Gloo's threads may be in a collective for ever: they end with the process.
  void abort() override { new c10::intrusive_ptr<c10d::Backend>(gloo_); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto own = on_host(tensors);
    return run("broadcast", {}, tensors, [&] { return gloo_->broadcast(own, options); });
  }
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto own = on_host(tensors);
    return run("allreduce", {}, tensors, [&] { return gloo_->allreduce(own, options); });
  }
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto own = on_host(tensors);
    return run("allreduce", {}, tensors, [&] { return gloo_->allreduce_coalesced(own, options); });
  }
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto own = on_host(tensors);
    return run("reduce", {}, tensors, [&] { return gloo_->reduce(own, options); });
  }
  WorkPointer allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = on_host(outputs);
    auto own = on_host(inputs);
    return run("allgather", inputs, flat(outputs), [&] { return gloo_->allgather(to, own, options); });
  }
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto to = on_host(output), own = on_host(input);
    return run("allgather", {input}, {output}, [&] { return gloo_->_allgather_base(to, own, options); });
  }
  WorkPointer allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = on_host(outputs), own = on_host(inputs);
    return run("allgather", inputs, outputs, [&] { return gloo_->allgather_into_tensor_coalesced(to, own, options); });
  }
  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto to = on_host(outputs);
    auto own = on_host(inputs);
    return run("gather", inputs, flat(outputs), [&] { return gloo_->gather(to, own, options); });
  }
  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto to = on_host(outputs);
    auto own = on_host(inputs);
    return run("scatter", flat(inputs), outputs, [&] { return gloo_->scatter(to, own, options); });
  }
  WorkPointer reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto to = on_host(outputs);
    auto own = on_host(inputs);
    return run("reduce_scatter", flat(inputs), outputs, [&] { return gloo_->reduce_scatter(to, own, options); });
  }
  WorkPointer _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto to = on_host(output), own = on_host(input);
    return run("reduce_scatter", {input}, {output}, [&] { return gloo_->_reduce_scatter_base(to, own, options); });
  }
  WorkPointer reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    auto to = on_host(outputs), own = on_host(inputs);
    return run(
        "reduce_scatter", inputs, outputs, [&] { return gloo_->reduce_scatter_tensor_coalesced(to, own, options); });
  }
  WorkPointer alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes,
      const c10d::AllToAllOptions& options) override {
    auto to = on_host(output), own = on_host(input);
    return run(
        "alltoall", {input}, {output}, [&] { return gloo_->alltoall_base(to, own, to_sizes, from_sizes, options); });
  }
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto to = on_host(outputs), own = on_host(inputs);
    return run("alltoall", inputs, outputs, [&] { return gloo_->alltoall(to, own, options); });
  }
  WorkPointer send(Tensors& tensors, int to, int tag) override {
    auto own = on_host(tensors);
    return run("send", tensors, {}, [&] { return gloo_->send(own, to, tag); });
  }
  WorkPointer recv(Tensors& tensors, int from, int tag) override {
    auto own = on_host(tensors);
    return run("recv", {}, tensors, [&] { return gloo_->recv(own, from, tag); });
  }
  WorkPointer barrier(const c10d::BarrierOptions&) override { return gloo_->barrier(c10d::BarrierOptions()); }

 private:
  template <typename Launch>
  WorkPointer run(const char* name, const Tensors& inputs, const Tensors& outputs, const Launch& launch) {
    for (const auto& list : {inputs, outputs}) {
      for (const auto& tensor : list) {
        TORCH_CHECK(tensor.device().type() == kDevice, "simccl has no tensors of ", tensor.device());
      }
    }
    const auto device = (inputs.empty() ? outputs : inputs).at(0).device();
    auto& streams = Streams::all();
    const auto own = stream_of(device);
    const int number = streams.number(own);
    streams.wait(number, streams.clock(streams.number(current_stream(device.index()))));
    const auto work = streams.next(number);
    for (const auto& tensor : inputs) Memory::all().use(tensor, work, false, name);
    for (const auto& tensor : outputs) Memory::all().use(tensor, work, true, name);
    return c10::make_intrusive<Collective>(launch(), under_way_, own, streams.clock(number), inputs, outputs);
  }

  c10::Stream stream_of(c10::Device device) {
    const auto found = streams_.find(device.index());
    if (found != streams_.end()) return found->second;
    return streams_.emplace(device.index(), c10::impl::VirtualGuardImpl(kDevice).getNewStream(device)).first->second;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::unordered_map<c10::DeviceIndex, c10::Stream> streams_;
  std::shared_ptr<UnderWay> under_way_ = std::make_shared<UnderWay>();
};

}  // namespace sim
