// What a warp does together, for the device and for the host, where tests run it. What each lane does by itself is given
// to `each_lane`, what the lanes tell each other is in `Lanes`, and all else is the same for all of them. On the device
// the lanes run at once; on the host one thread is all of them, one after the other.
#pragma once

#include <cstdint>

#include "pages.h"

namespace kvtier {

constexpr uint32_t kLanes = 32;

template <typename Run>
KVTIER_BOTH void each_lane(Run run) {
#ifdef __CUDA_ARCH__
  run(threadIdx.x % kLanes);
#else
  for (uint32_t lane = 0; lane < kLanes; ++lane) run(lane);
#endif
}

template <typename Run>
KVTIER_BOTH void first_lane(Run run) {
#ifdef __CUDA_ARCH__
  if (threadIdx.x % kLanes) return;
#endif
  run();
}

// What any lane has written before, all lanes may read or overwrite behind it.
KVTIER_BOTH void meet() {
#ifdef __CUDA_ARCH__
  __syncwarp();
#endif
}

KVTIER_BOTH uint32_t lowest_bit(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __ffs(static_cast<int>(bits)) - 1;
#else
  return static_cast<uint32_t>(__builtin_ctz(bits));
#endif
}

// A number of each lane, 0 at first. A lane touches its own; the others are functions of all.
class Lanes {
 public:
#ifdef __CUDA_ARCH__
  KVTIER_BOTH uint32_t& operator[](uint32_t) { return own_; }
  KVTIER_BOTH uint32_t of(uint32_t lane) const { return __shfl_sync(kAll, own_, static_cast<int>(lane)); }
  KVTIER_BOTH uint32_t highest() const { return __reduce_max_sync(kAll, own_); }
  KVTIER_BOTH uint32_t sum() const { return __reduce_add_sync(kAll, own_); }
  KVTIER_BOTH uint32_t not_zero() const { return __ballot_sync(kAll, own_ != 0); }

 private:
  static constexpr uint32_t kAll = ~0u;
  uint32_t own_ = 0;
#else
  KVTIER_BOTH uint32_t& operator[](uint32_t lane) { return each_[lane]; }
  KVTIER_BOTH uint32_t of(uint32_t lane) const { return each_[lane]; }
  KVTIER_BOTH uint32_t highest() const {
    uint32_t highest = 0;
    for (uint32_t each : each_) highest = each > highest ? each : highest;
    return highest;
  }
  KVTIER_BOTH uint32_t sum() const {
    uint32_t sum = 0;
    for (uint32_t each : each_) sum += each;
    return sum;
  }
  KVTIER_BOTH uint32_t not_zero() const {  // a bit of each lane
    uint32_t bits = 0;
    for (uint32_t lane = 0; lane < kLanes; ++lane) bits |= uint32_t{each_[lane] != 0} << lane;
    return bits;
  }

 private:
  uint32_t each_[kLanes] = {};
#endif
};

}  // namespace kvtier
