// BLAKE2b with a digest of 32 bytes and a personalization, as hashlib.blake2b computes it (RFC 7693).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "table.h"

namespace kvtier {

constexpr size_t kPersonNbytes = 16;

// ``person`` has at most kPersonNbytes bytes.
Key blake2b(const std::byte* data, size_t nbytes, std::string_view person);

}  // namespace kvtier
