// Copies pages in GPU memory to page-locked slots and back, enqueued on streams. A plain C interface: its callers need
// no CUDA toolkit, and it loads where there is no driver.
//
// A function that returns an int returns 1, or 0 if it failed; then kvtier_cuda_problem says why. Addresses are raw:
// the caller has checked that every block and every slot exists, and keeps both sides alive until the streams have done
// the copy. It calls on one thread, but where it says so; no call changes the thread's current context.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
namespace kvtier {
class Device;
class Staging;
class Part;
struct Layer;
}  // namespace kvtier
using KvtierDevice = kvtier::Device;
using KvtierStaging = kvtier::Staging;
using KvtierPart = kvtier::Part;
using KvtierLayer = kvtier::Layer;
#endif

#define KVTIER_API __attribute__((visibility("default")))

enum KvtierMethod { KVTIER_DIRECT = 0, KVTIER_STAGED = 1, KVTIER_KERNEL = 2 };

// Why the last call on this thread failed, in plain words.
KVTIER_API const char* kvtier_cuda_problem(void);

// The digest of the sources that this was built from, see kvtier_core/native.py.
KVTIER_API const char* kvtier_cuda_stamp(void);
// What the kernels in it were compiled for, such as "compute_80 sm_80 sm_90"; empty if it has none.
KVTIER_API const char* kvtier_cuda_architectures(void);

// A device of the driver in the library of this name, with the context that the engine uses. It is never closed.
KVTIER_API int kvtier_cuda_open(const char* driver, int ordinal, KvtierDevice** device);
// May the kernels be used, may they use host addresses, and are copies enqueued many at a time? All three may be 0.
KVTIER_API void kvtier_cuda_abilities(KvtierDevice* device, int* kernels, int* reaches_host, int* batches);

// Why the kernels cannot be used; empty if they can.
KVTIER_API const char* kvtier_cuda_no_kernels(KvtierDevice* device);

// Page-locks memory. Any thread may call.
KVTIER_API int kvtier_cuda_lock(KvtierDevice* device, uint64_t address, uint64_t nbytes);
KVTIER_API int kvtier_cuda_unlock(KvtierDevice* device, uint64_t address);

// Device memory.
KVTIER_API int kvtier_cuda_allocate(KvtierDevice* device, uint64_t nbytes, uint64_t* address);
KVTIER_API int kvtier_cuda_free(KvtierDevice* device, uint64_t address);

// Device memory in two halves, to stage copies of one direction in.
KVTIER_API int kvtier_cuda_stage(KvtierDevice* device, uint64_t half_nbytes, KvtierStaging** staging);
KVTIER_API void kvtier_cuda_unstage(KvtierDevice* device, KvtierStaging* staging);

// The layers of one part of a chunk, in the order of the shard. `shards` is the address of this rank's shard in slot 0;
// slots are page-locked in pieces that begin every `stride` bytes from `locked` on, or lie on the device if that is 0.
// Unless `packed_nbytes`, a multiple of 16, is 0, shards are packed (csrc/packed.h), and each has that many bytes.
KVTIER_API int kvtier_cuda_part(KvtierDevice* device, const KvtierLayer* layers, uint32_t layer_count, uint64_t shards,
                                uint64_t slot_nbytes, uint64_t locked, uint64_t stride, uint64_t packed_nbytes,
                                KvtierPart** part);
KVTIER_API void kvtier_cuda_close_part(KvtierDevice* device, KvtierPart* part);

// Can its copies of one direction be made like this? `staging` may be null.
KVTIER_API int kvtier_cuda_can(KvtierDevice* device, KvtierPart* part, int method, int to_slots,
                               KvtierStaging* staging);
// Enqueues the copies of `chunks` chunks. `rows` has `width` block ids for each, group after group, or -1; `slots` has
// its slot. Even after a failure the stream `kernels` is then behind all that touches pages, and `bus` behind all that
// writes to slots. `staging` is always used with the same two streams. A staged store of whole chunks may have `sums`
// and `told`, see kvtier_cuda_checksums: the CRC-32 of each shard is there when `bus` has done it. Else they are 0.
// Where shards are packed every job has them. Behind the checksums of a store is a word for each chunk: 1 if it does not
// fit into its shard, whose content is then undefined. A load has one word: 1 if a shard is damaged, when `kernels` has
// done it.
KVTIER_API int kvtier_cuda_copy(KvtierDevice* device, KvtierPart* part, int method, int to_slots, const int32_t* rows,
                                const int32_t* slots, uint32_t chunks, uint32_t width, void* kernels, void* bus,
                                KvtierStaging* staging, uint64_t sums, uint64_t told);

// Enqueues the CRC-32, as zlib computes it, of `count` ranges on the device, of `nbytes` each and `stride` apart. They
// are computed in `sums`, device memory of four bytes a range, and copied to `told`, page-locked memory of that size,
// where they are when the stream has done it. Needs kernels. Any thread may call.
KVTIER_API int kvtier_cuda_checksums(KvtierDevice* device, uint64_t address, uint64_t stride, uint64_t nbytes,
                                     uint32_t count, uint64_t sums, uint64_t told, void* stream);

#ifdef __cplusplus
}
#endif
