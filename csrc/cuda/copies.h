// Copies for the device's copy engines: neighbours become one copy, many go with one call, and what the driver refuses
// together is tried one by one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device.h"

namespace kvtier {

// Host memory is page-locked in pieces, of which one begins every `stride` bytes from `base` on. No copy reaches from
// one into the next, which drivers refuse; and none is so long that a token of the engine waits for it. A stride of 0:
// it is memory of the device.
struct LockedPieces {
  uint64_t base;
  uint64_t stride;
};

class Copies {
 public:
  Copies(Device& device, const LockedPieces& pieces, bool to_host, Stream stream)
      : device_(device), pieces_(pieces), to_host_(to_host), stream_(stream) {}

  // Some are enqueued at once, so that the device copies while the rest is listed.
  bool add(uint64_t host, uint64_t on_device, uint64_t nbytes);
  bool flush();

 private:
  // Longer calls crash some drivers, or hang in them: 580.159.04 at 51 828 copies (vLLM 49276).
  static constexpr size_t kMost = 2048;
  // Below this, copy engines are shared with the engine's own copies better if asked to (cuDF 23674).
  static constexpr uint64_t kShort = 128 << 10;

  bool append(uint64_t host, uint64_t on_device, uint64_t nbytes);
  Result enqueue_batch() const;
  bool enqueue_each() const;

  Device& device_;
  const LockedPieces pieces_;
  const bool to_host_;
  const Stream stream_;
  size_t count_ = 0;
  uint64_t nbytes_ = 0;
  uint64_t to_[kMost], from_[kMost];
  size_t sizes_[kMost];
};

}  // namespace kvtier
