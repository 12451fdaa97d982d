#include "prefix_tree.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvtier {

nb::object PrefixTree::iter() const {
  nb::list keys;
  nodes_.each([&](const Node& node) {
    if (node.held) keys.append(bytes_of(node.key));
  });
  return nb::iter(keys);
}

nb::object PrefixTree::parent(nb::handle key) const {
  const Number node = held(key_of(key));
  if (node == kNone || nodes_[node].parent == kNone) return nb::none();
  return bytes_of(nodes_[nodes_[node].parent].key);
}

int64_t PrefixTree::children(nb::handle key) const {
  const Number node = nodes_.find(key_of(key));
  return node == kNone ? 0 : nodes_[node].children;
}

nb::list PrefixTree::places(nb::handle keys) const {
  const Items items(keys);
  nb::list places;
  for (size_t i = 0; i < items.size(); i++) places.append(nb::int_(nodes_[must_hold(items[i])].place));
  return places;
}

size_t PrefixTree::run(nb::handle keys, size_t start) const {
  const Items items(keys);
  size_t end = start;
  while (end < items.size() && held(key_of(items[end])) != kNone) end++;
  return end - start;
}

nb::list PrefixTree::missing(nb::handle keys) const {
  const Items items(keys);
  nb::list missing;
  for (size_t i = 0; i < items.size(); i++) {
    if (held(key_of(items[i])) == kNone) missing.append(items[i]);
  }
  return missing;
}

void PrefixTree::add(nb::handle keys, nb::handle parents, int64_t nbytes, nb::handle places) {
  const std::vector<Key> own = keys_of(keys);
  const Items parent_items(parents), place_items(places);
  if (parent_items.size() != own.size() || place_items.size() != own.size()) throw nb::value_error("as many of each");
  std::vector<std::optional<Key>> above;
  std::vector<uint32_t> noted;
  for (size_t i = 0; i < own.size(); i++) {
    above.push_back(parent_items[i].is_none() ? std::nullopt : std::optional(key_of(parent_items[i])));
    noted.push_back(nb::cast<uint32_t>(place_items[i]));
  }
  changes_++;
  const std::vector<Number> nodes = take(own);
  for (size_t i = 0; i < own.size(); i++) {
    nodes_[nodes[i]].nbytes = nbytes;
    nodes_[nodes[i]].place = noted[i];
    used_ += nbytes;
    if (above[i]) set_parent(nodes[i], node_of(*above[i]));
  }
  held_ += own.size();
}

// Marks all keys as held, or throws and marks none if one is held already.
std::vector<Number> PrefixTree::take(const std::vector<Key>& keys) {
  std::vector<Number> nodes;
  for (const Key& key : keys) {
    const Number node = node_of(key);
    if (nodes_[node].held) {
      for (const Number taken : nodes) {
        nodes_[taken].held = false;
        drop_if_unused(taken);
      }
      throw nb::value_error("a key is held already");
    }
    nodes_[node].held = true;
    nodes.push_back(node);
  }
  return nodes;
}

void PrefixTree::adopt(nb::handle path) {
  const Items items(path);
  if (!items.size()) return;
  Key before = key_of(items[0]);
  for (size_t i = 1; i < items.size(); i++) {
    const Key key = key_of(items[i]);
    const Number node = held(key);
    if (node != kNone && nodes_[node].parent == kNone) {
      changes_++;
      set_parent(node, node_of(before));
    }
    before = key;
  }
}

void PrefixTree::resize(nb::handle key, int64_t nbytes) {
  Node& node = nodes_[must_hold(key)];
  used_ += nbytes - node.nbytes;
  node.nbytes = nbytes;
}

nb::list PrefixTree::remove(nb::handle keys) {
  const Items items(keys);
  const nb::list noted = places(keys);
  changes_++;
  for (size_t i = 0; i < items.size(); i++) {
    const Number number = must_hold(items[i]);
    Node& node = nodes_[number];
    used_ -= node.nbytes;
    held_--;
    node.held = node.parked = false;
    clear_parent(number);
    drop_if_unused(number);
  }
  return noted;
}

void PrefixTree::detach(nb::handle keys) {
  const Items items(keys);
  changes_++;
  for (size_t i = 0; i < items.size(); i++) {
    if (const Number node = held(key_of(items[i])); node != kNone) clear_parent(node);
  }
}

void PrefixTree::park(nb::handle keys) {
  const Items items(keys);
  for (size_t i = 0; i < items.size(); i++) nodes_[must_hold(items[i])].parked = true;
}

nb::list PrefixTree::take_freed() {
  nb::list freed;
  for (const Key& key : std::exchange(freed_, {})) {
    if (held(key) != kNone) freed.append(bytes_of(key));
  }
  return freed;
}

Number PrefixTree::held(const Key& key) const {
  const Number node = nodes_.find(key);
  return node != kNone && nodes_[node].held ? node : kNone;
}

Number PrefixTree::must_hold(nb::handle key) const {
  const Number node = held(key_of(key));
  if (node == kNone) throw nb::key_error("it is not held");
  return node;
}

Number PrefixTree::node_of(const Key& key) {
  const Number node = nodes_.find(key);
  return node != kNone ? node : nodes_.insert({.key = key});
}

bool PrefixTree::is_at_or_above(Number node, Number below) const {
  while (below != kNone && below != node && nodes_[node].children) below = nodes_[below].parent;
  return below == node;
}

void PrefixTree::set_parent(Number node, Number parent) {
  if (is_at_or_above(node, parent)) return;
  nodes_[node].parent = parent;
  nodes_[parent].children++;
}

void PrefixTree::clear_parent(Number node) {
  const Number parent = std::exchange(nodes_[node].parent, kNone);
  if (parent == kNone) return;
  Node& above = nodes_[parent];
  above.children--;
  if (above.parked && !above.children) {
    above.parked = false;
    freed_.push_back(above.key);
  }
  drop_if_unused(parent);
}

void PrefixTree::drop_if_unused(Number node) {
  if (!nodes_[node].held && !nodes_[node].children) nodes_.erase(node);
}

bool EvictionCandidates::is_leaf(Number node) const {
  const auto named = returned_children_.find(node);
  return tree_.nodes_[node].children <= (named == returned_children_.end() ? 0 : named->second);
}

bool EvictionCandidates::may_be_evicted(const nb::object& key, Number node) const {
  const auto in = [](nb::handle collection, nb::handle item) {
    const int found = PySequence_Contains(collection.ptr(), item.ptr());
    if (found < 0) throw nb::python_error();
    return found == 1;
  };
  for (size_t i = 0; i < spared_.size(); i++) {
    if (in(spared_[i], key)) return false;
  }
  return !in(pinned_, nb::int_(tree_.nodes_[node].place));
}

void EvictionCandidates::note_returned(Number candidate) {
  const Number parent = tree_.nodes_[candidate].parent;
  if (parent == kNone) return;
  returned_children_[parent]++;
  if ((tree_.nodes_[parent].parked || waiting_.contains(parent)) && is_leaf(parent)) next_parent_ = parent;
}

nb::object EvictionCandidates::next() {
  if (changes_ != tree_.changes_) throw std::runtime_error("the tree changed while its eviction_candidates were named");
  if (const Number candidate = std::exchange(next_parent_, kNone); candidate != kNone) {
    const nb::object key = bytes_of(tree_.nodes_[candidate].key);
    if (may_be_evicted(key, candidate)) {
      note_returned(candidate);
      return key;
    }
  }
  while (true) {
    const nb::object key = nb::steal(PyIter_Next(victims_.ptr()));
    if (!key) {
      if (PyErr_Occurred()) throw nb::python_error();
      throw nb::stop_iteration();
    }
    const Number node = tree_.must_hold(key);
    if (leaf_first_ && !is_leaf(node)) {
      waiting_.insert(node);
      passed_.append(key);
    } else if (may_be_evicted(key, node)) {
      note_returned(node);
      return key;
    }
  }
}

void bind_tree(nb::module_& m) {
  nb::class_<EvictionCandidates>(m, "EvictionCandidates")
      .def("__iter__", [](nb::handle self) { return self; })
      .def("__next__", &EvictionCandidates::next);
  nb::class_<PrefixTree>(m, "PrefixTree")
      .def(nb::init<>())
      .def("__contains__", &PrefixTree::contains)
      .def("__len__", &PrefixTree::size)
      .def_prop_ro("used", &PrefixTree::used)
      .def("__iter__", &PrefixTree::iter)
      .def("nbytes", &PrefixTree::nbytes, "key"_a)
      .def("parent", &PrefixTree::parent, "key"_a)
      .def("children", &PrefixTree::children, "key"_a)
      .def("place", &PrefixTree::place, "key"_a)
      .def("places", &PrefixTree::places, "keys"_a)
      .def("run", &PrefixTree::run, "keys"_a, "start"_a = 0)
      .def("missing", &PrefixTree::missing, "keys"_a)
      .def("add", &PrefixTree::add, "keys"_a, "parents"_a, "nbytes"_a, "places"_a)
      .def("adopt", &PrefixTree::adopt, "path"_a)
      .def("resize", &PrefixTree::resize, "key"_a, "nbytes"_a)
      .def("remove", &PrefixTree::remove, "keys"_a)
      .def("detach", &PrefixTree::detach, "keys"_a)
      .def("park", &PrefixTree::park, "keys"_a)
      .def("take_freed", &PrefixTree::take_freed)
      .def(
          "eviction_candidates",
          [](const PrefixTree& tree, nb::handle victims, nb::handle spared, nb::object pinned, bool leaf_first,
             nb::list passed) {
            return EvictionCandidates(tree, victims, spared, std::move(pinned), leaf_first, std::move(passed));
          },
          nb::keep_alive<0, 1>(), "victims"_a, "spared"_a, "pinned"_a, "leaf_first"_a, "passed"_a);
}

}  // namespace kvtier
