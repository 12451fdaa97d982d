// What is used of the CUDA driver. Declared here, and found in the driver's library when a device is opened: so nothing
// of CUDA is needed to build this or to load it, and no call of ours leaves an error behind in anybody's CUDA runtime.
// kernels.cu compares what is declared with the toolkit's own header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier {

using Result = int;       // CUresult
using Context = void*;    // CUcontext
using Stream = void*;     // CUstream
using Event = void*;      // CUevent
using Function = void*;   // CUfunction

constexpr Result kSuccess = 0, kInvalidValue = 1, kNotSupported = 801;

// CUdevice_attribute
constexpr int kCanMapHostMemory = 19, kUnifiedAddressing = 41, kCanUseHostPointer = 91, kHostRegisterSupported = 99;
constexpr unsigned kRegisterPortable = 1, kRegisterDeviceMap = 2;
constexpr unsigned kEventWithoutTiming = 2;
constexpr int kRelaxedCapture = 2;  // CUstreamCaptureMode

struct CopyAttributes {  // CUmemcpyAttributes
  int source_order;
  int source_hint[2], target_hint[2];
  unsigned flags;
};
constexpr int kInStreamOrder = 1, kInAnyOrder = 3;
constexpr unsigned kPreferOverlap = 1;

struct Driver {
  Result (*init)(unsigned);
  Result (*device)(int*, int);
  Result (*attribute)(int*, int, int);
  Result (*error_name)(Result, const char**);
  Result (*error_string)(Result, const char**);
  Result (*context)(Context*, int);
  Result (*push)(Context);
  Result (*pop)(Context*);
  Result (*allocate)(uint64_t*, size_t);
  Result (*free)(uint64_t);
  Result (*exchange_capture_mode)(int*);
  Result (*lock)(void*, size_t, unsigned);
  Result (*unlock)(void*);
  Result (*write)(uint64_t, const void*, size_t);
  Result (*synchronize)(Stream);
  Result (*copy_to_device)(uint64_t, const void*, size_t, Stream);
  Result (*copy_to_host)(void*, uint64_t, size_t, Stream);
  Result (*fill)(uint64_t, unsigned, size_t, Stream);  // words of 4 bytes
  Result (*create_event)(Event*, unsigned);
  Result (*destroy_event)(Event);
  Result (*record)(Event, Stream);
  Result (*wait)(Stream, Event, unsigned);
  Result (*load_module)(void**, const void*);
  Result (*function)(Function*, void*, const char*);
  Result (*launch)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**,
                   void**);
  // As CUDA 12.8 declares it; a later driver has that one too, under that version. Null if the driver is older.
  Result (*copy_batch)(const uint64_t*, const uint64_t*, const size_t*, size_t, const CopyAttributes*, const size_t*,
                       size_t, size_t*, Stream);
};

// The driver in a library of this name or path, which is never closed. On failure: why, in plain words, and false.
bool find_driver(const char* path, Driver* driver, const char** why);

}  // namespace kvtier
