#include "chain.h"

#include <limits>

#include "blake2b.h"
#include "keys.h"

namespace nb = nanobind;

namespace kvtier {
namespace {

uint32_t token_of(nb::handle object) {
  const long long token = PyLong_AsLongLong(object.ptr());
  if (token < 0 || token > std::numeric_limits<uint32_t>::max()) {
    PyErr_Clear();
    throw nb::value_error("a token id is a whole number of 32 bits");
  }
  return static_cast<uint32_t>(token);
}

}  // namespace

nb::list chain(nb::handle parent, nb::handle tokens, size_t chunk_tokens, size_t first, nb::dict extra,
               std::string_view person) {
  if (!chunk_tokens) throw nb::value_error("a chunk has tokens");
  if (person.size() > kPersonNbytes) throw nb::value_error("a person has 16 bytes at most");
  const Items items(tokens);
  Key key = key_of(parent);
  nb::list keys;
  std::vector<std::byte> material;
  for (size_t chunk = first; (chunk + 1) * chunk_tokens <= items.size(); chunk++) {
    material.resize(sizeof key + chunk_tokens * sizeof(uint32_t));
    std::memcpy(material.data(), &key, sizeof key);
    for (size_t i = 0; i < chunk_tokens; i++) {
      const uint32_t token = token_of(items[chunk * chunk_tokens + i]);
      std::memcpy(material.data() + sizeof key + i * sizeof token, &token, sizeof token);
    }
    if (extra.size() && extra.contains(chunk)) {
      const nb::bytes more = nb::cast<nb::bytes>(extra[nb::int_(chunk)]);
      const auto* bytes = static_cast<const std::byte*>(more.data());
      material.insert(material.end(), bytes, bytes + more.size());
    }
    key = blake2b(material.data(), material.size(), person);
    keys.append(bytes_of(key));
  }
  return keys;
}

}  // namespace kvtier
