// CRC-32 as zlib and PNG compute it (reflected polynomial 0xEDB88320), as fast as the processor can.
#pragma once

#include <cstddef>
#include <cstdint>

#include "copy.h"

namespace kvtier {

// The checksum of `nbytes` more after data whose checksum is `crc`, which is 0 at the start.
uint32_t crc32(uint32_t crc, const std::byte* data, size_t nbytes);

// The same, while copying the data in one pass. What is read after it begins at `next`, as far as that is known: it is
// fetched into the caches meanwhile.
uint32_t crc32_copy(uint32_t crc, std::byte* to, const std::byte* from, size_t nbytes, Destination destination,
                    const std::byte* next);

// The checksum of two pieces one after the other, from the checksum of each and the length of the second.
uint32_t crc32_combine(uint32_t first, uint32_t second, uint64_t second_nbytes);

// The method in use on this processor: "vpclmulqdq", "pclmulqdq" or "table".
const char* crc32_method();

}  // namespace kvtier
