// A list of numbered entries. Its links lie in the entries, so that an entry is removed by its number in constant time.
#pragma once

#include "pool.h"

namespace kvtier {

struct Links {
  Number before = kNone, after = kNone;
};

// ``kLinks`` is the member of an entry that holds its links; an entry is in one list of this kind at a time.
template <auto kLinks>
class List {
 public:
  bool empty() const { return first_ == kNone; }
  Number first() const { return first_; }

  template <class Entries>
  void append(Entries& entries, Number number) {
    entries[number].*kLinks = {last_, kNone};
    (last_ == kNone ? first_ : (entries[last_].*kLinks).after) = number;
    last_ = number;
  }

  template <class Entries>
  void remove(Entries& entries, Number number) {
    const Links links = entries[number].*kLinks;
    (links.before == kNone ? first_ : (entries[links.before].*kLinks).after) = links.after;
    (links.after == kNone ? last_ : (entries[links.after].*kLinks).before) = links.before;
  }

 private:
  Number first_ = kNone, last_ = kNone;
};

}  // namespace kvtier
