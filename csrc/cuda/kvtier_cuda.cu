#include "kvtier_cuda.h"

#include <cuda_runtime.h>

#include <new>
#include <vector>

#include "copies.h"
#include "pages.h"

using kvtier::Batch;
using kvtier::Copies;
using kvtier::Shards;

struct KvtierPages {
  int device;
  Shards shards;
  std::vector<Layer> layers;
  Layer* on_device = nullptr;
  bool reaches_host = false;  // a kernel may use host addresses of page-locked memory
  bool batched = true;        // assumed until the driver says otherwise
};

namespace {

constexpr uint32_t kWarp = 32;
constexpr uint32_t kThreads = 512;
// Few: enough to fill the bus to the host, so that the other multiprocessors stay with the engine.
constexpr uint32_t kBlocks = 16;

__global__ void __launch_bounds__(kThreads)
    copy_kernel(const __grid_constant__ Batch batch, Shards shards, const Layer* layers, uint32_t layer_count,
                bool to_slots) {
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  kvtier::copy_batch(batch, shards, layers, layer_count, to_slots, thread / kWarp, gridDim.x * blockDim.x / kWarp,
                     thread % kWarp, kWarp);
}

cudaError_t enqueue_batch(const Copies& copies, cudaStream_t stream) {
#if CUDART_VERSION >= 13000
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  size_t first = 0;
  return cudaMemcpyBatchAsync(copies.to.data(), copies.from.data(), copies.nbytes.data(), copies.nbytes.size(),
                              &attributes, &first, 1, stream);
#else
  return cudaErrorNotSupported;
#endif
}

cudaError_t enqueue_each(const Copies& copies, bool to_slots, cudaStream_t stream) {
  const cudaMemcpyKind kind = to_slots ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
  for (size_t i = 0; i < copies.nbytes.size(); ++i) {
    const cudaError_t error = cudaMemcpyAsync(copies.to[i], copies.from[i], copies.nbytes[i], kind, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Also clears the error in the runtime, where the next caller would find it and take it for its own.
int told(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

cudaError_t open_on_device(KvtierPages& pages) {
  cudaError_t error = cudaSetDevice(pages.device);
  if (error != cudaSuccess) return error;
  int reaches = 0;
  error = cudaDeviceGetAttribute(&reaches, cudaDevAttrCanUseHostPointerForRegisteredMem, pages.device);
  if (error != cudaSuccess) return error;
  pages.reaches_host = reaches != 0;
  const size_t nbytes = pages.layers.size() * sizeof(Layer);
  error = cudaMalloc(reinterpret_cast<void**>(&pages.on_device), nbytes);
  if (error != cudaSuccess) return error;
  return cudaMemcpy(pages.on_device, pages.layers.data(), nbytes, cudaMemcpyHostToDevice);
}

}  // namespace

int kvtier_cuda_devices(int* count) {
  *count = 0;
  return told(cudaGetDeviceCount(count));
}

const char* kvtier_cuda_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

int kvtier_cuda_open(int device, const Layer* layers, uint32_t layer_count, uint64_t shards, uint64_t slot_nbytes,
                     KvtierPages** pages) {
  *pages = nullptr;
  try {
    KvtierPages* opened = new KvtierPages{device, {shards, slot_nbytes}, {layers, layers + layer_count}};
    const cudaError_t error = open_on_device(*opened);
    if (error == cudaSuccess) {
      *pages = opened;
    } else {
      kvtier_cuda_close(opened);
    }
    return told(error);
  } catch (const std::bad_alloc&) {
    return cudaErrorMemoryAllocation;
  }
}

void kvtier_cuda_close(KvtierPages* pages) {
  if (pages && pages->on_device) told(cudaFree(pages->on_device));
  delete pages;
}

int kvtier_cuda_kernel(KvtierPages* pages, int to_slots, const Piece* pieces, uint32_t count, void* stream) {
  if (!pages->reaches_host) return cudaErrorNotSupported;
  cudaError_t error = cudaSetDevice(pages->device);
  const uint32_t layer_count = static_cast<uint32_t>(pages->layers.size());
  for (uint32_t first = 0; first < count && error == cudaSuccess; first += kvtier::kBatch) {
    const Batch batch = kvtier::batch_at(pieces, count, first);
    copy_kernel<<<kBlocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(batch, pages->shards, pages->on_device,
                                                                            layer_count, to_slots != 0);
    error = cudaGetLastError();
  }
  return told(error);
}

int kvtier_cuda_dma(KvtierPages* pages, int to_slots, const Piece* pieces, uint32_t count, void* stream,
                    int* batched) {
  try {
    const Copies copies = kvtier::copies_of(pages->layers, pages->shards, to_slots != 0, pieces, count);
    if (copies.nbytes.empty()) return cudaSuccess;
    cudaError_t error = cudaSetDevice(pages->device);
    if (error == cudaSuccess && pages->batched) {
      error = enqueue_batch(copies, static_cast<cudaStream_t>(stream));
      pages->batched = error != cudaErrorNotSupported && error != cudaErrorCallRequiresNewerDriver;
    }
    if (!pages->batched) {
      told(error);
      error = enqueue_each(copies, to_slots != 0, static_cast<cudaStream_t>(stream));
    }
    *batched = pages->batched;
    return told(error);
  } catch (const std::bad_alloc&) {
    return cudaErrorMemoryAllocation;
  }
}
