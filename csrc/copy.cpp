#include "copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvtier {

#if defined(__SSE2__)

// Memory is read in blocks, which are written out again from the first-level cache. Streaming stores alone are slower
// than memcpy: reads and writes that take turns line by line are what hurts.
static size_t stream(std::byte* to, const std::byte* from, size_t nbytes) {
  constexpr size_t kBlock = 8192;
  size_t done = 0;
  while (nbytes - done >= 64) {
    const size_t end = done + std::min(kBlock, (nbytes - done) / 64 * 64);
    for (size_t i = done; i < end; i += 64) _mm_prefetch(from + i, _MM_HINT_T0);
    for (; done < end; done += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + done),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + done)));
  }
  return done;
}

void store_fence() { _mm_sfence(); }

#else

static size_t stream(std::byte*, const std::byte*, size_t) { return 0; }

void store_fence() {}

#endif

void copy(std::byte* to, const std::byte* from, size_t nbytes, Destination destination) {
  const bool aligned = reinterpret_cast<uintptr_t>(to) % 64 == 0;
  const size_t done = destination == Destination::kStreamed && aligned ? stream(to, from, nbytes) : 0;
  std::memcpy(to + done, from + done, nbytes - done);
}

}  // namespace kvtier
