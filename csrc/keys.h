// Keys as Python hands them in and takes them back.
#pragma once

#include <nanobind/nanobind.h>

#include "table.h"

namespace kvtier {

inline Key key_of(nanobind::handle object) {
  Key key;
  if (!PyBytes_Check(object.ptr()) || PyBytes_GET_SIZE(object.ptr()) != sizeof key) {
    throw nanobind::value_error("a key is 32 bytes");
  }
  std::memcpy(&key, PyBytes_AS_STRING(object.ptr()), sizeof key);
  return key;
}

inline nanobind::bytes bytes_of(const Key& key) { return {reinterpret_cast<const char*>(&key), sizeof key}; }

}  // namespace kvtier
