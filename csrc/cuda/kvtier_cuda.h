// Copies pages in GPU memory to page-locked slots and back, enqueued on a stream. A plain C interface: its callers need
// no CUDA toolkit, and it loads where there is no driver.
//
// Every function but kvtier_cuda_error and kvtier_cuda_close returns a cudaError_t; 0 is success. Addresses are raw:
// the caller has checked that every block and every slot exists, and keeps both sides alive until the stream has done
// the copy. It calls on one thread, whose current device may be changed to the one that was opened.
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

// How many devices there are.
KVTIER_API int kvtier_cuda_devices(int* count);
// What an error means, in plain words.
KVTIER_API const char* kvtier_cuda_error(int error);

// The layers of one KV group, which are copied from `layers`. `shards` is the address of this rank's shard in slot 0.
KVTIER_API int kvtier_cuda_open(int device, const Layer* layers, uint32_t layer_count, uint64_t shards,
                                uint64_t slot_nbytes, struct KvtierPages** pages);
KVTIER_API void kvtier_cuda_close(struct KvtierPages* pages);

// Enqueues a kernel that reads or writes the slots in host memory. cudaErrorNotSupported if the device cannot.
KVTIER_API int kvtier_cuda_kernel(struct KvtierPages* pages, int to_slots, const Piece* pieces, uint32_t count,
                                  void* stream);
// Enqueues copies by the device's copy engines: in one call where the driver supports it, else one by one; `batched`
// says which.
KVTIER_API int kvtier_cuda_dma(struct KvtierPages* pages, int to_slots, const Piece* pieces, uint32_t count,
                               void* stream, int* batched);

#ifdef __cplusplus
}
#endif
