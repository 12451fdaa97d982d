// Which byte goes where when pages are copied to slots and back. Compiled for the GPU, and for the host, where tests
// run it: with one lane after the other it copies the same bytes as with all lanes at once.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KVTIER_BOTH __host__ __device__ __forceinline__
#else
#define KVTIER_BOTH inline
#endif

namespace kvtier {

// The pages of one layer. Block b lies at base + b * stride. In a shard they lie side by side from `offset` on.
struct Layer {
  uint64_t base;
  uint64_t stride;
  uint64_t nbytes;
  uint64_t offset;
};

// This rank's shard of slot s begins at base + s * slot_nbytes.
struct Shards {
  uint64_t base;
  uint64_t slot_nbytes;
};

// One page of every layer of a group: the engine's block `block` has place `place` in the chunk in `slot`.
struct Piece {
  int32_t block;
  int32_t slot;
  int32_t place;
};

// The most pieces of one launch. They are its argument, of 4 KiB at most, so that nothing need outlive the call.
constexpr int32_t kBatch = 256;

struct Batch {
  int32_t count;
  Piece pieces[kBatch];
};

struct alignas(16) Wide {
  uint64_t low, high;
};

KVTIER_BOTH uint64_t page_of(const Layer& layer, const Piece& piece) {
  return layer.base + static_cast<uint64_t>(piece.block) * layer.stride;
}

KVTIER_BOTH uint64_t place_of(const Shards& shards, const Layer& layer, const Piece& piece) {
  return shards.base + static_cast<uint64_t>(piece.slot) * shards.slot_nbytes + layer.offset +
         static_cast<uint64_t>(piece.place) * layer.nbytes;
}

// Copies one lane's share: every lanes-th word, so that neighbouring lanes touch neighbouring words.
template <typename Word>
KVTIER_BOTH void copy_words(uint64_t to, uint64_t from, uint64_t nbytes, uint32_t lane, uint32_t lanes) {
  Word* __restrict__ target = reinterpret_cast<Word*>(to);
  const Word* __restrict__ source = reinterpret_cast<const Word*>(from);
  const uint64_t words = nbytes / sizeof(Word);
#ifdef __CUDA_ARCH__
#pragma unroll 4
#endif
  for (uint64_t i = lane; i < words; i += lanes) target[i] = source[i];
}

// Copies in the widest words that divide both addresses and the length.
KVTIER_BOTH void copy_page(uint64_t to, uint64_t from, uint64_t nbytes, uint32_t lane, uint32_t lanes) {
  const uint64_t all = to | from | nbytes;
  if (all % sizeof(Wide) == 0) {
    copy_words<Wide>(to, from, nbytes, lane, lanes);
  } else if (all % sizeof(uint32_t) == 0) {
    copy_words<uint32_t>(to, from, nbytes, lane, lanes);
  } else {
    copy_words<uint8_t>(to, from, nbytes, lane, lanes);
  }
}

// Copies one lane's share of a batch. A worker (a warp) copies whole pages, every workers-th of them; pages of one
// layer that are neighbours in a slot go to neighbouring workers.
KVTIER_BOTH void copy_batch(const Batch& batch, const Shards& shards, const Layer* layers, uint32_t layer_count,
                            bool to_slots, uint32_t worker, uint32_t workers, uint32_t lane, uint32_t lanes) {
  const uint32_t count = static_cast<uint32_t>(batch.count);
  for (uint32_t item = worker; item < count * layer_count; item += workers) {
    const Layer& layer = layers[item / count];
    const Piece& piece = batch.pieces[item % count];
    const uint64_t page = page_of(layer, piece);
    const uint64_t place = place_of(shards, layer, piece);
    copy_page(to_slots ? place : page, to_slots ? page : place, layer.nbytes, lane, lanes);
  }
}

}  // namespace kvtier
