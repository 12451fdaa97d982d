// What runs on the device. Compiled to machine code that is embedded in the library (kernels.cpp).
#include <cuda.h>

#include "checksums.h"
#include "driver.h"
#include "packing.h"
#include "pages.h"

// Names in C, by which the library finds them.
extern "C" __global__ void __launch_bounds__(512)
    kvtier_copy(const __grid_constant__ kvtier::Batch batch, kvtier::Shards shards, const kvtier::Layer* layers,
                uint32_t layer_count, uint32_t segments, uint32_t to_slots) {
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  kvtier::copy_batch(batch, shards, layers, layer_count, segments, to_slots != 0, thread / 32,
                     gridDim.x * blockDim.x / 32, thread % 32, 32);
}

namespace {
__device__ const kvtier::ChecksumTables kTables = kvtier::checksum_tables();
}

extern "C" __global__ void __launch_bounds__(512) kvtier_checksum(kvtier::Ranges ranges, uint32_t* sums) {
  __shared__ kvtier::ChecksumTables tables;  // each lane looks up another entry
  for (uint32_t i = threadIdx.x; i < sizeof tables / 4; i += blockDim.x)
    reinterpret_cast<uint32_t*>(&tables)[i] = reinterpret_cast<const uint32_t*>(&kTables)[i];
  __syncthreads();
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  kvtier::sum_ranges(ranges, tables, sums, thread / kvtier::kLanes, gridDim.x * blockDim.x / kvtier::kLanes,
                     thread % kvtier::kLanes);
}

namespace {
__device__ uint32_t warp() { return (blockIdx.x * blockDim.x + threadIdx.x) / kvtier::kLanes; }
__device__ uint32_t warps() { return gridDim.x * blockDim.x / kvtier::kLanes; }
}  // namespace

extern "C" __global__ void __launch_bounds__(512, 2) kvtier_pack(kvtier::Packing packing) {
  kvtier::pack_shards(packing, warp(), warps());
}

extern "C" __global__ void __launch_bounds__(512, 2) kvtier_place_ends(kvtier::Packing packing, uint32_t* overfull) {
  kvtier::place_ends(packing, overfull, warp(), warps());
}

extern "C" __global__ void __launch_bounds__(512, 2) kvtier_unpack(kvtier::Packing packing, uint32_t* harmed) {
  kvtier::unpack_shards(packing, harmed, warp(), warps());
}

// Is what driver.h declares what the toolkit declares?
namespace kvtier {
static_assert(kSuccess == CUDA_SUCCESS && kInvalidValue == CUDA_ERROR_INVALID_VALUE &&
              kNotSupported == CUDA_ERROR_NOT_SUPPORTED);
static_assert(kCanMapHostMemory == CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY &&
              kUnifiedAddressing == CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING &&
              kCanUseHostPointer == CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM &&
              kHostRegisterSupported == CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED);
static_assert(kRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE && kRegisterDeviceMap == CU_MEMHOSTREGISTER_DEVICEMAP);
static_assert(kEventWithoutTiming == CU_EVENT_DISABLE_TIMING && kRelaxedCapture == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(sizeof(CopyAttributes) == sizeof(CUmemcpyAttributes) &&
              offsetof(CopyAttributes, source_hint) == offsetof(CUmemcpyAttributes, srcLocHint) &&
              offsetof(CopyAttributes, target_hint) == offsetof(CUmemcpyAttributes, dstLocHint) &&
              offsetof(CopyAttributes, flags) == offsetof(CUmemcpyAttributes, flags));
static_assert(kInStreamOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM && kInAnyOrder == CU_MEMCPY_SRC_ACCESS_ORDER_ANY &&
              kPreferOverlap == CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
static_assert(sizeof(CUdeviceptr) == sizeof(uint64_t) && sizeof(CUresult) == sizeof(Result));
}  // namespace kvtier
