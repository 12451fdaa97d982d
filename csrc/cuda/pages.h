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

// The pages of one layer. Block b lies at base + b * stride. In a shard its `blocks` pages lie side by side from
// `offset` on; their block ids are entries of a chunk's row, from entry `first` on.
struct Layer {
  uint64_t base;
  uint64_t stride;
  uint64_t nbytes;
  uint64_t offset;
  uint64_t first;
  uint64_t blocks;
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
constexpr uint32_t kBatch = 256;
// A warp copies this much of a page, and then of another: long pages are spread over many.
constexpr uint64_t kSegment = 16 << 10;

struct Batch {
  uint32_t count;
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

// What is read is read once, and nothing writes to it meanwhile; what is written is not read again soon.
template <typename Word>
KVTIER_BOTH Word read(const Word* from) {
  return *from;
}

template <typename Word>
KVTIER_BOTH void write(Word* to, Word word) {
  *to = word;
}

#ifdef __CUDA_ARCH__
template <>
__device__ __forceinline__ Wide read(const Wide* from) {
  Wide word;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u64 {%0, %1}, [%2];" : "=l"(word.low), "=l"(word.high) : "l"(from));
  return word;
}

template <>
__device__ __forceinline__ void write(Wide* to, Wide word) {
  asm volatile("st.global.cs.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(word.low), "l"(word.high) : "memory");
}
#endif

// Copies one lane's share: every lanes-th word, so that neighbouring lanes touch neighbouring words. Four are read
// before the first is written, because the bus to the host is long.
template <typename Word>
KVTIER_BOTH void copy_words(uint64_t to, uint64_t from, uint64_t nbytes, uint32_t lane, uint32_t lanes) {
  Word* target = reinterpret_cast<Word*>(to);
  const Word* source = reinterpret_cast<const Word*>(from);
  const uint64_t words = nbytes / sizeof(Word);
  uint64_t i = lane;
  for (; i + 3 * lanes < words; i += 4 * lanes) {
    const Word a = read(source + i), b = read(source + i + lanes);
    const Word c = read(source + i + 2 * lanes), d = read(source + i + 3 * lanes);
    write(target + i, a);
    write(target + i + lanes, b);
    write(target + i + 2 * lanes, c);
    write(target + i + 3 * lanes, d);
  }
  for (; i < words; i += lanes) write(target + i, read(source + i));
}

// Copies in the widest words that divide both addresses and the length.
KVTIER_BOTH void copy_bytes(uint64_t to, uint64_t from, uint64_t nbytes, uint32_t lane, uint32_t lanes) {
  const uint64_t all = to | from | nbytes;
  if (all % sizeof(Wide) == 0) {
    copy_words<Wide>(to, from, nbytes, lane, lanes);
  } else if (all % sizeof(uint32_t) == 0) {
    copy_words<uint32_t>(to, from, nbytes, lane, lanes);
  } else {
    copy_words<uint8_t>(to, from, nbytes, lane, lanes);
  }
}

// Copies one lane's share of a batch. A worker (a warp) copies whole segments, every workers-th of them; no page has
// more than `segments`. Pages of one layer that are neighbours in a slot go to neighbouring workers.
KVTIER_BOTH void copy_batch(const Batch& batch, const Shards& shards, const Layer* layers, uint32_t layer_count,
                            uint32_t segments, bool to_slots, uint32_t worker, uint32_t workers, uint32_t lane,
                            uint32_t lanes) {
  for (uint32_t item = worker; item < batch.count * layer_count * segments; item += workers) {
    const Layer& layer = layers[item / segments / batch.count];
    const Piece& piece = batch.pieces[item / segments % batch.count];
    const uint64_t begin = item % segments * kSegment;
    if (begin >= layer.nbytes) continue;
    const uint64_t nbytes = layer.nbytes - begin < kSegment ? layer.nbytes - begin : kSegment;
    const uint64_t page = page_of(layer, piece) + begin;
    const uint64_t place = place_of(shards, layer, piece) + begin;
    copy_bytes(to_slots ? place : page, to_slots ? page : place, nbytes, lane, lanes);
  }
}

}  // namespace kvtier
