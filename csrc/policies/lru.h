// Least recently used: kvtier_core/policies/lru.py, in every answer.
#pragma once

#include <span>

#include "../list.h"
#include "../table.h"

namespace kvtier {

class Lru {
 public:
  class Victims;

  void request(std::span<const Key> path);
  void admit(const Key& key);
  bool forget(const Key& key);  // false: it is not held
  size_t nbytes() const { return held_.nbytes(); }

 private:
  struct Held {
    Key key;
    Links order;
  };

  Table<Held> held_;
  List<&Held::order> order_;  // the least recently used first
  uint64_t changes_ = 0;
};

// Best victim first. Lives no longer than its policy.
class Lru::Victims {
 public:
  explicit Victims(const Lru& policy) : policy_(policy), changes_(policy.changes_), next_(policy.order_.first()) {}

  const Key* next();  // nullptr: that was the last. Throws runtime_error if the policy has changed since.

 private:
  const Lru& policy_;
  const uint64_t changes_;
  Number next_;
};

}  // namespace kvtier
