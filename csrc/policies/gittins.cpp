#include "gittins.h"

#include <algorithm>
#include <array>
#include <bit>
#include <stdexcept>

namespace kvtier {
namespace {

constexpr std::array<unsigned, 4> kPauses{64, 256, 1024, 4096};  // seconds
constexpr size_t kReuses = 3, kGhosts = 4, kFew = 64, kRanking = 64;
constexpr double kFade = 0.9991131650796176;
constexpr uint64_t kVote = uint64_t{720720} << 12;

constexpr double fraction(uint64_t votes) { return static_cast<double>(votes) / kVote; }

}  // namespace

Gittins::Gittins(size_t sizes)
    : sizes_(sizes),
      kinds_(sizes + kPauses.size()),
      table_(kReuses, kinds_),
      cells_(kReuses * kinds_ * kAges),
      live_(cells_.size()) {}

// The number of steps of a pause that has been reached: all if the session ends, 0 without a hint.
size_t Gittins::announced(bool ends, std::string_view pause) {
  if (ends) return kPauses.size();
  unsigned seconds = 0;
  if (pause.size() > 9) return 0;
  for (const char digit : pause) {
    if (digit < '0' || digit > '9') return 0;
    seconds = 10 * seconds + static_cast<unsigned>(digit - '0');
  }
  return static_cast<size_t>(std::upper_bound(kPauses.begin(), kPauses.end(), seconds) - kPauses.begin());
}

void Gittins::request(std::span<const Key> path, double now, size_t pause) {
  changes_++;
  grow_older(now);
  found_.clear();
  size_t unknown = 0;
  for (const Key& key : path) {
    found_.push_back(find(key));
    unknown += found_.back().number == kNone;
  }
  const size_t size = std::min<size_t>(static_cast<size_t>(std::bit_width(unknown)), sizes_ - 1);
  const size_t kind = pause ? sizes_ + pause - 1 : size;
  // The new groups, one for each count of reuses, in the order in which they are needed.
  Number fresh[kReuses];
  size_t count = 0;
  const auto is_fresh = [&](Number group) { return std::find(fresh, fresh + count, group) != fresh + count; };
  // Leaf before root, so that a prefix is evicted last of its group.
  for (size_t i = path.size(); i-- > 0;) {
    Found found = found_[i];
    if (found.number == kNone) found = find(path[i]);  // it may stand in the path twice
    size_t reuses = 0;
    if (found.number != kNone) {
      const Number before = group_of(found);
      if (is_fresh(before)) continue;  // named twice in one path
      const Group& group = groups_[before];
      table_.returned(group.class_age, 1.0 / group.named);
      reuses = std::min<size_t>(group.class_age.cls / kinds_ + 1, kReuses - 1);
      leave(found);
      drop_if_empty(before);
    } else {
      found = {remember(path[i]), false};
    }
    const auto cls = static_cast<uint8_t>(reuses * kinds_ + kind);
    Number* group = std::find_if(fresh, fresh + count, [&](Number each) { return groups_[each].class_age.cls == cls; });
    if (group == fresh + count) fresh[count++] = new_group(cls, now);
    join(*group, found);
  }
  for (size_t i = 0; i < count; i++) {
    groups_[fresh[i]].named = groups_[fresh[i]].members;
    place(fresh[i]);
  }
  bound_ghosts();
  if (++requests_ % kRanking == 0) rank();
}

bool Gittins::admit(const Key& key) {
  const Found found = find(key);
  if (found.held) return false;
  changes_++;
  Number group;
  if (found.number == kNone) {  // no request named it, as after a restart
    group = new_group(0, now_);
  } else {
    group = group_of(found);
    leave(found);
    ghosts_.erase(found.number);
  }
  join(group, {held_.insert({key, {}, group}), true});
  place(group);
  return true;
}

std::optional<bool> Gittins::prefers(const Key& newcomer, const Key& victim) const {
  const Found one = find(newcomer), other = find(victim);
  if (other.number == kNone) return std::nullopt;
  if (one.number == kNone) return true;
  return table_.index(groups_[group_of(one)].class_age) >= table_.index(groups_[group_of(other)].class_age);
}

bool Gittins::forget(const Key& key, bool evicted) {
  const Found found = find(key);
  if (!found.held) return false;
  changes_++;
  const Number group = group_of(found);
  leave(found);
  held_.erase(found.number);
  if (evicted) {
    join(group, {remember(key), false});
    place(group);
  } else {
    drop_if_empty(group);
  }
  bound_ghosts();
  return true;
}

void Gittins::restore(std::string_view saved) {
  changes_++;
  if (table_.restore(saved)) rank();
}

Gittins::Found Gittins::find(const Key& key) const {
  if (const Number number = held_.find(key); number != kNone) return {number, true};
  return {ghosts_.find(fingerprint_of(key)), false};
}

Number Gittins::new_group(uint8_t cls, double since) { return groups_.add({.class_age = {cls, 0}, .since = since}); }

uint64_t Gittins::Group::votes() const { return kVote * members / named; }

void Gittins::join(Number number, Found key) {
  Group& group = groups_[number];
  const uint64_t before = group.votes();
  if (key.held) {
    held_[key.number].group = number;
    group.held.append(held_, key.number);
  } else {
    ghosts_[key.number].group = number;
    remembered_.append(ghosts_, key.number);
  }
  group.members++;
  if (group.in_cell) cell_of(group.class_age).votes += group.votes() - before;
}

// The caller removes the key's entry, and its group if that is empty then.
void Gittins::leave(Found key) {
  const Number number = group_of(key);
  Group& group = groups_[number];
  Cell& cell = cell_of(group.class_age);
  const uint64_t before = group.votes();
  if (key.held) {
    group.held.remove(held_, key.number);
  } else {
    remembered_.remove(ghosts_, key.number);
  }
  group.members--;
  if (group.held.empty() && group.holding) {
    cell.holding.remove(groups_, number);
    group.holding = false;
    if (cell.holding.empty()) live_.unset(table_.rank_of(group.class_age));
  }
  if (!group.in_cell) return;
  cell.votes += group.votes() - before;
  if (group.members == 0) {
    cell.groups.remove(groups_, number);
    group.in_cell = false;
  }
}

void Gittins::drop_if_empty(Number group) {
  if (groups_[group].members == 0) groups_.drop(group);
}

void Gittins::forget_ghost(Number number) {
  const Number group = ghosts_[number].group;
  leave({number, false});
  ghosts_.erase(number);
  drop_if_empty(group);
}

// Makes the key a ghost, of no group yet.
Number Gittins::remember(const Key& key) { return ghosts_.insert({fingerprint_of(key), {}, kNone}); }

// Puts a group into its cell if it is not there.
void Gittins::place(Number number) {
  Group& group = groups_[number];
  Cell& cell = cell_of(group.class_age);
  if (!group.in_cell) {
    cell.groups.append(groups_, number);
    group.in_cell = true;
    cell.votes += group.votes();
    if (group.class_age.age + 1u < kAges && !cell.awaited) await(cell, group);
  }
  if (!group.held.empty() && !group.holding) {
    if (cell.holding.empty()) live_.set(table_.rank_of(group.class_age));
    cell.holding.append(groups_, number);
    group.holding = true;
  }
}

void Gittins::await(Cell& cell, const Group& group) {
  due_.push({group.since + kEdges[group.class_age.age + 1], group.class_age.cls, group.class_age.age});
  cell.awaited = true;
}

void Gittins::grow_older(double now) {
  now_ = now;
  while (!due_.empty() && due_.top().when <= now) {
    const ClassAge class_age{due_.top().cls, due_.top().age};
    due_.pop();
    Cell& cell = cell_of(class_age);
    cell.awaited = false;
    while (!cell.groups.empty()) {
      const Number oldest = cell.groups.first();
      if (groups_[oldest].since + kEdges[class_age.age + 1u] > now) {
        await(cell, groups_[oldest]);
        break;
      }
      move_on(cell, oldest);
    }
  }
}

void Gittins::move_on(Cell& cell, Number number) {
  Group& group = groups_[number];
  table_.went_on(group.class_age, fraction(group.votes()));
  cell.groups.remove(groups_, number);
  group.in_cell = false;
  cell.votes -= group.votes();
  if (group.holding) {
    cell.holding.remove(groups_, number);
    group.holding = false;
    if (cell.holding.empty()) live_.unset(table_.rank_of(group.class_age));
  }
  group.class_age.age++;
  place(number);
}

void Gittins::bound_ghosts() {
  const size_t most = std::max(kFew, kGhosts * held_.size());
  while (ghosts_.size() > most) forget_ghost(remembered_.first());
}

void Gittins::rank() {
  table_.fade(kFade);
  std::vector<LifeTable::Row> waiting(kReuses * kinds_);
  for (size_t i = 0; i < cells_.size(); i++) waiting[i / kAges][i % kAges] = fraction(cells_[i].votes);
  table_.rank(waiting);
  live_.clear();
  for (size_t i = 0; i < cells_.size(); i++) {
    const ClassAge class_age{static_cast<uint8_t>(i / kAges), static_cast<uint8_t>(i % kAges)};
    if (!cells_[i].holding.empty()) live_.set(table_.rank_of(class_age));
  }
}

Gittins::Victims::Victims(const Gittins& policy) : policy_(policy), changes_(policy.changes_) { enter_cell(0); }

const Key* Gittins::Victims::next() {
  if (next_ == kNone) return nullptr;
  if (changes_ != policy_.changes_) throw std::runtime_error("the policy changed while its victims were iterated");
  const Held& held = policy_.held_[next_];
  next_ = held.order.after;
  if (next_ == kNone) {
    group_ = policy_.groups_[group_].among_holding.after;
    if (group_ != kNone) {
      next_ = policy_.groups_[group_].held.first();
    } else {
      enter_cell(rank_ + 1);
    }
  }
  return &held.key;
}

// Goes to the first cell with a held key from this rank on; without one the iteration is over.
void Gittins::Victims::enter_cell(size_t rank) {
  rank_ = policy_.live_.from(rank);
  if (rank_ == policy_.live_.end()) return;
  const ClassAge class_age = policy_.table_.order()[rank_];
  group_ = policy_.cells_[class_age.cls * kAges + class_age.age].holding.first();
  next_ = policy_.groups_[group_].held.first();
}

}  // namespace kvtier
