// Copies in host memory.
#pragma once

#include <cstddef>

namespace kvtier {

// Whether what is written stays in the caches, for a reader that comes at once, or goes past them, which is faster
// when all that is copied is larger than they are.
enum class Destination { kCached, kStreamed };

// `to` and `from` do not overlap.
void copy(std::byte* to, const std::byte* from, size_t nbytes, Destination destination);

// Makes streamed copies visible to other threads. Call it before reporting that the copy is done.
void store_fence();

}  // namespace kvtier
