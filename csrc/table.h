// A hash table of entries by key, which costs some bytes for each entry and has no pointers.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "pool.h"

namespace kvtier {

// The name of a chunk: 32 opaque bytes.
struct Key {
  std::array<uint64_t, 4> words;
  bool operator==(const Key&) const = default;
};

// Keys are mostly digests, but this is not promised, so every bit counts.
inline uint64_t hash_of(const Key& key) {
  uint64_t hash = 0;
  for (const uint64_t word : key.words) hash = std::rotl(hash ^ word, 23) * 0x9E3779B97F4A7C15u;
  return hash ^ hash >> 32;
}

// An entry keeps its number until it is erased. ``Entry`` has a member ``key``, for which there is a hash_of().
template <class Entry>
class Table {
 public:
  using EntryKey = decltype(Entry::key);

  size_t size() const { return entries_.size(); }
  size_t nbytes() const { return entries_.nbytes() + cells_.capacity() * sizeof(Cell); }
  Entry& operator[](Number number) { return entries_[number]; }
  const Entry& operator[](Number number) const { return entries_[number]; }

  // Calls visit(entry) for each, in no order.
  template <class Visit>
  void each(Visit visit) const {
    for (size_t at = 0; at < cells_.size(); at++) {
      if (cells_[at] != kEmpty) visit(entries_[number_in(at)]);
    }
  }

  Number find(const EntryKey& key) const {
    if (cells_.empty()) return kNone;
    const uint64_t hash = hash_of(key);
    for (size_t at = home_of(hash); cells_[at] != kEmpty; at = next(at)) {
      if (((cells_[at] ^ mark_of(hash)) & ~mask()) == 0 && entries_[number_in(at)].key == key) return number_in(at);
    }
    return kNone;
  }

  // Returns the number of the entry. If two have the same key, find() finds one of them.
  Number insert(Entry entry) {
    if (size() + 1 > cells_.size() / 4 * 3) grow();
    const Number number = entries_.add(std::move(entry));
    place(number);
    return number;
  }

  void erase(Number number) {
    size_t hole = home_of(hash_of(entries_[number].key));
    while (number_in(hole) != number) hole = next(hole);
    entries_.drop(number);
    // The keys that follow lie anywhere in memory; fetch them all at once.
    for (size_t at = next(hole); cells_[at] != kEmpty; at = next(at)) __builtin_prefetch(&entries_[number_in(at)].key);
    // Move up what was displaced by the erased entry (D. E. Knuth, The Art of Computer Programming 3, 6.4,
    // algorithm R).
    for (size_t at = next(hole); cells_[at] != kEmpty; at = next(at)) {
      const size_t home = home_of(hash_of(entries_[number_in(at)].key));
      if (((at - home) & mask()) >= ((at - hole) & mask())) {
        cells_[hole] = cells_[at];
        hole = at;
      }
    }
    cells_[hole] = kEmpty;
  }

 private:
  // A number, which is less than the number of cells, and in the remaining bits some of the hash, so that find()
  // rarely looks at other entries than the right one.
  using Cell = uint32_t;
  static constexpr Cell kEmpty = UINT32_MAX;  // no number: it would be that of the last cell, but a quarter are free

  Cell mask() const { return static_cast<Cell>(cells_.size() - 1); }
  Number number_in(size_t at) const { return cells_[at] & mask(); }
  size_t next(size_t at) const { return (at + 1) & mask(); }
  size_t home_of(uint64_t hash) const { return hash & mask(); }
  Cell mark_of(uint64_t hash) const { return static_cast<Cell>(hash >> 32); }

  void place(Number number) {
    const uint64_t hash = hash_of(entries_[number].key);
    size_t at = home_of(hash);
    while (cells_[at] != kEmpty) at = next(at);
    cells_[at] = (mark_of(hash) & ~mask()) | number;
  }

  void grow() {
    std::vector<Number> held;
    held.reserve(size());
    for (size_t at = 0; at < cells_.size(); at++) {
      if (cells_[at] != kEmpty) held.push_back(number_in(at));
    }
    cells_.assign(cells_.empty() ? 16 : cells_.size() * 2, kEmpty);
    for (const Number number : held) place(number);
  }

  std::vector<Cell> cells_;  // open addressing, linear probing, three quarters full at most
  Pool<Entry> entries_;
};

}  // namespace kvtier
