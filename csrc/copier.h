// Copies an engine's pages to slots of an arena and back, both in host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "copy.h"

namespace kvtier {

// The pages of one layer. Block b lies at base + b * stride. The layer's block ids are `blocks` entries of a chunk's
// row, from entry `first` on; in a slot its pages lie side by side from `offset` on.
struct Layer {
  uintptr_t base;
  size_t stride;
  size_t nbytes;
  size_t offset;
  size_t first;
  size_t blocks;
};

// The block ids of one chunk, group after group. No page is copied for a negative one.
using Row = std::vector<int64_t>;

// Addresses are raw: the caller has checked that every block and every slot exists, and keeps the memory alive. Any
// thread may call, several at once.
class Copier {
 public:
  // `shard` is the address of this rank's shard in slot 0; the next slot's is `slot_nbytes` behind it. Unless
  // `packed_nbytes` is 0, shards are packed (packed.h), and each has `packed_nbytes` bytes.
  Copier(std::vector<Layer> layers, uintptr_t shard, size_t slot_nbytes, size_t packed_nbytes = 0);

  // Pages to slots. Returns the CRC-32 of what then lies in each slot's shard, places without a page included; it is
  // computed in the same pass. A shard whose pages do not fit into `packed_nbytes` has none, and undefined content.
  std::vector<std::optional<uint32_t>> gather(const std::vector<Row>& rows, const std::vector<int64_t>& slots) const;
  // Slots to pages. Returns false if one was not packed.
  bool scatter(const std::vector<Row>& rows, const std::vector<int64_t>& slots) const;

 private:
  template <typename Visit>
  void each_piece(const Row& row, Visit visit) const;

  std::vector<Layer> layers_;
  size_t chunk_nbytes_ = 0;
  uintptr_t shard_;
  size_t slot_nbytes_;
  size_t packed_nbytes_;
};

}  // namespace kvtier
