#include "copier.h"

#include <utility>

#include "copy.h"
#include "crc32.h"
#include "packed.h"

namespace kvtier {
namespace {

std::byte* at(uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace

Copier::Copier(std::vector<Layer> layers, uintptr_t shard, size_t slot_nbytes, size_t packed_nbytes)
    : layers_(std::move(layers)), shard_(shard), slot_nbytes_(slot_nbytes), packed_nbytes_(packed_nbytes) {
  for (const Layer& layer : layers_) chunk_nbytes_ += layer.nbytes * layer.blocks;
}

// Calls visit(page, offset, nbytes, next) in the order of the shard; `page` is null where no block is wanted. Pages that
// lie side by side in the engine too are one piece. `next` is the page behind it, or `page` itself.
template <typename Visit>
void Copier::each_piece(const Row& row, Visit visit) const {
  for (const Layer& layer : layers_) {
    const bool dense = layer.stride == layer.nbytes;
    const int64_t* const blocks = row.data() + layer.first;
    for (size_t i = 0, end; i < layer.blocks; i = end) {
      end = i + 1;
      const bool wanted = blocks[i] >= 0;
      while (dense && wanted && end < layer.blocks && blocks[end] == blocks[end - 1] + 1) end++;
      const auto page = [&](int64_t block) { return at(layer.base + static_cast<size_t>(block) * layer.stride); };
      visit(wanted ? page(blocks[i]) : nullptr, layer.offset + i * layer.nbytes, (end - i) * layer.nbytes,
            page(end < layer.blocks && blocks[end] >= 0 ? blocks[end] : blocks[i]));
    }
  }
}

std::vector<std::optional<uint32_t>> Copier::gather(const std::vector<Row>& rows,
                                                    const std::vector<int64_t>& slots) const {
  const Destination destination = destination_of(rows.size() * chunk_nbytes_);
  std::vector<std::optional<uint32_t>> checksums(rows.size());
  for (size_t i = 0; i < rows.size(); i++) {
    std::byte* const shard = at(shard_ + static_cast<size_t>(slots[i]) * slot_nbytes_);
    if (packed_nbytes_) {
      Packer packer(shard, packed_nbytes_, chunk_nbytes_, destination);
      each_piece(rows[i], [&](std::byte* page, size_t, size_t nbytes, const std::byte* next) {
        packer.add(page, nbytes, next);
      });
      if (packer.finish()) checksums[i] = packer.fill();
      continue;
    }
    uint32_t checksum = 0;
    each_piece(rows[i], [&](std::byte* page, size_t offset, size_t nbytes, const std::byte* next) {
      checksum = page ? crc32_copy(checksum, shard + offset, page, nbytes, destination, next)
                      : crc32(checksum, shard + offset, nbytes);
    });
    checksums[i] = checksum;
  }
  store_fence();
  return checksums;
}

bool Copier::scatter(const std::vector<Row>& rows, const std::vector<int64_t>& slots) const {
  const Destination destination = destination_of(rows.size() * chunk_nbytes_);
  bool whole = true;
  for (size_t i = 0; i < rows.size(); i++) {
    const std::byte* const shard = at(shard_ + static_cast<size_t>(slots[i]) * slot_nbytes_);
    if (packed_nbytes_) {
      Unpacker unpacker(shard, packed_nbytes_, chunk_nbytes_, destination);
      each_piece(rows[i], [&](std::byte* page, size_t, size_t nbytes, const std::byte*) {
        whole = unpacker.take(page, nbytes) && whole;
      });
      continue;
    }
    each_piece(rows[i], [&](std::byte* page, size_t offset, size_t nbytes, const std::byte*) {
      if (page) copy(page, shard + offset, nbytes, destination);
    });
  }
  store_fence();
  return whole;
}

}  // namespace kvtier
