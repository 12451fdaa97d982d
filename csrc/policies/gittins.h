// Evicts the chunk that is least likely to return soon for the room it takes. Gives the same answers as
// kvtier_core/policies/gittins.py.
#pragma once

#include <optional>
#include <queue>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "../list.h"
#include "../table.h"
#include "lifetable.h"
#include "bitmap.h"

namespace kvtier {

// Half of a ghost's key. Two keys that are digests have the same fingerprint once in 2^64 pairs: then a request for the
// one counts as a return of the other, and some chunk is evicted earlier or later than it should be. No held key is lost
// or becomes a victim twice.
struct Fingerprint {
  uint32_t high, low;  // two words of four bytes, so that a ghost needs no padding
  bool operator==(const Fingerprint&) const = default;
};

inline Fingerprint fingerprint_of(const Key& key) {
  const uint64_t hash = hash_of(key);
  return {static_cast<uint32_t>(hash >> 32), static_cast<uint32_t>(hash)};
}

inline uint64_t hash_of(Fingerprint fingerprint) { return uint64_t{fingerprint.high} << 32 | fingerprint.low; }

class Gittins {
 public:
  class Victims;

  explicit Gittins(size_t sizes);

  static size_t announced(bool ends, std::string_view pause);
  void request(std::span<const Key> path, double now, size_t pause);  // as announced
  bool admit(const Key& key);                  // false if it is held
  bool forget(const Key& key, bool evicted);   // false if it is not held
  std::optional<bool> prefers(const Key& newcomer, const Key& victim) const;  // nullopt if the victim is not known
  std::string save() const { return table_.save(); }
  void restore(std::string_view saved);
  size_t nbytes() const { return held_.nbytes() + ghosts_.nbytes() + groups_.nbytes(); }

 private:
  struct Held {
    Key key;
    Links order;
    Number group;
  };

  struct Ghost {
    Fingerprint key;
    Links order;
    Number group;
  };

  // Keys of one class that the same request named last. They share one vote.
  struct Group {
    ClassAge class_age;
    bool in_cell = false, holding = false;
    uint32_t named = 1;    // the vote is shared among so many keys
    uint32_t members = 0;  // held keys and ghosts
    double since;
    List<&Held::order> held{};  // leaf first
    Links among_all{}, among_holding{};

    uint64_t votes() const;
  };

  // The groups of one class and step of age, the oldest first.
  struct Cell {
    List<&Group::among_all> groups;
    List<&Group::among_holding> holding;  // those with a held key
    uint64_t votes = 0;
    bool awaited = false;  // due_ has an entry for its oldest group
  };

  // When a cell's oldest group reaches the next step of age.
  struct Due {
    double when;
    uint8_t cls, age;
    auto operator<=>(const Due&) const = default;
  };

  // Where a key was found, if it was.
  struct Found {
    Number number = kNone;
    bool held = false;
  };

  Found find(const Key& key) const;
  Number group_of(Found found) const { return found.held ? held_[found.number].group : ghosts_[found.number].group; }
  Cell& cell_of(ClassAge class_age) { return cells_[class_age.cls * kAges + class_age.age]; }
  Number new_group(uint8_t cls, double since);

  void join(Number group, Found key);
  void leave(Found key);
  void drop_if_empty(Number group);
  void forget_ghost(Number number);
  Number remember(const Key& key);
  void place(Number group);
  void await(Cell& cell, const Group& group);
  void grow_older(double now);
  void move_on(Cell& cell, Number group);
  void bound_ghosts();
  void rank();

  const size_t sizes_;
  const size_t kinds_;  // of requests: of each size, and again of each size if the session ends
  Table<Held> held_;
  Table<Ghost> ghosts_;
  List<&Ghost::order> remembered_;  // the oldest ghost first
  Pool<Group> groups_;
  LifeTable table_;
  std::vector<Cell> cells_;
  std::priority_queue<Due, std::vector<Due>, std::greater<>> due_;
  Bitmap live_;  // ranks of the cells with a held key
  uint64_t requests_ = 0;
  double now_ = 0;
  uint64_t changes_ = 0;
  std::vector<Found> found_;  // where request() found each key of its path; kept so that its memory is reused
};

// The victims, best first. Must not outlive its policy.
class Gittins::Victims {
 public:
  explicit Victims(const Gittins& policy);

  const Key* next();  // nullptr at the end. Throws runtime_error if the policy has changed since.

 private:
  void enter_cell(size_t rank);

  const Gittins& policy_;
  const uint64_t changes_;
  size_t rank_ = 0;
  Number group_ = kNone, next_ = kNone;
};

}  // namespace kvtier
