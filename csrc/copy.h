// Copies in host memory.
#pragma once

#include <cstddef>

namespace kvtier {

// Whether what is written stays in the caches, for a reader that comes at once, or goes past them, which is faster
// when all that is copied is larger than they are.
enum class Destination { kCached, kStreamed };

// Pieces of 4 MiB or more would push each other out of the caches before anything reads what was copied.
constexpr Destination destination_of(size_t nbytes) {
  return nbytes < (size_t{4} << 20) ? Destination::kCached : Destination::kStreamed;
}

// `to` and `from` do not overlap.
void copy(std::byte* to, const std::byte* from, size_t nbytes, Destination destination);

// Makes streamed copies visible to other threads. Call it before reporting that the copy is done.
void store_fence();

}  // namespace kvtier
