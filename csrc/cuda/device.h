// A device as this library uses it, and the errors of its driver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "checksums.h"
#include "driver.h"
#include "packing.h"
#include "pages.h"

namespace kvtier {

// The machine code of the kernels; null if the library was built without nvcc.
const void* kernels();
// What they were compiled for, in nvcc's words; empty without.
const char* architectures();

// Of a kernel that copies or computes within the device memory: as many as run at once on a large GPU, so that it soon
// makes room. An engine's short kernels wait for the last of its blocks.
constexpr unsigned kBlocksOnDevice = 256;

class Device {
 public:
  // False if there is none that can be used.
  bool open(const char* driver, int ordinal);

  // Calls of the driver by member pointer: `call(&Driver::record, "record an event", event, stream)`. On failure
  // `problem` has what was tried and what the driver said; nothing stays behind in the driver.
  template <typename... P, typename... A>
  bool call(Result (*Driver::*function)(P...), const char* what, A... arguments) const {
    return must((driver_.*function)(arguments...), what);
  }
  bool must(Result result, const char* what) const;

  const Driver& driver() const { return driver_; }
  Context context() const { return context_; }
  bool has_kernels() const { return unpack_ != nullptr; }
  const char* no_kernels() const { return no_kernels_.c_str(); }  // why there are none
  // May the device use host addresses of page-locked memory? Not everywhere (WSL). Else only the driver's plain copies
  // can be used, which look up what an address is.
  bool reaches_host() const { return reaches_host_; }
  bool takes_batches() const { return takes_batches_; }
  void refuse_batches() { takes_batches_ = false; }

  // Enqueues the kernel in `blocks` blocks for some layers on the device, of at most `segments` a page.
  bool launch(unsigned blocks, const Batch& batch, const Shards& shards, const Layer* layers, uint32_t layer_count,
              uint32_t segments, bool to_slots, Stream stream) const;
  // The checksums of what lies on the device, in three steps on one stream: `count` sums of so many bytes each begin
  // there, ranges are added to them, as often as there are ranges, and they are copied to the host.
  bool begin_checksums(uint64_t sums, uint32_t count, uint64_t nbytes, Stream stream) const;
  bool add_checksums(const Ranges& ranges, uint64_t sums, Stream stream) const;
  // Packs shards, or unpacks them. `overfull` has a word for each shard, `harmed` one for all: it is 1 if a shard has no
  // room, or was not packed, and else left as it is.
  bool pack(const Packing& packing, uint64_t overfull, Stream stream) const;
  bool unpack(const Packing& packing, uint64_t harmed, Stream stream) const;
  // Words of four bytes: makes them 0, and copies them to page-locked memory.
  bool clear(uint64_t words, uint64_t count, Stream stream) const;
  bool tell(uint64_t words, uint64_t count, uint64_t told, Stream stream) const;
  bool lock(void* address, size_t nbytes) const;

 private:
  bool look() const;
  bool attribute(int number, int* value) const;
  bool load_kernels();
  template <typename... A>
  bool start(const char* what, Function kernel, unsigned blocks, Stream stream, const A&... arguments) const;

  Driver driver_ = {};
  int ordinal_ = -1;
  Context context_ = nullptr;
  Function kernel_ = nullptr, checksum_ = nullptr, pack_ = nullptr, place_ends_ = nullptr, unpack_ = nullptr;
  bool reaches_host_ = false;
  bool takes_batches_ = false;
  std::string no_kernels_;
};

// Why the last call on this thread failed.
const char* problem();
// Notes why a call failed, and returns false.
bool fail(const char* why);

// Makes a device's context, the one that the engine uses too, current on this thread while it lives. Meanwhile this
// thread may call what would fail, and spoil the capture, while another thread of the engine captures a graph: nothing
// that is done here is part of one.
class Current {
 public:
  explicit Current(const Device& device)
      : device_(device), ok_(device.call(&Driver::push, "enter the context", device.context())) {
    if (ok_) device_.driver().exchange_capture_mode(&mode_);
  }
  ~Current() {
    Context left;
    if (!ok_) return;
    device_.driver().exchange_capture_mode(&mode_);
    device_.driver().pop(&left);
  }
  Current(const Current&) = delete;
  explicit operator bool() const { return ok_; }

 private:
  const Device& device_;
  int mode_ = kRelaxedCapture;  // then that of before
  bool ok_;
};

}  // namespace kvtier
