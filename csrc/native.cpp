// The module kvtier_core._native. Everything in it has a counterpart in Python and is tested against that.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <tuple>

#include "chain.h"
#include "copier.h"
#include "crc32.h"
#include "files.h"
#include "guard.h"
#include "packed.h"
#include "policies/bind.h"
#include "prefix_tree.h"
#include "stamp.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// The bytes of a Python buffer, released by the destructor.
class Bytes {
 public:
  explicit Bytes(nb::handle object, int flags = PyBUF_SIMPLE) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, flags)) throw nb::python_error();
  }
  ~Bytes() { PyBuffer_Release(&buffer_); }
  Bytes(const Bytes&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(buffer_.buf); }
  size_t size() const { return static_cast<size_t>(buffer_.len); }

 private:
  Py_buffer buffer_;
};

uint32_t crc32(nb::handle data, uint32_t crc) {
  const Bytes bytes(data);
  const nb::gil_scoped_release released;
  return kvtier::crc32(crc, bytes.data(), bytes.size());
}

size_t pack(nb::handle payload, nb::handle into, size_t method) {
  const Bytes from(payload), to(into, PyBUF_WRITABLE);
  if (method >= kvtier::packed_methods().size()) throw nb::value_error("no such method");
  const nb::gil_scoped_release released;
  return kvtier::pack(to.data(), to.size(), from.data(), from.size(), method);
}

bool unpack(nb::handle encoded, nb::handle into, size_t method) {
  const Bytes from(encoded), to(into, PyBUF_WRITABLE);
  if (method >= kvtier::packed_methods().size()) throw nb::value_error("no such method");
  const nb::gil_scoped_release released;
  return kvtier::unpack(to.data(), to.size(), from.data(), from.size(), method);
}

using Outcomes = std::optional<std::vector<int64_t>>;
using Places = std::vector<uint64_t>;

Outcomes move_all(const std::vector<int>& fds, const std::vector<nb::object>& views, const Places& at,
                  kvtier::Direction direction) {
  if (fds.size() != views.size() || fds.size() != at.size()) throw nb::value_error("as many files as views and places");
  std::deque<Bytes> buffers;
  std::vector<kvtier::Move> moves;
  for (size_t i = 0; i < fds.size(); i++) {
    const Bytes& bytes = buffers.emplace_back(
        views[i], direction == kvtier::Direction::kRead ? PyBUF_WRITABLE : PyBUF_SIMPLE);
    moves.push_back({fds[i], bytes.data(), bytes.size(), at[i]});
  }
  const nb::gil_scoped_release released;
  return kvtier::move_all(moves, direction);
}

Outcomes read_files(const std::vector<int>& fds, const std::vector<nb::object>& into, const Places& at) {
  return move_all(fds, into, at, kvtier::Direction::kRead);
}

Outcomes write_files(const std::vector<int>& fds, const std::vector<nb::object>& from, const Places& at) {
  return move_all(fds, from, at, kvtier::Direction::kWrite);
}

using LayerTuple = std::tuple<uintptr_t, size_t, size_t, size_t, size_t, size_t>;

kvtier::Copier copier(const std::vector<LayerTuple>& layers, uintptr_t shard, size_t slot_nbytes,
                      size_t packed_nbytes) {
  std::vector<kvtier::Layer> plain;
  for (const auto& [base, stride, nbytes, offset, first, blocks] : layers)
    plain.push_back({base, stride, nbytes, offset, first, blocks});
  return {std::move(plain), shard, slot_nbytes, packed_nbytes};
}

}  // namespace

NB_MODULE(_native, m) {
  m.attr("stamp") = KVTIER_STAMP;  // kvtier_core/native.py compares it
  nb::set_leak_warnings(false);    // a host may end its process with stacks that it has not closed

  m.def("crc32", &crc32, "data"_a, "crc"_a = 0);
  m.def("crc32_combine", &kvtier::crc32_combine, "first"_a, "second"_a, "second_nbytes"_a);
  m.def("crc32_method", &kvtier::crc32_method);

  m.def("pack", &pack, "payload"_a, "into"_a, "method"_a = 0);
  m.def("unpack", &unpack, "encoded"_a, "into"_a, "method"_a = 0);
  m.def("packed_methods", &kvtier::packed_methods);

  m.def("chain", &kvtier::chain, "parent"_a, "tokens"_a, "chunk_tokens"_a, "first"_a, "extra"_a, "person"_a);
  kvtier::bind_tree(m);

  m.def("read_files", &read_files, "fds"_a, "into"_a, "at"_a);
  m.def("write_files", &write_files, "fds"_a, "from"_a, "at"_a);
  m.def("ring_works", &kvtier::ring_works);

  m.def("guard", &kvtier::guard, "begin"_a, "nbytes"_a);
  m.def("was_replaced", &kvtier::was_replaced, "number"_a);
  m.def("unguard", &kvtier::unguard, "number"_a);

  const nb::call_guard<nb::gil_scoped_release> released;
  nb::class_<kvtier::Copier>(m, "Copier")
      .def(nb::new_(&copier), "layers"_a, "shard"_a, "slot_nbytes"_a, "packed_nbytes"_a = 0)
      .def("gather", &kvtier::Copier::gather, "rows"_a, "slots"_a, released)
      .def("scatter", &kvtier::Copier::scatter, "rows"_a, "slots"_a, released);

  kvtier::bind_policies(m);
}
