// Pages in GPU memory to page-locked slots and back, enqueued on a stream. A plain C interface: whoever loads this
// library needs no CUDA toolkit, and it loads where there is no driver.
//
// Every function but kvtier_cuda_error and kvtier_cuda_close answers with a cudaError_t; 0 is success. Addresses are
// raw: whoever calls has checked that every block and every slot exists, keeps both sides alive until the stream has
// done the copy, and calls on a thread that belongs to the device.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
namespace kvtier {
struct Layer;
struct Piece;
}  // namespace kvtier
using kvtier::Layer;
using kvtier::Piece;
#endif

#define KVTIER_API __attribute__((visibility("default")))

struct KvtierPages;

KVTIER_API int kvtier_cuda_devices(int* count);
KVTIER_API const char* kvtier_cuda_error(int error);

// `layers` are copied. `shards` is the address of this rank's shard in slot 0.
KVTIER_API int kvtier_cuda_open(int device, const Layer* layers, uint32_t layer_count, uint64_t shards,
                                uint64_t slot_nbytes, struct KvtierPages** pages);
KVTIER_API void kvtier_cuda_close(struct KvtierPages* pages);

// A kernel that reads or writes the slots where they are. cudaErrorNotSupported if the device cannot.
KVTIER_API int kvtier_cuda_kernel(struct KvtierPages* pages, int to_slots, const Piece* pieces, uint32_t count,
                                  void* stream);
// The device's copy engines: in batches where the driver takes them, else copy by copy; `batched` says which.
KVTIER_API int kvtier_cuda_dma(struct KvtierPages* pages, int to_slots, const Piece* pieces, uint32_t count,
                               void* stream, int* batched);

#ifdef __cplusplus
}
#endif
