#include "lru.h"

#include <ranges>
#include <stdexcept>

namespace kvtier {

void Lru::request(std::span<const Key> path) {
  changes_++;
  // Leaf before root, so that a prefix, which others may share, outlives its continuations.
  for (const Key& key : std::views::reverse(path)) {
    const Number number = held_.find(key);
    if (number == kNone) continue;
    order_.remove(held_, number);
    order_.append(held_, number);
  }
}

void Lru::admit(const Key& key) {
  changes_++;
  if (held_.find(key) == kNone) order_.append(held_, held_.insert({key, {}}));
}

bool Lru::forget(const Key& key) {
  const Number number = held_.find(key);
  if (number == kNone) return false;
  changes_++;
  order_.remove(held_, number);
  held_.erase(number);
  return true;
}

const Key* Lru::Victims::next() {
  if (next_ == kNone) return nullptr;
  if (changes_ != policy_.changes_) throw std::runtime_error("the policy changed while its victims were iterated");
  const Held& held = policy_.held_[next_];
  next_ = held.order.after;
  return &held.key;
}

}  // namespace kvtier
