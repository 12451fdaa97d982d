// What the host does with the pieces of a job before it calls CUDA. It needs no CUDA, so the tests can run it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "pages.h"

namespace kvtier {

struct Copies {
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<size_t> nbytes;
};

// Does the page of `next` follow that of `piece` on both sides, so that one copy can move both?
inline bool follows(const Layer& layer, const Piece& piece, const Piece& next) {
  return layer.stride == layer.nbytes && next.slot == piece.slot && next.place == piece.place + 1 &&
         next.block == piece.block + 1;
}

// The copies of a job for the copy engines. Pages that lie side by side on both sides are one copy.
inline Copies copies_of(const std::vector<Layer>& layers, const Shards& shards, bool to_slots, const Piece* pieces,
                        uint32_t count) {
  Copies copies;
  for (const Layer& layer : layers) {
    for (uint32_t i = 0; i < count; ++i) {
      if (i && follows(layer, pieces[i - 1], pieces[i])) {
        copies.nbytes.back() += layer.nbytes;
        continue;
      }
      const uint64_t page = page_of(layer, pieces[i]);
      const uint64_t place = place_of(shards, layer, pieces[i]);
      copies.to.push_back(reinterpret_cast<void*>(to_slots ? place : page));
      copies.from.push_back(reinterpret_cast<const void*>(to_slots ? page : place));
      copies.nbytes.push_back(layer.nbytes);
    }
  }
  return copies;
}

// The pieces of one launch of the kernel, from `first` on.
inline Batch batch_at(const Piece* pieces, uint32_t count, uint32_t first) {
  Batch batch;
  batch.count = static_cast<int32_t>(std::min<uint32_t>(kBatch, count - first));
  std::copy_n(pieces + first, batch.count, batch.pieces);
  return batch;
}

}  // namespace kvtier
