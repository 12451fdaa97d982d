// What runs on the device. Compiled to machine code that is embedded in the library (kernels.cpp).
#include <cuda.h>

#include "driver.h"
#include "pages.h"

// A name in C, by which the library finds it.
extern "C" __global__ void __launch_bounds__(512)
    kvtier_copy(const __grid_constant__ kvtier::Batch batch, kvtier::Shards shards, const kvtier::Layer* layers,
                uint32_t layer_count, uint32_t segments, uint32_t to_slots) {
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  kvtier::copy_batch(batch, shards, layers, layer_count, segments, to_slots != 0, thread / 32,
                     gridDim.x * blockDim.x / 32, thread % 32, 32);
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
static_assert(kEventWithoutTiming == CU_EVENT_DISABLE_TIMING);
static_assert(sizeof(CopyAttributes) == sizeof(CUmemcpyAttributes) &&
              offsetof(CopyAttributes, source_hint) == offsetof(CUmemcpyAttributes, srcLocHint) &&
              offsetof(CopyAttributes, target_hint) == offsetof(CUmemcpyAttributes, dstLocHint) &&
              offsetof(CopyAttributes, flags) == offsetof(CUmemcpyAttributes, flags));
static_assert(kInStreamOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM && kInAnyOrder == CU_MEMCPY_SRC_ACCESS_ORDER_ANY &&
              kPreferOverlap == CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
static_assert(sizeof(CUdeviceptr) == sizeof(uint64_t) && sizeof(CUresult) == sizeof(Result));
}  // namespace kvtier
