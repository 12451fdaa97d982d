// Many files at once, each from its beginning, to and from memory: io_uring (J. Axboe, "Efficient IO with io_uring", 2019).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace kvtier {

enum class Direction { kRead, kWrite };

struct Move {
  int fd;
  std::byte* memory;  // only read from where it is written to the file
  size_t nbytes;
};

// Of each the bytes that were moved, or -errno. Fewer than asked for only where a file that is read ends before.
// Nothing if this thread gets no ring.
std::optional<std::vector<int64_t>> move_all(const std::vector<Move>& moves, Direction direction);

// Do this kernel, and whoever guards it, give this thread a ring?
bool ring_works();

}  // namespace kvtier
