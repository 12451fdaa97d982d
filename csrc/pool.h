// Numbered entries. The number of a dropped entry is given to the next one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

namespace kvtier {

using Number = uint32_t;
constexpr Number kNone = UINT32_MAX;

template <class Entry>
class Pool {
 public:
  size_t size() const { return entries_.size() - free_.size(); }
  size_t nbytes() const { return entries_.size() * sizeof(Entry) + free_.capacity() * sizeof(Number); }
  Entry& operator[](Number number) { return entries_[number]; }
  const Entry& operator[](Number number) const { return entries_[number]; }

  Number add(Entry entry) {
    if (free_.empty()) {
      entries_.push_back(std::move(entry));
      return static_cast<Number>(entries_.size() - 1);
    }
    const Number number = free_.back();
    entries_[number] = std::move(entry);
    free_.pop_back();
    return number;
  }

  void drop(Number number) { free_.push_back(number); }

 private:
  std::deque<Entry> entries_;  // never copies its entries as it grows
  std::vector<Number> free_;
};

}  // namespace kvtier
