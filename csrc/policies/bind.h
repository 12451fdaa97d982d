#pragma once

#include <nanobind/nanobind.h>

namespace kvtier {

// Lru and Gittins, each with the methods of kvtier_core.interfaces.EvictionPolicy.
void bind_policies(nanobind::module_& m);

}  // namespace kvtier
