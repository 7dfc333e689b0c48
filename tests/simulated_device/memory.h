// The memory of the device, and the pinned memory of the host. A block knows what used it last, so that work that may
// overlap with that is an error; memory that is given back is handed out again, as CUDA's allocator does, at once to the
// stream that it was made on.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>

#include "streams.h"

namespace sim {

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local std::unordered_map<c10::DeviceIndex, c10::StreamId> current_streams;

inline c10::Stream current_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device), current_streams[device]);
}

struct Use {
  Work work;
  std::string what;
};

struct Block {
  size_t size = 0;
  int stream = -1;  // on which it was made
  Use written;
  std::vector<Use> read;  // since it was written, the latest of each stream
  std::vector<int> recorded;  // streams, by record_stream
};

class Memory {
 public:
  static Memory& all() {
    static auto* instance = new Memory();  // outlives all tensors
    return *instance;
  }

  void* allocate(size_t size) {
    const int stream = Streams::all().number(current_stream(current_device));
    std::lock_guard<std::mutex> guard(lock_);
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        limit == 0 || allocated + size <= limit,
        "sim out of memory. Tried to allocate ", size, " bytes; ", allocated, " of ", limit, " are in use.");
    void* pointer = std::aligned_alloc(64, rounded(size));
    TORCH_CHECK(pointer != nullptr, "the host has no memory left for the simulated device");
    Block block;
    // What used the memory before: of a block of this size that the stream has given back.
    auto& free = free_[{stream, rounded(size)}];
    if (!free.empty()) {
      block = std::move(free.back());
      free.pop_back();
    }
    block.size = size;
    block.stream = stream;
    blocks_[pointer] = std::move(block);
    allocated += size;
    peak = std::max(peak, allocated);
    return pointer;
  }

  void release(void* pointer) {
    {
      std::lock_guard<std::mutex> guard(lock_);
      auto found = blocks_.find(pointer);
      if (found == blocks_.end()) return;
      auto& block = found->second;
      allocated -= block.size;
      // The allocator does not hand it out before recorded streams have done with it.
      const auto is_waited_for = [&](const Use& use) {
        return std::find(block.recorded.begin(), block.recorded.end(), use.work.stream) != block.recorded.end();
      };
      if (is_waited_for(block.written)) block.written = {};
      block.read.erase(std::remove_if(block.read.begin(), block.read.end(), is_waited_for), block.read.end());
      block.recorded.clear();
      auto& free = free_[{block.stream, rounded(block.size)}];
      if (free.size() < kMostFree) free.push_back(std::move(block));
      blocks_.erase(found);
    }
    std::free(pointer);
  }

  void use(const at::Tensor& tensor, const Work& work, bool writes, const std::string& what) {
    if (!tensor.defined() || tensor.device().type() != kDevice || !tensor.has_storage()) return;
    use(tensor.storage().data(), work, writes, what);
  }

  // Notes a use of a block, and raises where it may overlap with another one.
  void use(const void* pointer, const Work& work, bool writes, const std::string& what) {
    const auto clock = Streams::all().clock(work.stream);
    std::lock_guard<std::mutex> guard(lock_);
    const auto found = blocks_.find(const_cast<void*>(pointer));
    if (found == blocks_.end()) return;
    auto& block = found->second;
    check(block.written, clock, work, what, writes ? "writes" : "reads", "writing");
    if (writes) {
      for (const auto& use : block.read) check(use, clock, work, what, "writes", "reading");
      block.read.clear();
      block.written = {work, what};
      return;
    }
    for (auto& use : block.read) {
      if (use.work.stream == work.stream) {
        use = {work, what};
        return;
      }
    }
    block.read.push_back({work, what});
  }

  void record(const void* pointer, int stream) {
    std::lock_guard<std::mutex> guard(lock_);
    const auto found = blocks_.find(const_cast<void*>(pointer));
    if (found != blocks_.end()) found->second.recorded.push_back(stream);
  }

  std::pair<size_t, size_t> figures() {
    std::lock_guard<std::mutex> guard(lock_);
    return {allocated, peak};
  }

  void reset_peak() {
    std::lock_guard<std::mutex> guard(lock_);
    peak = allocated;
  }

  size_t limit = 0;  // bytes; 0 is none

 private:
  static constexpr size_t kMostFree = 64;  // blocks of one size, for each stream

  static size_t rounded(size_t size) { return (size + 511) / 512 * 512; }  // as CUDA's

  static void check(
      const Use& former, const Clock& clock, const Work& work, const std::string& what, const char* does,
      const char* may_be) {
    TORCH_CHECK(
        former.work.is_before(clock),
        "race: ", what, " on stream ", work.stream, " ", does, " memory that ", former.what, " on stream ",
        former.work.stream, " may still be ", may_be, ": the one has not waited for the other.");
  }

  std::mutex lock_;
  std::unordered_map<void*, Block> blocks_;
  std::map<std::pair<int, size_t>, std::vector<Block>> free_;
  size_t allocated = 0, peak = 0;  // bytes
};

inline void release(void* pointer) { Memory::all().release(pointer); }

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(kDevice, current_device);
    if (size == 0) return {nullptr, nullptr, &release, device};
    void* pointer = Memory::all().allocate(size);
    return {pointer, pointer, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

// Pinned memory of the host: that of the CPU's allocator, whose addresses are known.
inline std::mutex pinned_lock;
inline std::unordered_map<void*, size_t> pinned_blocks;

inline void release_pinned(void* pointer) {
  {
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned_blocks.erase(pointer);
  }
  std::free(pointer);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* pointer = std::aligned_alloc(64, (size + 64) / 64 * 64);
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned_blocks[pointer] = size;
    return {pointer, pointer, &release_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

inline bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  for (const auto& [start, size] : pinned_blocks) {
    if (data >= start && data < static_cast<const char*>(start) + std::max<size_t>(size, 1)) return true;
  }
  return false;
}

}  // namespace sim
