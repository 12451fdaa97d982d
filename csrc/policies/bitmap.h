// Which of some small numbers are marked; told in order.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtier {

class Bitmap {
 public:
  explicit Bitmap(size_t count) : count_(count), words_((count + 63) / 64) {}

  size_t end() const { return count_; }
  void clear() { words_.assign(words_.size(), 0); }
  void set(size_t i) { words_[i / 64] |= uint64_t{1} << i % 64; }
  void unset(size_t i) { words_[i / 64] &= ~(uint64_t{1} << i % 64); }

  // The first that is marked from here on, or end().
  size_t from(size_t i) const {
    if (i >= count_) return count_;
    uint64_t word = words_[i / 64] >> i % 64 << i % 64;
    for (i /= 64; !word; word = words_[i]) {
      if (++i == words_.size()) return count_;
    }
    return i * 64 + static_cast<size_t>(std::countr_zero(word));
  }

 private:
  size_t count_;
  std::vector<uint64_t> words_;
};

}  // namespace kvtier
