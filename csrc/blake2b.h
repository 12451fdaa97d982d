// BLAKE2b with 32 bytes of digest and a person, as hashlib.blake2b has it (RFC 7693).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "table.h"

namespace kvtier {

constexpr size_t kPersonNbytes = 16;

// ``person`` has so many bytes at most.
Key blake2b(const std::byte* data, size_t nbytes, std::string_view person);

}  // namespace kvtier
