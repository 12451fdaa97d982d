// Copies in host memory.
#pragma once

#include <cstddef>

namespace kvtier {

// Where the destination goes: into the caches, for somebody who reads it at once, or past them, which is faster when
// what is copied in all is larger than they are.
enum class Destination { kCached, kStreamed };

void copy(std::byte* to, const std::byte* from, size_t nbytes, Destination destination);

// Nobody may be told of a streamed copy before this has been called.
void store_fence();

}  // namespace kvtier
