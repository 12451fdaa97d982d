// Memory of a file that another process may truncate. An access to a page that is gone is a SIGBUS, which would end the
// process; here the whole mapping then becomes zeros, and says so.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier {

// Guards a mapping until `unguard`. Returns its number; -1 if there are too many, or no signal can be handled.
int guard(uintptr_t begin, size_t nbytes);

// Has the mapping with this number become zeros?
bool was_replaced(int number);

// To be called before the mapping ends.
void unguard(int number);

}  // namespace kvtier
