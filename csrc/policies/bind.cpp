#include "bind.h"

#include "../keys.h"
#include "gittins.h"
#include "lru.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvtier {
namespace {

[[noreturn]] void raise_key_error(const Key& key) {
  PyErr_SetObject(PyExc_KeyError, bytes_of(key).ptr());
  throw nb::python_error();
}

// What all policies have in common. An iterator over victims keeps its policy alive and notices if it changes.
template <class Policy>
nb::class_<Policy> bind(nb::module_& m, const char* name) {
  using Victims = typename Policy::Victims;
  auto policy = nb::class_<Policy>(m, name);
  policy.attr("leaf_first") = true;
  policy.def("victims", [](const Policy& self) { return Victims(self); }, nb::keep_alive<0, 1>());
  policy.def("__sizeof__", [](const Policy& self) { return sizeof self + self.nbytes(); });
  nb::class_<Victims>(policy, "Victims")
      .def("__iter__", [](nb::object self) { return self; })
      .def("__next__", [](Victims& self) {
        if (const Key* key = self.next()) return bytes_of(*key);
        throw nb::stop_iteration();
      });
  return policy;
}

void bind_lru(nb::module_& m) {
  bind<Lru>(m, "Lru")
      .def(nb::init<>())
      .def("request", [](Lru& self, nb::handle path, double, nb::handle) { self.request(keys_of(path)); },
           "path"_a, "now"_a, "hints"_a)
      .def("admit", [](Lru& self, nb::handle key, nb::handle) { self.admit(key_of(key)); }, "key"_a, "nbytes"_a)
      .def("prefers", [](const Lru&, nb::handle, nb::handle) { return true; }, "newcomer"_a, "victim"_a)
      .def("forget", [](Lru& self, nb::handle object, nb::handle) {
             const Key key = key_of(object);
             if (!self.forget(key)) raise_key_error(key);
           }, "key"_a, nb::kw_only(), "evicted"_a)
      .def("save", [](const Lru&) { return nb::bytes("", 0); })
      .def("restore", [](Lru&, nb::handle) {}, "saved"_a);
}

void bind_gittins(nb::module_& m) {
  bind<Gittins>(m, "Gittins")
      .def("__init__", [](Gittins* self, size_t sizes) {
             if (sizes < 1 || sizes > 32) throw nb::value_error("sizes: 1 to 32 can be told apart");
             new (self) Gittins(sizes);
           }, "sizes"_a)
      .def("request", [](Gittins& self, nb::handle path, double now, nb::object hints) {
             const nb::object get = hints.attr("get"), pause = get("pause", "");
             Py_ssize_t nbytes = 0;
             const char* text = PyUnicode_AsUTF8AndSize(pause.ptr(), &nbytes);
             if (!text) PyErr_Clear();  // it has surrogates
             const std::string_view seconds(text, text ? static_cast<size_t>(nbytes) : 0);
             const bool ends = get("session").equal(nb::str("ends"));
             self.request(keys_of(path), now, Gittins::announced(ends, seconds));
           }, "path"_a, "now"_a, "hints"_a)
      .def("admit", [](Gittins& self, nb::handle object, nb::handle) {
             const Key key = key_of(object);
             if (!self.admit(key)) raise_key_error(key);
           }, "key"_a, "nbytes"_a)
      .def("prefers", [](const Gittins& self, nb::handle newcomer, nb::handle object) {
             const Key victim = key_of(object);
             const std::optional<bool> answer = self.prefers(key_of(newcomer), victim);
             if (!answer) raise_key_error(victim);
             return *answer;
           }, "newcomer"_a, "victim"_a)
      .def("forget", [](Gittins& self, nb::handle object, bool evicted) {
             const Key key = key_of(object);
             if (!self.forget(key, evicted)) raise_key_error(key);
           }, "key"_a, nb::kw_only(), "evicted"_a)
      .def("save", [](const Gittins& self) {
        const std::string saved = self.save();
        return nb::bytes(saved.data(), saved.size());
      })
      .def("restore", [](Gittins& self, const nb::bytes& saved) {
             self.restore({saved.c_str(), saved.size()});
           }, "saved"_a);
}

}  // namespace

void bind_policies(nb::module_& m) {
  bind_lru(m);
  bind_gittins(m);
}

}  // namespace kvtier
