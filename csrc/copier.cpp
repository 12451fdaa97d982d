#include "copier.h"

#include <utility>

#include "copy.h"
#include "crc32.h"

namespace kvtier {
namespace {

std::byte* at(uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace

Copier::Copier(std::vector<Layer> layers, uintptr_t shard, size_t slot_nbytes)
    : layers_(std::move(layers)), shard_(shard), slot_nbytes_(slot_nbytes) {
  for (const Layer& layer : layers_) chunk_nbytes_ += layer.nbytes * layer.blocks;
}

// Calls visit(page, place, nbytes, next) in the order of the slot; `page` is null where no block is wanted. Pages that
// lie side by side in the engine too are one piece. `next` is the page behind it, or `page` itself.
template <typename Visit>
void Copier::each_piece(const Row& row, int64_t slot, Visit visit) const {
  for (const Layer& layer : layers_) {
    const uintptr_t begin = shard_ + static_cast<size_t>(slot) * slot_nbytes_ + layer.offset;
    const bool dense = layer.stride == layer.nbytes;
    const int64_t* const blocks = row.data() + layer.first;
    for (size_t i = 0, end; i < layer.blocks; i = end) {
      end = i + 1;
      const bool wanted = blocks[i] >= 0;
      while (dense && wanted && end < layer.blocks && blocks[end] == blocks[end - 1] + 1) end++;
      const auto page = [&](int64_t block) { return at(layer.base + static_cast<size_t>(block) * layer.stride); };
      visit(wanted ? page(blocks[i]) : nullptr, at(begin + i * layer.nbytes), (end - i) * layer.nbytes,
            page(end < layer.blocks && blocks[end] >= 0 ? blocks[end] : blocks[i]));
    }
  }
}

std::vector<uint32_t> Copier::gather(const std::vector<Row>& rows, const std::vector<int64_t>& slots) const {
  const Destination destination = destination_of(rows.size() * chunk_nbytes_);
  std::vector<uint32_t> checksums(rows.size());
  for (size_t i = 0; i < rows.size(); i++)
    each_piece(rows[i], slots[i], [&](std::byte* page, std::byte* place, size_t nbytes, const std::byte* next) {
      checksums[i] = page ? crc32_copy(checksums[i], place, page, nbytes, destination, next)
                          : crc32(checksums[i], place, nbytes);
    });
  store_fence();
  return checksums;
}

void Copier::scatter(const std::vector<Row>& rows, const std::vector<int64_t>& slots) const {
  const Destination destination = destination_of(rows.size() * chunk_nbytes_);
  for (size_t i = 0; i < rows.size(); i++)
    each_piece(rows[i], slots[i], [&](std::byte* page, const std::byte* place, size_t nbytes, const std::byte*) {
      if (page) copy(page, place, nbytes, destination);
    });
  store_fence();
}

}  // namespace kvtier
