// Keys of the chunks of a prompt; see kvtier_core/builtin/chained.py.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

namespace kvtier {

// The key of each whole chunk from number ``first`` on: the digest of the key before it, the chunk's tokens and its
// extra bytes. ``parent`` is the key before the first. Raises ValueError if a token is no whole number of 32 bits.
nanobind::list chain(nanobind::handle parent, nanobind::handle tokens, size_t chunk_tokens, size_t first,
                     nanobind::dict extra, std::string_view person);

}  // namespace kvtier
