// What KvikIO asks a driver for besides what kvtier does, over the memory of cuda_driver.cpp. There is no GPUDirect
// Storage: KvikIO reads into a buffer of the host's, and copies from there.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

using Result = int;

extern "C" {

// Of cuda_driver.cpp.
int fake_on_device(uint64_t address, uint64_t* begin, size_t* nbytes);
Result cuMemHostRegister_v2(void* memory, size_t nbytes, unsigned flags);
Result cuMemHostUnregister(void* memory);
Result cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t nbytes, void* stream);

constexpr Result kInvalid = 1, kMissing = 801;
constexpr int kContext = 1, kMemoryType = 2, kDevicePointer = 3, kOrdinal = 9, kOnDevice = 2;

Result cuDriverGetVersion(int* version) {
  *version = 12040;  // older than batches of copies
  return 0;
}
Result cuDeviceGetCount(int* count) {
  *count = 1;
  return 0;
}

Result cuPointerGetAttribute(void* answer, int attribute, uint64_t address) {
  if (!fake_on_device(address, nullptr, nullptr)) return kInvalid;  // as of memory that the driver does not know
  if (attribute == kContext) *static_cast<void**>(answer) = &answer;
  if (attribute == kMemoryType) *static_cast<int*>(answer) = kOnDevice;
  if (attribute == kDevicePointer) *static_cast<uint64_t*>(answer) = address;
  if (attribute == kOrdinal) *static_cast<int*>(answer) = 0;
  return 0;
}
Result cuPointerGetAttributes(unsigned count, int* attributes, void** answers, uint64_t address) {
  for (unsigned i = 0; i < count; ++i)
    if (const Result result = cuPointerGetAttribute(answers[i], attributes[i], address)) return result;
  return 0;
}
Result cuMemGetAddressRange_v2(uint64_t* begin, size_t* nbytes, uint64_t address) {
  return fake_on_device(address, begin, nbytes) ? 0 : kInvalid;
}

Result cuMemHostAlloc(void** memory, size_t nbytes, unsigned) {
  *memory = std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
  return cuMemHostRegister_v2(*memory, nbytes, 0);
}
Result cuMemFreeHost(void* memory) {
  const Result result = cuMemHostUnregister(memory);
  std::free(memory);
  return result;
}

Result cuMemcpyAsync(uint64_t to, uint64_t from, size_t nbytes, void* stream) {
  return cuMemcpyHtoDAsync_v2(to, reinterpret_cast<const void*>(from), nbytes, stream);
}
Result cuStreamCreate(void** stream, unsigned) {
  *stream = std::malloc(1);  // work on it is done at once
  return 0;
}
Result cuStreamDestroy_v2(void* stream) {
  std::free(stream);
  return 0;
}
Result cuCtxGetCurrent(void** context) {
  *context = &context;
  return 0;
}
Result cuCtxGetDevice(int* device) {
  *device = 0;
  return 0;
}

// Looked up, and not called here.
#define MISSING(name) \
  Result name() { return kMissing; }
MISSING(cuCtxCreate_v2)
MISSING(cuCtxCreate_v4)
MISSING(cuCtxDestroy_v2)
MISSING(cuDevicePrimaryCtxRelease_v2)
MISSING(cuEventSynchronize)
MISSING(cuLaunchHostFunc)

}  // extern "C"
