#include "kvtier_cuda.h"

#include <memory>
#include <vector>

#include "device.h"
#include "part.h"

using kvtier::Current;
using kvtier::Driver;

// What is opened is handed out only if all went well. Without memory for a few words the process ends anyway.

const char* kvtier_cuda_problem(void) { return kvtier::problem(); }

const char* kvtier_cuda_stamp(void) { return KVTIER_CUDA_STAMP; }

const char* kvtier_cuda_architectures(void) { return kvtier::architectures(); }

int kvtier_cuda_open(const char* driver, int ordinal, KvtierDevice** device) {
  auto opened = std::make_unique<kvtier::Device>();
  if (!opened->open(driver, ordinal)) return 0;
  *device = opened.release();
  return 1;
}

void kvtier_cuda_abilities(KvtierDevice* device, int* kernels, int* reaches_host, int* batches) {
  *kernels = device->has_kernels();
  *reaches_host = device->reaches_host();
  *batches = device->takes_batches();
}

const char* kvtier_cuda_no_kernels(KvtierDevice* device) { return device->no_kernels(); }

int kvtier_cuda_lock(KvtierDevice* device, uint64_t address, uint64_t nbytes) {
  const Current current{*device};
  return current && device->lock(reinterpret_cast<void*>(address), nbytes);
}

int kvtier_cuda_unlock(KvtierDevice* device, uint64_t address) {
  const Current current{*device};
  return current && device->call(&Driver::unlock, "release page-locked memory", reinterpret_cast<void*>(address));
}

int kvtier_cuda_allocate(KvtierDevice* device, uint64_t nbytes, uint64_t* address) {
  const Current current{*device};
  return current && device->call(&Driver::allocate, "allocate memory", address, nbytes);
}

int kvtier_cuda_free(KvtierDevice* device, uint64_t address) {
  const Current current{*device};
  return current && device->call(&Driver::free, "free memory", address);
}

int kvtier_cuda_stage(KvtierDevice* device, uint64_t half_nbytes, KvtierStaging** staging) {
  const Current current{*device};
  if (!current) return 0;
  auto opened = std::make_unique<kvtier::Staging>();
  if (!opened->open(*device, half_nbytes)) {
    opened->close(*device);
    return 0;
  }
  *staging = opened.release();
  return 1;
}

void kvtier_cuda_unstage(KvtierDevice* device, KvtierStaging* staging) {
  const Current current{*device};
  if (current && staging) staging->close(*device);
  delete staging;
}

int kvtier_cuda_part(KvtierDevice* device, const KvtierLayer* layers, uint32_t layer_count, uint64_t shards,
                     uint64_t slot_nbytes, uint64_t locked, uint64_t stride, uint64_t packed_nbytes, KvtierPart** part) {
  const Current current{*device};
  if (!current) return 0;
  auto opened = std::make_unique<kvtier::Part>(*device, std::vector<kvtier::Layer>(layers, layers + layer_count),
                                               kvtier::Shards{shards, slot_nbytes},
                                               kvtier::LockedPieces{locked, stride}, packed_nbytes);
  if (!opened->open()) return 0;
  *part = opened.release();
  return 1;
}

void kvtier_cuda_close_part(KvtierDevice* device, KvtierPart* part) {
  const Current current{*device};
  delete part;
}

int kvtier_cuda_can(KvtierDevice* device, KvtierPart* part, int method, int to_slots, KvtierStaging* staging) {
  if (part->packs() && (method != KVTIER_STAGED || part->slots_on_device())) return 0;
  if (part->slots_on_device()) return method == KVTIER_KERNEL && device->has_kernels();
  if (method == KVTIER_STAGED) return staging && part->can_stage(*staging);
  // A kernel that writes to the host is not offered: others saw illegal accesses on Hopper (SGLang 8991).
  if (method == KVTIER_KERNEL) return !to_slots && device->has_kernels() && device->reaches_host();
  return method == KVTIER_DIRECT;
}

int kvtier_cuda_copy(KvtierDevice* device, KvtierPart* part, int method, int to_slots, const int32_t* rows,
                     const int32_t* slots, uint32_t chunks, uint32_t width, void* kernels, void* bus,
                     KvtierStaging* staging, uint64_t sums, uint64_t told) {
  const Current current{*device};
  if (!current) return 0;
  if (!kvtier_cuda_can(device, part, method, to_slots, staging) || (part->packs() && chunks && !told))
    return kvtier::fail("these pages cannot be copied like this");
  const kvtier::Chunks all = {rows, slots, chunks, width};
  const kvtier::Streams streams = {kernels, bus};
  if (method == KVTIER_STAGED) return part->copy_staged(to_slots != 0, all, streams, *staging, {sums, told});
  if (method == KVTIER_KERNEL) return part->copy_by_kernel(to_slots != 0, all, streams);
  return part->copy_directly(to_slots != 0, all, streams);
}

int kvtier_cuda_checksums(KvtierDevice* device, uint64_t address, uint64_t stride, uint64_t nbytes, uint32_t count,
                          uint64_t sums, uint64_t told, void* stream) {
  const Current current{*device};
  if (!current) return 0;
  if (!device->has_kernels()) return kvtier::fail("nothing on this device computes checksums");
  return device->begin_checksums(sums, count, nbytes, stream) &&
         device->add_checksums({address, stride, nbytes, 0, count}, sums, stream) &&
         device->tell(sums, count, told, stream);
}
