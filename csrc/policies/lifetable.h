// The odds that a chunk comes back, by its class and age: kvtier_core/policies/lifetable.py, to the last bit.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvtier {

constexpr size_t kAges = 40;

// The age in seconds at which a step begins; that of the last is never over.
extern const std::array<double, kAges> kEdges;

// A class and a step of age.
struct ClassAge {
  uint8_t cls, age;
};

// Votes on lives that ended with a return in some step of age, or went on into the next.
class LifeTable {
 public:
  using Row = std::array<double, kAges>;

  LifeTable(size_t families, size_t size);

  void returned(ClassAge class_age, double votes);
  void went_on(ClassAge class_age, double votes);
  void fade(double factor);                     // what was long ago counts less
  void rank(const std::vector<Row>& waiting);   // takes the votes into the index and the order

  // The best rate of returns, a second of room.
  double index(ClassAge class_age) const { return index_[class_age.cls][class_age.age]; }
  const std::vector<ClassAge>& order() const { return order_; }  // the lowest index first
  size_t rank_of(ClassAge class_age) const { return rank_of_[class_age.cls * kAges + class_age.age]; }

  std::string save() const;
  bool restore(std::string_view saved);  // false: it is not what save() returned

 private:
  const size_t size_;
  std::vector<Row> returns_, lives_, index_;
  std::vector<ClassAge> order_;
  std::vector<uint16_t> rank_of_;
};

}  // namespace kvtier
