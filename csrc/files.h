// Reads or writes places in many files at once, with io_uring (J. Axboe, "Efficient IO with io_uring", 2019).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace kvtier {

enum class Direction { kRead, kWrite };

struct Move {
  int fd;
  std::byte* memory;  // only read from if the direction is kWrite
  size_t nbytes;
  uint64_t at;  // where in the file
};

// Returns for each move the bytes moved, or -errno; fewer bytes than asked for only where a file that is read ends
// before. Returns nothing if this thread gets no ring. When it returns, no request is under way any more.
std::optional<std::vector<int64_t>> move_all(const std::vector<Move>& moves, Direction direction);

// Do this kernel and its security policy give this thread a ring?
bool ring_works();

}  // namespace kvtier
