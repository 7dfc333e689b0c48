// Which work comes after which. All of it runs at once here, in the order of its calls; on CUDA it runs on streams, and
// work of two streams may overlap unless one is told to wait for the other. So each stream has a vector clock, as in
// Mattern, "Virtual time and global states of distributed systems" (1989): how much it comes after of all streams' work.
#pragma once

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace sim {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

using Clock = std::vector<int64_t>;  // by stream's number

inline void join(Clock& own, const Clock& other) {
  if (own.size() < other.size()) own.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); ++i) own[i] = std::max(own[i], other[i]);
}

// A piece of work: the stream that it runs on, and its number among the work of that stream.
struct Work {
  int stream = -1;
  int64_t time = 0;

  bool is_before(const Clock& clock) const {
    return stream < 0 || (static_cast<size_t>(stream) < clock.size() && time <= clock[stream]);
  }
};

class Streams {
 public:
  static Streams& all() {
    static auto* instance = new Streams();  // outlives all tensors
    return *instance;
  }

  int number(c10::Stream stream) {
    std::lock_guard<std::mutex> guard(lock_);
    const auto key = std::make_pair(int(stream.device_index()), stream.id());
    const auto found = numbers_.find(key);
    return found != numbers_.end() ? found->second : numbers_.emplace(key, add()).first->second;
  }

  // The next piece of work of a stream comes after all that the host has waited for.
  Work next(int stream) {
    std::lock_guard<std::mutex> guard(lock_);
    auto& clock = clocks_[stream];
    join(clock, host_);
    return {stream, ++clock[stream]};
  }

  Clock clock(int stream) {
    std::lock_guard<std::mutex> guard(lock_);
    auto clock = clocks_[stream];
    join(clock, host_);
    return clock;
  }

  void wait(int stream, const Clock& for_these) {
    std::lock_guard<std::mutex> guard(lock_);
    join(clocks_[stream], for_these);
  }

  void host_waits(const Clock& for_these) {
    std::lock_guard<std::mutex> guard(lock_);
    join(host_, for_these);
  }

  void host_waits_for_all() {
    std::lock_guard<std::mutex> guard(lock_);
    for (const auto& clock : clocks_) join(host_, clock);
  }

 private:
  int add() {
    const auto number = static_cast<int>(clocks_.size());
    clocks_.emplace_back(number + 1, 0);
    return number;
  }

  std::mutex lock_;
  std::map<std::pair<int, c10::StreamId>, int> numbers_;
  std::vector<Clock> clocks_;
  Clock host_;  // of all threads together: what one has waited for is taken to be known to the others
};

}  // namespace sim
