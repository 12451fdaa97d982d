// Keys as Python hands them in and takes them back.
#pragma once

#include <nanobind/nanobind.h>

#include "table.h"

namespace kvtier {

inline Key key_of(nanobind::handle object) {
  Key key;
  char* bytes;
  Py_ssize_t nbytes;
  if (!PyBytes_Check(object.ptr()) || PyBytes_AsStringAndSize(object.ptr(), &bytes, &nbytes) ||
      nbytes != sizeof key) {
    throw nanobind::value_error("a key is 32 bytes");
  }
  std::memcpy(&key, bytes, sizeof key);
  return key;
}

inline nanobind::bytes bytes_of(const Key& key) { return nanobind::bytes(&key, sizeof key); }

}  // namespace kvtier
