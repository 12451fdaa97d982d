// Keys of the chunks of a prompt; see kvtier_core/builtin/chained.py.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

namespace kvtier {

// One key per full chunk from number ``first`` on, each the digest of the one before it, the chunk's tokens and its
// extra bytes. ``parent`` is the key before. A ValueError where a token is none of 32 bits.
nanobind::list chain(nanobind::handle parent, nanobind::handle tokens, size_t chunk_tokens, size_t first,
                     nanobind::dict extra, std::string_view person);

}  // namespace kvtier
