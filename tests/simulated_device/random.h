// The device's own random numbers: those of the CPU's generator, from a state of their own.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <unordered_map>
#include <vector>

#include "memory.h"

namespace sim {

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) : at::CPUGeneratorImpl() {
    device_ = c10::Device(kDevice, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
  void move(c10::Device device) { device_ = device; }
};

inline const at::Generator& default_generator(c10::DeviceIndex index) {
  static std::unordered_map<c10::DeviceIndex, at::Generator> generators;
  if (index < 0) index = current_device;
  auto found = generators.find(index);
  if (found == generators.end()) found = generators.emplace(index, at::make_generator<Generator>(index)).first;
  return found->second;
}

// While it lives, an operator of the CPU draws from the device's generators.
class DrawsThere {
 public:
  DrawsThere(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> values, c10::DeviceIndex device) {
    for (const auto& value : values) {
      if (!value.isGenerator() || value.toGenerator().device().type() != kDevice) continue;
      given_ = value.toGenerator();
      of_ = given_.device();
      static_cast<Generator*>(given_.unsafeGetGeneratorImpl())->move(c10::Device(c10::kCPU));
    }
    if (given_.defined() || !op.hasTag(at::Tag::nondeterministic_seeded)) return;
    own_ = default_generator(device);
    before_ = host().get_state();
    host().set_state(own_.get_state());
  }
  ~DrawsThere() {
    if (given_.defined()) static_cast<Generator*>(given_.unsafeGetGeneratorImpl())->move(of_);
    if (!own_.defined()) return;
    own_.set_state(host().get_state());
    host().set_state(before_);
  }
  DrawsThere(const DrawsThere&) = delete;
  DrawsThere& operator=(const DrawsThere&) = delete;

 private:
  static at::Generator host() { return at::detail::getDefaultCPUGenerator(); }

  at::Generator given_, own_;
  c10::Device of_ = c10::Device(c10::kCPU);
  at::Tensor before_;
};

}  // namespace sim
