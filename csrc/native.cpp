// kvtier_core._native. Each has a plain counterpart in Python beside it, which it is tested against.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "copier.h"
#include "crc32.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// A readable buffer of bytes; released when it goes.
class Bytes {
 public:
  explicit Bytes(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_SIMPLE)) throw nb::python_error();
  }
  ~Bytes() { PyBuffer_Release(&buffer_); }
  Bytes(const Bytes&) = delete;

  const std::byte* data() const { return static_cast<const std::byte*>(buffer_.buf); }
  size_t size() const { return static_cast<size_t>(buffer_.len); }

 private:
  Py_buffer buffer_;
};

uint32_t crc32(nb::handle data, uint32_t crc) {
  const Bytes bytes(data);
  const nb::gil_scoped_release released;
  return kvtier::crc32(crc, bytes.data(), bytes.size());
}

using LayerTuple = std::tuple<uintptr_t, size_t, size_t, size_t>;

kvtier::Copier copier(const std::vector<LayerTuple>& layers, size_t row, uintptr_t shard, size_t slot_nbytes) {
  std::vector<kvtier::Layer> plain;
  for (const auto& [base, stride, nbytes, offset] : layers) plain.push_back({base, stride, nbytes, offset});
  return {std::move(plain), row, shard, slot_nbytes};
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("crc32", &crc32, "data"_a, "crc"_a = 0);
  m.def("crc32_combine", &kvtier::crc32_combine, "first"_a, "second"_a, "second_nbytes"_a);
  m.def("crc32_method", &kvtier::crc32_method);

  const nb::call_guard<nb::gil_scoped_release> released;
  nb::class_<kvtier::Copier>(m, "Copier")
      .def(nb::new_(&copier), "layers"_a, "row"_a, "shard"_a, "slot_nbytes"_a)
      .def("gather", &kvtier::Copier::gather, "rows"_a, "slots"_a, released)
      .def("scatter", &kvtier::Copier::scatter, "rows"_a, "slots"_a, released);
}
