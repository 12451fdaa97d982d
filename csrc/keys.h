// Keys to and from Python, by calls of the stable ABI.
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
    PyErr_Clear();
    throw nanobind::value_error("a key is 32 bytes");
  }
  std::memcpy(&key, bytes, sizeof key);
  return key;
}

inline nanobind::bytes bytes_of(const Key& key) { return nanobind::bytes(&key, sizeof key); }

// The items of a Python sequence: of a list in place, of anything else copied to a list.
class Items {
 public:
  explicit Items(nanobind::handle object)
      : list_(PyList_Check(object.ptr()) ? nanobind::borrow(object) : nanobind::steal(PySequence_List(object.ptr()))) {
    if (!list_) throw nanobind::python_error();
  }
  size_t size() const { return static_cast<size_t>(PyList_Size(list_.ptr())); }
  nanobind::handle operator[](size_t i) const { return PyList_GetItem(list_.ptr(), static_cast<Py_ssize_t>(i)); }

 private:
  nanobind::object list_;
};

// Converts all before the caller uses one, so that an invalid key changes nothing.
inline std::vector<Key> keys_of(nanobind::handle object) {
  const Items items(object);
  std::vector<Key> keys(items.size());
  for (size_t i = 0; i < keys.size(); i++) keys[i] = key_of(items[i]);
  return keys;
}

}  // namespace kvtier
