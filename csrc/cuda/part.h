// The pages of one part of a chunk, and the ways in which they are copied to slots and back.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "copies.h"
#include "device.h"
#include "pages.h"

namespace kvtier {

// The chunks of a job: row i has `width` block ids, group after group, or -1; its slot is slots[i].
struct Chunks {
  const int32_t* rows;
  const int32_t* slots;
  uint32_t count;
  uint32_t width;

  const int32_t* row(uint32_t i) const { return rows + uint64_t{i} * width; }
  bool whole(uint32_t i) const {
    return std::all_of(row(i), row(i) + width, [](int32_t block) { return block >= 0; });
  }
};

// On `kernels` pages are read and written; on `bus` bytes go to the host or come from there.
struct Streams {
  Stream kernels;
  Stream bus;
};

// Where the checksums of a store go, four bytes a chunk: on the device, and page-locked. 0: nowhere. Of packed shards so
// many flags follow: has a chunk no room? Their loads have one flag and no checksums: was a shard not packed?
struct Sums {
  uint64_t on_device;
  uint64_t told;
};

// Device memory in two halves, through which pages are copied: while one half is filled the other is emptied. For jobs
// of one direction, whose streams are always the same.
class Staging {
 public:
  struct Half {
    uint64_t base = 0;
    Event filled = nullptr, emptied = nullptr;
    bool used = false;
  };

  bool open(Device& device, uint64_t half_nbytes);
  void close(Device& device);
  uint64_t half_nbytes() const { return half_nbytes_; }
  Half& next() { return halves_[turn_++ % 2]; }

 private:
  uint64_t memory_ = 0, half_nbytes_ = 0;
  Half halves_[2];
  unsigned turn_ = 0;
};

class Part {
 public:
  // `layers` are in the order of the shard. `shards`: where this rank's shards lie in the slots. With `packed_nbytes`
  // they are packed, and each has that many bytes, a multiple of 16.
  Part(Device& device, std::vector<Layer> layers, const Shards& shards, const LockedPieces& pieces,
       uint64_t packed_nbytes)
      : device_(device), layers_(std::move(layers)), shards_(shards), pieces_(pieces), packed_nbytes_(packed_nbytes) {}
  ~Part();
  bool open();

  // Each enqueues the copies of a job. When it returns, `kernels` is behind all that touches pages, and `bus` behind
  // all that writes to slots, even if it failed half-way. False if it failed.

  // By copy engines, page by page. Pages that are neighbours on both sides are one copy.
  bool copy_directly(bool to_slots, const Chunks& chunks, const Streams& streams) const;
  // A kernel copies between pages and a half of the staging memory, copy engines between that and the slots. Of a store
  // of whole chunks what is staged may be summed: `sums` are there when `bus` has done all. Packed shards have both forms
  // in a half, and always `sums`, those of a load when `kernels` has done all; places without a page are zeros.
  bool copy_staged(bool to_slots, const Chunks& chunks, const Streams& streams, Staging& staging,
                   const Sums& sums) const;
  // A kernel copies between pages and slots: to pages from host memory, or either way if the slots lie on the device.
  bool copy_by_kernel(bool to_slots, const Chunks& chunks, const Streams& streams) const;

  bool can_stage(const Staging& staging) const;
  bool slots_on_device() const { return !pieces_.stride; }
  bool packs() const { return packed_nbytes_; }

 private:
  struct Slice;  // of a job, as much as a half holds

  bool list_pages(const Chunks& chunks, Copies& copies) const;
  bool list_shards(const Chunks& chunks, const Slice& slice, uint64_t half, Copies& copies) const;
  bool launch(unsigned blocks, bool to_slots, const Chunks& chunks, const Slice& slice, const Shards& shards,
              bool numbered, Stream stream) const;
  bool store_slice(const Chunks& chunks, const Slice& slice, const Streams& streams, Staging::Half& half,
                   const Sums& sums) const;
  bool sum_slice(const Slice& slice, uint64_t half, const Sums& sums, Stream stream) const;
  bool load_slice(const Chunks& chunks, const Slice& slice, const Streams& streams, Staging::Half& half,
                  const Sums& sums) const;
  bool clear_holes(const Chunks& chunks, const Slice& slice, uint64_t half, Stream stream) const;
  bool pack_slice(const Chunks& chunks, const Slice& slice, uint64_t half, const Sums& sums, Stream stream) const;
  bool begin_sums(bool to_slots, const Chunks& chunks, const Sums& sums, Stream stream) const;
  bool tell_sums(bool to_slots, const Chunks& chunks, const Sums& sums, const Streams& streams) const;
  Packing packing_of(const Slice& slice, uint64_t half) const;
  uint64_t begin_of(size_t layer) const { return layers_[layer].offset; }
  uint64_t end_of(size_t layer) const { return begin_of(layer) + layers_[layer].blocks * layers_[layer].nbytes; }
  uint64_t shard_nbytes() const { return layers_.empty() ? 0 : end_of(layers_.size() - 1); }
  bool order(Stream before, Event event, Stream after) const;

  Device& device_;
  const std::vector<Layer> layers_;
  const Shards shards_;
  const LockedPieces pieces_;
  const uint64_t packed_nbytes_;
  uint64_t on_device_ = 0;  // the layers again
  Event turn_ = nullptr;
};

}  // namespace kvtier
