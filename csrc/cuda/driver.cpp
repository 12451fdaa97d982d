#include "driver.h"

#include <dlfcn.h>

namespace kvtier {
namespace {

constexpr int kVersionOfBatches = 12080;  // CUDA 12.8

template <typename F>
bool find(void* library, const char* name, F* function) {
  *function = reinterpret_cast<F>(dlsym(library, name));
  return *function != nullptr;
}

// A name has had several signatures; the driver hands out the one of the version that is asked for.
template <typename F>
void find_of_version(void* library, const char* name, int version, F* function) {
  Result (*get)(const char*, void**, int, uint64_t, int*) = nullptr;
  void* found = nullptr;
  int status = 0;
  if (!find(library, "cuGetProcAddress_v2", &get) || get(name, &found, version, 0, &status) != kSuccess) found = nullptr;
  *function = reinterpret_cast<F>(found);
}

}  // namespace

bool find_driver(const char* path, Driver* driver, const char** why) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    *why = dlerror();
    return false;
  }
  find_of_version(library, "cuMemcpyBatchAsync", kVersionOfBatches, &driver->copy_batch);
  const char* missing = nullptr;
  const auto need = [&](const char* name, auto* function) {
    if (!find(library, name, function)) missing = name;
  };
  need("cuInit", &driver->init);
  need("cuDeviceGet", &driver->device);
  need("cuDeviceGetAttribute", &driver->attribute);
  need("cuGetErrorName", &driver->error_name);
  need("cuGetErrorString", &driver->error_string);
  need("cuDevicePrimaryCtxRetain", &driver->context);
  need("cuCtxPushCurrent_v2", &driver->push);
  need("cuCtxPopCurrent_v2", &driver->pop);
  need("cuMemAlloc_v2", &driver->allocate);
  need("cuMemFree_v2", &driver->free);
  need("cuThreadExchangeStreamCaptureMode", &driver->exchange_capture_mode);
  need("cuMemHostRegister_v2", &driver->lock);
  need("cuMemHostUnregister", &driver->unlock);
  need("cuMemcpyHtoD_v2", &driver->write);
  need("cuStreamSynchronize", &driver->synchronize);
  need("cuMemcpyHtoDAsync_v2", &driver->copy_to_device);
  need("cuMemcpyDtoHAsync_v2", &driver->copy_to_host);
  need("cuMemsetD32Async", &driver->fill);
  need("cuEventCreate", &driver->create_event);
  need("cuEventDestroy_v2", &driver->destroy_event);
  need("cuEventRecord", &driver->record);
  need("cuStreamWaitEvent", &driver->wait);
  need("cuModuleLoadData", &driver->load_module);
  need("cuModuleGetFunction", &driver->function);
  need("cuLaunchKernel", &driver->launch);
  if (missing) *why = missing;
  return !missing;
}

}  // namespace kvtier
