// The code of the kernel and of the copy engines' lists on the CPU: one lane after the other, one copy after the other.
#include <cstring>

#include "copies.h"
#include "pages.h"

using namespace kvtier;

extern "C" void kernel_on_host(const Layer* layers, uint32_t layer_count, uint64_t shards, uint64_t slot_nbytes,
                               int to_slots, const Piece* pieces, uint32_t count, uint32_t workers, uint32_t lanes) {
  for (uint32_t first = 0; first < count; first += kBatch) {
    const Batch batch = batch_at(pieces, count, first);
    for (uint32_t worker = 0; worker < workers; ++worker)
      for (uint32_t lane = 0; lane < lanes; ++lane)
        copy_batch(batch, {shards, slot_nbytes}, layers, layer_count, to_slots != 0, worker, workers, lane, lanes);
  }
}

extern "C" uint64_t copies_on_host(const Layer* layers, uint32_t layer_count, uint64_t shards, uint64_t slot_nbytes,
                                   int to_slots, const Piece* pieces, uint32_t count) {
  const Copies copies =
      copies_of({layers, layers + layer_count}, {shards, slot_nbytes}, to_slots != 0, pieces, count);
  for (size_t i = 0; i < copies.nbytes.size(); ++i) std::memcpy(copies.to[i], copies.from[i], copies.nbytes[i]);
  return copies.nbytes.size();
}

extern "C" void page_on_host(uint64_t to, uint64_t from, uint64_t nbytes, uint32_t lanes) {
  for (uint32_t lane = 0; lane < lanes; ++lane) copy_page(to, from, nbytes, lane, lanes);
}
