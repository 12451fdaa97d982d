// The same floating-point operations in the same order as lifetable.py: what is learned in one place and saved is
// restored in the other, and no victim depends on which of the two chose it. Comments on why are there.
#include "lifetable.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <span>

namespace kvtier {
namespace {

using Row = LifeTable::Row;

constexpr std::string_view kMagic = "kvlives1";
constexpr size_t kHeaderNbytes = 16;
constexpr double kTrusted = 1000, kShrink = 20;

}  // namespace

const std::array<double, kAges> kEdges = [] {
  std::array<double, kAges> edges{};
  for (int i = 0; i + 1 < static_cast<int>(kAges); i++) edges[i + 1] = std::ldexp(std::sqrt(1 + i % 2), i / 2 - 1);
  return edges;
}();

namespace {

const Row kWidths = [] {
  Row widths{};
  for (size_t i = 0; i + 1 < kAges; i++) widths[i] = kEdges[i + 1] - kEdges[i];
  widths.back() = kEdges.back();
  return widths;
}();

const Row kGuess = [] {
  Row guess{};
  for (size_t i = 0; i < kAges; i++) guess[i] = 0.17 * kWidths[i] / (kEdges[i] + kWidths[i]);
  return guess;
}();

Row summed(std::span<const Row> rows) {
  Row sum = rows[0];
  for (const Row& row : rows.subspan(1))
    for (size_t i = 0; i < kAges; i++) sum[i] += row[i];
  return sum;
}

Row shrunk(const Row& returns, const Row& lives, const Row& towards) {
  Row odds;
  for (size_t i = 0; i < kAges; i++) odds[i] = (returns[i] + kShrink * towards[i]) / (lives[i] + kShrink);
  return odds;
}

struct Point {
  double time, hits;
};

double slope(Point a, Point b) { return b.time > a.time ? (b.hits - a.hits) / (b.time - a.time) : 0.0; }

Row gittins(const Row& odds) {
  std::array<Point, kAges + 1> points{}, hull;
  double alive = 1;
  for (size_t i = 0; i < kAges; i++) {
    points[i + 1] = {points[i].time + alive * kWidths[i] * (1 - odds[i] / 2), points[i].hits + alive * odds[i]};
    alive *= 1 - odds[i];
  }
  hull[0] = points[kAges];
  size_t top = 0;
  Row index;
  for (size_t i = kAges; i-- > 0;) {
    while (top > 0 && slope(points[i], hull[top - 1]) >= slope(points[i], hull[top])) top--;
    index[i] = slope(points[i], hull[top]);
    hull[++top] = points[i];
  }
  return index;
}

void append(std::string& to, uint32_t word) {
  for (int i = 0; i < 4; i++) to += static_cast<char>(word >> (8 * i) & 0xFF);
}

float float_at(const char* from) {
  uint32_t word = 0;
  for (int i = 0; i < 4; i++) word |= static_cast<uint32_t>(static_cast<unsigned char>(from[i])) << (8 * i);
  return std::bit_cast<float>(word);
}

std::string header_of(size_t classes) {
  std::string header(kMagic);
  append(header, static_cast<uint32_t>(classes));
  append(header, kAges);
  return header;
}

}  // namespace

LifeTable::LifeTable(size_t families, size_t size)
    : size_(size),
      returns_(families * size, Row{}),
      lives_(families * size, Row{}),
      index_(families * size),
      rank_of_(families * size * kAges) {
  for (size_t cls = 0; cls < lives_.size(); cls++)
    for (size_t age = 0; age < kAges; age++) order_.push_back({static_cast<uint8_t>(cls), static_cast<uint8_t>(age)});
  rank(std::vector<Row>(lives_.size(), Row{}));
}

void LifeTable::returned(ClassAge class_age, double votes) {
  returns_[class_age.cls][class_age.age] += votes;
  lives_[class_age.cls][class_age.age] += votes;
}

void LifeTable::went_on(ClassAge class_age, double votes) { lives_[class_age.cls][class_age.age] += votes; }

void LifeTable::fade(double factor) {
  for (auto* rows : {&returns_, &lives_})
    for (Row& row : *rows)
      for (double& votes : row) votes *= factor;
}

void LifeTable::rank(const std::vector<Row>& waiting) {
  std::vector<Row> lives = lives_;
  for (size_t cls = 0; cls < lives.size(); cls++)
    for (size_t age = 0; age < kAges; age++) lives[cls][age] += waiting[cls][age] / 2;
  const std::span<const Row> all_returns(returns_), all_lives(lives);
  const Row overall = shrunk(summed(all_returns), summed(all_lives), kGuess);
  for (size_t begin = 0; begin < lives.size(); begin += size_) {
    const Row family =
        shrunk(summed(all_returns.subspan(begin, size_)), summed(all_lives.subspan(begin, size_)), overall);
    for (size_t cls = begin; cls < begin + size_; cls++)
      index_[cls] = gittins(shrunk(returns_[cls], lives[cls], family));
  }
  std::sort(order_.begin(), order_.end(), [this](ClassAge a, ClassAge b) {
    if (index(a) != index(b)) return index(a) < index(b);
    return a.age != b.age ? a.age > b.age : a.cls < b.cls;
  });
  for (size_t rank = 0; rank < order_.size(); rank++)
    rank_of_[order_[rank].cls * kAges + order_[rank].age] = static_cast<uint16_t>(rank);
}

std::string LifeTable::save() const {
  std::string saved = header_of(lives_.size());
  saved.reserve(kHeaderNbytes + 8 * kAges * lives_.size());
  for (const auto* rows : {&returns_, &lives_})
    for (const Row& row : *rows)
      for (const double votes : row) append(saved, std::bit_cast<uint32_t>(static_cast<float>(votes)));
  return saved;
}

bool LifeTable::restore(std::string_view saved) {
  const size_t count = lives_.size() * kAges;
  const std::string header = header_of(lives_.size());
  if (saved.size() != kHeaderNbytes + 8 * count || !saved.starts_with(header)) return false;
  const auto came = [&](size_t i) -> double { return float_at(saved.data() + kHeaderNbytes + 4 * i); };
  const auto seen = [&](size_t i) -> double { return came(count + i); };
  double all = 0;
  for (size_t i = 0; i < count; i++) {
    const double bound = seen(i) * 1.001;
    if (!(0 <= came(i) && came(i) <= bound && bound < 1e30)) return false;
    all += came(i);
  }
  const double factor = std::min(1.0, kTrusted / std::max(1.0, all));
  for (size_t i = 0; i < count; i++) {
    returns_[i / kAges][i % kAges] = came(i) * factor;
    lives_[i / kAges][i % kAges] = seen(i) * factor;
  }
  return true;
}

}  // namespace kvtier
