#pragma once

#include <nanobind/nanobind.h>

namespace kvtier {

// Lru and Git, each with the methods of kvtier_core.interfaces.EvictionPolicy.
void bind_policies(nanobind::module_& m);

}  // namespace kvtier
