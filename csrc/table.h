// What is held, found by its key: some bytes an entry beside the entry itself, and no pointers.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

namespace kvtier {

// The name of a chunk: 32 opaque bytes.
struct Key {
  std::array<uint64_t, 4> words;
  bool operator==(const Key&) const = default;
};

// Keys are digests mostly, but nobody promises it: every bit counts.
inline uint64_t hash_of(const Key& key) {
  uint64_t hash = 0;
  for (const uint64_t word : key.words) hash = std::rotl(hash ^ word, 23) * 0x9E3779B97F4A7C15u;
  return hash ^ hash >> 32;
}

// Entries keep their numbers until they are erased. ``Entry`` has a member ``key`` that hash_of() knows.
template <class Entry>
class Table {
 public:
  using Number = uint32_t;
  using EntryKey = decltype(Entry::key);
  static constexpr Number kNone = UINT32_MAX;

  size_t size() const { return size_; }
  Entry& operator[](Number number) { return entries_[number]; }
  const Entry& operator[](Number number) const { return entries_[number]; }

  // In no order.
  template <class Visit>
  void each(Visit visit) const {
    for (const Number number : cells_) {
      if (number != kNone) visit(entries_[number]);
    }
  }

  Number find(const EntryKey& key) const {
    if (cells_.empty()) return kNone;
    for (size_t at = home_of(key);; at = next(at)) {
      if (cells_[at] == kNone || entries_[cells_[at]].key == key) return cells_[at];
    }
  }

  // Of an entry whose key is not there yet.
  Number insert(Entry entry) {
    if (size_ + 1 > cells_.size() / 4 * 3) grow();
    Number number;
    if (free_.empty()) {
      number = static_cast<Number>(entries_.size());
      entries_.push_back(std::move(entry));
    } else {
      number = free_.back();
      free_.pop_back();
      entries_[number] = std::move(entry);
    }
    place(number);
    size_++;
    return number;
  }

  void erase(Number number) {
    size_t hole = home_of(entries_[number].key);
    while (cells_[hole] != number) hole = next(hole);
    // Whoever was pushed on by the one that leaves moves up (Knuth, The Art of Computer Programming 3, 6.4, algorithm R).
    for (size_t at = next(hole); cells_[at] != kNone; at = next(at)) {
      const size_t home = home_of(entries_[cells_[at]].key);
      if (((at - home) & (cells_.size() - 1)) >= ((at - hole) & (cells_.size() - 1))) {
        cells_[hole] = cells_[at];
        hole = at;
      }
    }
    cells_[hole] = kNone;
    free_.push_back(number);
    size_--;
  }

 private:
  size_t next(size_t at) const { return (at + 1) & (cells_.size() - 1); }
  size_t home_of(const EntryKey& key) const { return hash_of(key) & (cells_.size() - 1); }

  void place(Number number) {
    size_t at = home_of(entries_[number].key);
    while (cells_[at] != kNone) at = next(at);
    cells_[at] = number;
  }

  void grow() {
    std::vector<Number> held;
    held.reserve(size_);
    for (const Number number : cells_) {
      if (number != kNone) held.push_back(number);
    }
    cells_.assign(cells_.empty() ? 16 : cells_.size() * 2, kNone);
    for (const Number number : held) place(number);
  }

  std::vector<Number> cells_;  // open addressing, linear probing, three quarters full at most
  std::deque<Entry> entries_;  // which doubles nothing as it grows
  std::vector<Number> free_;
  size_t size_ = 0;
};

}  // namespace kvtier
