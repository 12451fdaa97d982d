// The held keys of one level, what is noted of each, and how they hang on one another; see kvtier_core/stack/index/prefix_tree.py.
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
  uint32_t place(nanobind::handle key) const { return nodes_[must_hold(key)].place; }
  nanobind::list places(nanobind::handle keys) const;
  size_t run(nanobind::handle keys, size_t start) const;
  nanobind::list missing(nanobind::handle keys) const;

  void add(nanobind::handle keys, nanobind::handle parents, int64_t nbytes, nanobind::handle places);
  void adopt(nanobind::handle path);
  void resize(nanobind::handle key, int64_t nbytes);
  nanobind::list remove(nanobind::handle keys);
  void detach(nanobind::handle keys);

 private:
  friend class EvictionCandidates;
  struct Node {
    Key key;
    int64_t nbytes = 0;
    uint32_t place = 0;
    Number parent = kNone;
    uint32_t children : 31 = 0;
    uint32_t held : 1 = false;
  };

  Number held(const Key& key) const;
  Number must_hold(nanobind::handle key) const;
  Number node_of(const Key& key);
  std::vector<Number> take(const std::vector<Key>& keys);
  void hang(Number node, Number parent);
  void unhang(Number node);
  void drop_if_unused(Number node);

  Table<Node> nodes_;  // of what is held, and of parents that are not
  size_t held_ = 0;
  int64_t used_ = 0;
  uint64_t changes_ = 0;
};

// An iterator; it ends with an exception when the tree has changed.
class EvictionCandidates {
 public:
  EvictionCandidates(const PrefixTree& tree, nanobind::handle victims, nanobind::handle spared, nanobind::object pinned, bool leaf_first)
      : tree_(tree), changes_(tree.changes_), victims_(nanobind::iter(victims)), spared_(spared),
        pinned_(std::move(pinned)), leaf_first_(leaf_first) {}

  nanobind::object next();

 private:
  bool is_leaf(Number node) const;
  bool may_leave(const nanobind::object& key, Number node) const;
  void follow(Number leaver);

  const PrefixTree& tree_;
  const uint64_t changes_;
  nanobind::object victims_;
  Items spared_;  // collections of keys
  nanobind::object pinned_;  // and one of places
  const bool leaf_first_;
  std::unordered_map<Number, uint32_t> leaving_;  // how many children of a node were named
  std::unordered_set<Number> passed_;             // named by the policy, spared for the sake of a child
  Number follower_ = kNone;                       // a parent whose last child was named just now
};

void bind_tree(nanobind::module_& m);

}  // namespace kvtier
