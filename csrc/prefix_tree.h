// The keys that a tier holds, with sizes, places and parents; see kvtier_core/stack/index/prefix_tree.py.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "keys.h"
#include "table.h"

namespace kvtier {

class PrefixTree {
 public:
  bool contains(nanobind::handle key) const { return held(key_of(key)) != kNone; }
  size_t size() const { return held_; }
  int64_t used() const { return used_; }
  nanobind::object iter() const;
  int64_t nbytes(nanobind::handle key) const { return nodes_[must_hold(key)].nbytes; }
  nanobind::object parent(nanobind::handle key) const;
  int64_t children(nanobind::handle key) const;
  uint32_t place(nanobind::handle key) const { return nodes_[must_hold(key)].place; }
  nanobind::list places(nanobind::handle keys) const;
  size_t run(nanobind::handle keys, size_t start) const;
  nanobind::list missing(nanobind::handle keys) const;

  void add(nanobind::handle keys, nanobind::handle parents, int64_t nbytes, nanobind::handle places);
  void adopt(nanobind::handle path);
  void resize(nanobind::handle key, int64_t nbytes);
  nanobind::list remove(nanobind::handle keys);
  void detach(nanobind::handle keys);
  void park(nanobind::handle keys);
  nanobind::list take_freed();

 private:
  friend class EvictionCandidates;
  struct Node {
    Key key;
    int64_t nbytes = 0;
    uint32_t place = 0;
    Number parent = kNone;
    uint32_t children : 30 = 0;
    uint32_t held : 1 = false;
    uint32_t parked : 1 = false;
  };

  Number held(const Key& key) const;
  Number must_hold(nanobind::handle key) const;
  Number node_of(const Key& key);
  std::vector<Number> take(const std::vector<Key>& keys);
  bool is_at_or_above(Number node, Number below) const;
  void set_parent(Number node, Number parent);
  void clear_parent(Number node);
  void drop_if_unused(Number node);

  Table<Node> nodes_;  // held keys, and parents that are not held
  size_t held_ = 0;
  int64_t used_ = 0;
  uint64_t changes_ = 0;
  std::vector<Key> freed_;  // parked before, and without a child now
};

// An iterator over the keys that may be evicted, in the order of the policy. It raises when the tree has changed.
class EvictionCandidates {
 public:
  EvictionCandidates(const PrefixTree& tree, nanobind::handle victims, nanobind::handle spared,
                     nanobind::object pinned, bool leaf_first, nanobind::list passed)
      : tree_(tree), changes_(tree.changes_), victims_(nanobind::iter(victims)), spared_(spared),
        pinned_(std::move(pinned)), leaf_first_(leaf_first), passed_(std::move(passed)) {}

  nanobind::object next();

 private:
  bool is_leaf(Number node) const;
  bool may_be_evicted(const nanobind::object& key, Number node) const;
  void note_returned(Number candidate);

  const PrefixTree& tree_;
  const uint64_t changes_;
  nanobind::object victims_;
  Items spared_;  // collections of keys that are not evicted
  nanobind::object pinned_;  // places that are not
  const bool leaf_first_;
  nanobind::list passed_;  // for the caller: the keys that were passed over because of a child
  std::unordered_map<Number, uint32_t> returned_children_;  // children of a node that this iterator has returned
  std::unordered_set<Number> waiting_;               // the same
  Number next_parent_ = kNone;                       // one of these, whose last child was returned just now
};

void bind_tree(nanobind::module_& m);

}  // namespace kvtier
