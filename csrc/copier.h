// Pages of an engine to slots of an arena and back, both in host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy.h"

namespace kvtier {

// The pages of one layer: block b lies at base + b * stride. In a slot its `row` pages lie side by side from `offset` on.
struct Layer {
  uintptr_t base;
  size_t stride;
  size_t nbytes;
  size_t offset;
};

using Row = std::vector<int64_t>;  // block ids of one chunk; a negative one is a hole, which is not copied

// Addresses are raw: whoever calls has checked that every block and every slot exists, and keeps the memory alive.
class Copier {
 public:
  // `shard` is where the pages of slot 0 begin, `slot_nbytes` the way from one slot to the next.
  Copier(std::vector<Layer> layers, size_t row, uintptr_t shard, size_t slot_nbytes);

  // The CRC-32 of what then lies in each slot's shard, holes included: summed in the same pass.
  std::vector<uint32_t> gather(const std::vector<Row>& rows, const std::vector<int64_t>& slots) const;
  void scatter(const std::vector<Row>& rows, const std::vector<int64_t>& slots) const;

 private:
  Destination destination_of(size_t chunks) const;
  template <typename Visit>
  void each_piece(const Row& row, int64_t slot, Visit visit) const;

  std::vector<Layer> layers_;
  size_t row_;
  size_t chunk_nbytes_ = 0;
  uintptr_t shard_;
  size_t slot_nbytes_;
};

}  // namespace kvtier
