// The odds that a chunk returns, by its class and age. Computes what kvtier_core/policies/lifetable.py does, to the last
// bit.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvtier {

constexpr size_t kAges = 40;

// The age in seconds at which each step begins; the last step has no end.
extern const std::array<double, kAges> kEdges;

// A class of chunks and a step of age.
struct ClassAge {
  uint8_t cls, age;
};

// Votes on lives that ended with a return in some step of age, or went on into the next step.
class LifeTable {
 public:
  using Row = std::array<double, kAges>;

  LifeTable(size_t families, size_t size);

  void returned(ClassAge class_age, double votes);
  void went_on(ClassAge class_age, double votes);
  void fade(double factor);                     // makes old votes count less
  void rank(const std::vector<Row>& waiting);   // computes the index and the order from the votes

  // The best rate of returns a second, over all horizons.
  double index(ClassAge class_age) const { return index_[class_age.cls][class_age.age]; }
  const std::vector<ClassAge>& order() const { return order_; }  // the lowest index first
  size_t rank_of(ClassAge class_age) const { return rank_of_[class_age.cls * kAges + class_age.age]; }

  std::string save() const;
  bool restore(std::string_view saved);  // false if save() cannot have returned this

 private:
  const size_t size_;
  std::vector<Row> returns_, lives_, index_;
  std::vector<ClassAge> order_;
  std::vector<uint16_t> rank_of_;
};

}  // namespace kvtier
