#include "part.h"

namespace kvtier {
namespace {

// Few, but enough to fill the bus: the other multiprocessors stay with the engine.
constexpr unsigned kBlocksOnBus = 16;
// Over the bus one launch copies at most so much, or one page of each layer: 0.1 ms, then others may have their turn.
constexpr uint64_t kMostOnBus = 4 << 20;
// Halves, and shards in them, begin at multiples of this.
constexpr uint64_t kAlignment = 256;

uint64_t aligned(uint64_t nbytes) { return (nbytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

bool Staging::open(Device& device, uint64_t half_nbytes) {
  half_nbytes_ = half_nbytes;
  if (!device.call(&Driver::allocate, "allocate memory to stage copies in", &memory_, 2 * aligned(half_nbytes)))
    return false;
  for (Half& half : halves_) {
    half.base = memory_ + (&half - halves_) * aligned(half_nbytes);
    if (!device.call(&Driver::create_event, "create an event", &half.filled, kEventWithoutTiming) ||
        !device.call(&Driver::create_event, "create an event", &half.emptied, kEventWithoutTiming))
      return false;
  }
  return true;
}

void Staging::close(Device& device) {
  for (Half& half : halves_) {
    if (half.filled) device.driver().destroy_event(half.filled);
    if (half.emptied) device.driver().destroy_event(half.emptied);
  }
  if (memory_) device.driver().free(memory_);
}

struct Part::Slice {
  uint32_t chunk, chunk_end;
  size_t layer, layer_end;
  uint64_t shard_nbytes;  // from one shard to the next in a half
};

bool Part::open() {
  if (!device_.call(&Driver::create_event, "create an event", &turn_, kEventWithoutTiming)) return false;
  const size_t nbytes = layers_.size() * sizeof(Layer);
  if (!nbytes) return true;
  // A short write returns before it has arrived, and the streams that will read it do not wait for this one.
  return device_.call(&Driver::allocate, "allocate memory for the layers", &on_device_, nbytes) &&
         device_.call(&Driver::write, "write the layers", on_device_, layers_.data(), nbytes) &&
         device_.call(&Driver::synchronize, "wait for the layers", nullptr);
}

Part::~Part() {
  if (turn_) device_.driver().destroy_event(turn_);
  if (on_device_) device_.driver().free(on_device_);
}

bool Part::order(Stream before, Event event, Stream after) const {
  return device_.call(&Driver::record, "record an event", event, before) &&
         device_.call(&Driver::wait, "wait for an event", after, event, 0u);
}

bool Part::copy_directly(bool to_slots, const Chunks& chunks, const Streams& streams) const {
  if (!order(streams.kernels, turn_, streams.bus)) return false;
  Copies copies(device_, pieces_, to_slots, streams.bus);
  const bool listed = list_pages(chunks, copies);
  return order(streams.bus, turn_, streams.kernels) && listed;
}

bool Part::list_pages(const Chunks& chunks, Copies& copies) const {
  for (uint32_t i = 0; i < chunks.count; ++i) {
    const int32_t* row = chunks.row(i);
    for (const Layer& layer : layers_) {
      for (uint64_t place = 0; place < layer.blocks; ++place) {
        const int32_t block = row[layer.first + place];
        if (block < 0) continue;
        const Piece piece = {block, chunks.slots[i], static_cast<int32_t>(place)};
        if (!copies.add(place_of(shards_, layer, piece), page_of(layer, piece), layer.nbytes)) return false;
      }
    }
  }
  return copies.flush();
}

bool Part::copy_by_kernel(bool to_slots, const Chunks& chunks, const Streams& streams) const {
  const Slice all = {0, chunks.count, 0, layers_.size(), 0};
  const unsigned blocks = slots_on_device() ? kBlocksOnDevice : kBlocksOnBus;
  const bool copied = launch(blocks, to_slots, chunks, all, shards_, false, streams.kernels);
  const bool ordered = !to_slots || order(streams.kernels, turn_, streams.bus);
  return ordered && copied;
}

// The slots are numbered from the first chunk of the slice on if the shards are those in a half.
bool Part::launch(unsigned blocks, bool to_slots, const Chunks& chunks, const Slice& slice, const Shards& shards,
                  bool numbered, Stream stream) const {
  Batch batch;
  for (size_t begin = slice.layer, end; begin < slice.layer_end; begin = end) {
    const Layer& group = layers_[begin];  // its layers share block ids
    uint64_t longest = 0, together = 0;
    for (end = begin; end < slice.layer_end && layers_[end].first == group.first; ++end) {
      longest = std::max(longest, layers_[end].nbytes);
      together += layers_[end].nbytes;
    }
    const uint64_t most = blocks == kBlocksOnBus ? std::clamp<uint64_t>(kMostOnBus / together, 1, kBatch) : kBatch;
    const auto* layers = reinterpret_cast<const Layer*>(on_device_) + begin;
    const auto enqueue = [&] {
      const bool done = !batch.count || device_.launch(blocks, batch, shards, layers, end - begin,
                                                       (longest + kSegment - 1) / kSegment, to_slots, stream);
      batch.count = 0;
      return done;
    };
    batch.count = 0;
    for (uint32_t i = slice.chunk; i < slice.chunk_end; ++i) {
      const int32_t* row = chunks.row(i) + group.first;
      const int32_t slot = numbered ? static_cast<int32_t>(i - slice.chunk) : chunks.slots[i];
      for (uint64_t place = 0; place < group.blocks; ++place) {
        if (row[place] < 0) continue;
        batch.pieces[batch.count++] = {row[place], slot, static_cast<int32_t>(place)};
        if (batch.count == most && !enqueue()) return false;
      }
    }
    if (!enqueue()) return false;
  }
  return true;
}

bool Part::can_stage(const Staging& staging) const {
  const auto fits = [&](const Layer& layer) { return aligned(layer.blocks * layer.nbytes) <= staging.half_nbytes(); };
  const uint64_t both = aligned(shard_nbytes()) + aligned(packed_nbytes_);
  return device_.has_kernels() &&
         (packs() ? both <= staging.half_nbytes() : std::all_of(layers_.begin(), layers_.end(), fits));
}

bool Part::copy_staged(bool to_slots, const Chunks& chunks, const Streams& streams, Staging& staging,
                       const Sums& sums) const {
  bool done = !sums.told || begin_sums(to_slots, chunks, sums, streams.kernels);
  for (size_t layer = 0, layer_end; layer < layers_.size(); layer = layer_end) {
    layer_end = layer + 1;
    while (layer_end < layers_.size() &&
           (packs() || aligned(end_of(layer_end) - begin_of(layer)) <= staging.half_nbytes()))
      ++layer_end;
    const uint64_t shard = aligned(end_of(layer_end - 1) - begin_of(layer));
    const uint64_t fit = staging.half_nbytes() / (shard + aligned(packed_nbytes_));
    const uint32_t together = static_cast<uint32_t>(std::max<uint64_t>(1, fit));
    for (uint32_t chunk = 0; chunk < chunks.count && done; chunk += together) {
      const Slice slice = {chunk, std::min(chunks.count, chunk + together), layer, layer_end, shard};
      Staging::Half& half = staging.next();
      done = to_slots ? store_slice(chunks, slice, streams, half, sums) : load_slice(chunks, slice, streams, half, sums);
    }
  }
  if (done && sums.told) done = tell_sums(to_slots, chunks, sums, streams);
  // Only after a failure is there a copy that the other stream is not behind yet.
  if (!done) order(to_slots ? streams.kernels : streams.bus, turn_, to_slots ? streams.bus : streams.kernels);
  return done;
}

bool Part::begin_sums(bool to_slots, const Chunks& chunks, const Sums& sums, Stream stream) const {
  if (!to_slots) return device_.clear(sums.on_device, 1, stream);
  const uint64_t nbytes = packs() ? packed_nbytes_ : shard_nbytes();
  return device_.begin_checksums(sums.on_device, chunks.count, nbytes, stream) &&
         (!packs() || device_.clear(sums.on_device + chunks.count * sizeof(uint32_t), chunks.count, stream));
}

bool Part::tell_sums(bool to_slots, const Chunks& chunks, const Sums& sums, const Streams& streams) const {
  if (!to_slots) return device_.tell(sums.on_device, 1, sums.told, streams.kernels);
  return order(streams.kernels, turn_, streams.bus) &&
         device_.tell(sums.on_device, uint64_t{chunks.count} * (packs() ? 2 : 1), sums.told, streams.bus);
}

// Both forms of its shards, side by side.
Packing Part::packing_of(const Slice& slice, uint64_t half) const {
  const uint32_t count = slice.chunk_end - slice.chunk;
  const uint64_t packed = half + count * slice.shard_nbytes;
  return {half, slice.shard_nbytes, shard_nbytes(), packed, aligned(packed_nbytes_), packed_nbytes_, count};
}

bool Part::store_slice(const Chunks& chunks, const Slice& slice, const Streams& streams, Staging::Half& half,
                       const Sums& sums) const {
  if (half.used && !device_.call(&Driver::wait, "wait for an event", streams.kernels, half.emptied, 0u)) return false;
  const Shards shards = {half.base - begin_of(slice.layer), slice.shard_nbytes};
  Copies copies(device_, pieces_, true, streams.bus);
  const bool copied = (!packs() || clear_holes(chunks, slice, half.base, streams.kernels)) &&
                      launch(kBlocksOnDevice, true, chunks, slice, shards, true, streams.kernels) &&
                      (!packs() || pack_slice(chunks, slice, half.base, sums, streams.kernels)) &&
                      order(streams.kernels, half.filled, streams.bus) &&
                      (!sums.told || sum_slice(slice, half.base, sums, streams.kernels)) &&
                      list_shards(chunks, slice, half.base, copies);
  half.used = true;
  return device_.call(&Driver::record, "record an event", half.emptied, streams.bus) && copied;
}

// Where no page is gathered, a packed shard has zeros.
bool Part::clear_holes(const Chunks& chunks, const Slice& slice, uint64_t half, Stream stream) const {
  for (uint32_t i = slice.chunk; i < slice.chunk_end; ++i) {
    const uint64_t staged = half + (i - slice.chunk) * slice.shard_nbytes;
    if (!chunks.whole(i) && !device_.clear(staged, slice.shard_nbytes / sizeof(uint32_t), stream)) return false;
  }
  return true;
}

bool Part::pack_slice(const Chunks& chunks, const Slice& slice, uint64_t half, const Sums& sums, Stream stream) const {
  const uint64_t overfull = sums.on_device + (uint64_t{chunks.count} + slice.chunk) * sizeof(uint32_t);
  return device_.pack(packing_of(slice, half), overfull, stream);
}

// Beside the copies to the slots. The next gather into this half comes later on the same stream.
bool Part::sum_slice(const Slice& slice, uint64_t half, const Sums& sums, Stream stream) const {
  const uint64_t begin = begin_of(slice.layer), end = end_of(slice.layer_end - 1);
  Ranges ranges = {half, slice.shard_nbytes, end - begin, shard_nbytes() - end, slice.chunk_end - slice.chunk};
  if (packs()) {
    const Packing packing = packing_of(slice, half);
    ranges = {packing.packed, packing.packed_stride, packed_nbytes_, 0, packing.count};
  }
  return device_.add_checksums(ranges, sums.on_device + slice.chunk * sizeof(uint32_t), stream);
}

bool Part::load_slice(const Chunks& chunks, const Slice& slice, const Streams& streams, Staging::Half& half,
                      const Sums& sums) const {
  if (half.used && !device_.call(&Driver::wait, "wait for an event", streams.bus, half.emptied, 0u)) return false;
  const Shards shards = {half.base - begin_of(slice.layer), slice.shard_nbytes};
  Copies copies(device_, pieces_, false, streams.bus);
  const bool copied = list_shards(chunks, slice, half.base, copies) &&
                      order(streams.bus, half.filled, streams.kernels) &&
                      (!packs() || device_.unpack(packing_of(slice, half.base), sums.on_device, streams.kernels)) &&
                      launch(kBlocksOnDevice, false, chunks, slice, shards, true, streams.kernels);
  half.used = true;
  return device_.call(&Driver::record, "record an event", half.emptied, streams.kernels) && copied;
}

// A whole shard is one copy; where blocks are not wanted, their places in the slot are left as they are.
bool Part::list_shards(const Chunks& chunks, const Slice& slice, uint64_t half, Copies& copies) const {
  const uint64_t begin = begin_of(slice.layer);
  for (uint32_t i = slice.chunk; i < slice.chunk_end; ++i) {
    const int32_t* row = chunks.row(i);
    const uint64_t slot = shards_.base + static_cast<uint64_t>(chunks.slots[i]) * shards_.slot_nbytes;
    const uint64_t staged = half + (i - slice.chunk) * slice.shard_nbytes;
    if (packs()) {
      const Packing packing = packing_of(slice, half);
      if (!copies.add(slot, packing.packed + (i - slice.chunk) * packing.packed_stride, packed_nbytes_)) return false;
      continue;
    }
    if (chunks.whole(i)) {
      if (!copies.add(slot + begin, staged, end_of(slice.layer_end - 1) - begin)) return false;
      continue;
    }
    for (size_t number = slice.layer; number < slice.layer_end; ++number) {
      const Layer& layer = layers_[number];
      for (uint64_t place = 0; place < layer.blocks; ++place) {
        const uint64_t at = layer.offset + place * layer.nbytes;
        if (row[layer.first + place] < 0) continue;
        if (!copies.add(slot + at, staged + at - begin, layer.nbytes)) return false;
      }
    }
  }
  return copies.flush();
}

}  // namespace kvtier
