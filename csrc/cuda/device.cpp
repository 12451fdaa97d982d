#include "device.h"

namespace kvtier {
namespace {

thread_local std::string last_problem;

constexpr unsigned kThreads = 512;  // of a block of a kernel

constexpr ChecksumTables kTables = checksum_tables();

}  // namespace

const char* problem() { return last_problem.c_str(); }

bool fail(const char* why) {
  last_problem = why;
  return false;
}

bool Device::must(Result result, const char* what) const {
  if (result == kSuccess) return true;
  const char *name = nullptr, *text = nullptr;
  driver_.error_name(result, &name);
  driver_.error_string(result, &text);
  last_problem = std::string("CUDA cannot ") + what + ": " + (text ? text : "?") + " (" + (name ? name : "?") + ", " +
                 std::to_string(result) + ")";
  return false;
}

bool Device::open(const char* driver, int ordinal) {
  const char* why = "";
  if (!find_driver(driver, &driver_, &why)) return fail((std::string("no CUDA driver: ") + why).c_str());
  int number = 0;
  if (!call(&Driver::init, "begin", 0u) || !call(&Driver::device, "find the device", &number, ordinal)) return false;
  ordinal_ = number;
  if (!look()) return false;
  int reaches = 0, maps = 0;
  if (!attribute(kCanUseHostPointer, &reaches) || !attribute(kCanMapHostMemory, &maps)) return false;
  reaches_host_ = reaches && maps;
  takes_batches_ = driver_.copy_batch && reaches_host_;  // elsewhere batches of such addresses fault
  return call(&Driver::context, "enter the context", &context_, ordinal_) && load_kernels();
}

// Without these nothing here works.
bool Device::look() const {
  int unified = 0, locks = 0;
  if (!attribute(kUnifiedAddressing, &unified) || !attribute(kHostRegisterSupported, &locks)) return false;
  if (!unified) return fail("the device has addresses of its own (no unified addressing)");
  if (!locks) return fail("the device cannot page-lock memory that it did not allocate");
  return true;
}

bool Device::attribute(int number, int* value) const {
  return call(&Driver::attribute, "read an attribute", value, number, ordinal_);
}

bool Device::load_kernels() {
  const void* code = kernels();
  no_kernels_ = "none are built in: there was no nvcc";
  if (!code) return true;
  const Current current{*this};
  if (!current) return false;
  // Code that does not suit this GPU is no reason to refuse it: copy engines need none.
  void* module = nullptr;
  if (!call(&Driver::load_module, "load the kernels", &module, code)) {
    no_kernels_ = std::string(problem()) + "; built in: " + architectures();
    return true;
  }
  no_kernels_.clear();
  const auto find = [&](Function& kernel, const char* name) {
    return call(&Driver::function, "find a kernel", &kernel, module, name);
  };
  return find(kernel_, "kvtier_copy") && find(checksum_, "kvtier_checksum") && find(pack_, "kvtier_pack") &&
         find(place_ends_, "kvtier_place_ends") && find(unpack_, "kvtier_unpack");
}

bool Device::lock(void* address, size_t nbytes) const {
  const unsigned flags = kRegisterPortable | (reaches_host_ ? kRegisterDeviceMap : 0);
  return call(&Driver::lock, "page-lock memory", address, nbytes, flags);
}

template <typename... A>
bool Device::start(const char* what, Function kernel, unsigned blocks, Stream stream, const A&... arguments) const {
  const void* all[] = {&arguments...};
  return call(&Driver::launch, what, kernel, blocks, 1u, 1u, kThreads, 1u, 1u, 0u, stream, const_cast<void**>(all),
              nullptr);
}

bool Device::launch(unsigned blocks, const Batch& batch, const Shards& shards, const Layer* layers,
                    uint32_t layer_count, uint32_t segments, bool to_slots, Stream stream) const {
  return start("start the kernel", kernel_, blocks, stream, batch, shards, layers, layer_count, segments,
               uint32_t{to_slots});
}

bool Device::begin_checksums(uint64_t sums, uint32_t count, uint64_t nbytes, Stream stream) const {
  return !count || call(&Driver::fill, "fill memory", sums, sum_of_zeros(kTables, nbytes), size_t{count}, stream);
}

bool Device::add_checksums(const Ranges& ranges, uint64_t sums, Stream stream) const {
  if (!ranges.count || !ranges.nbytes) return true;
  return start("start the kernel of checksums", checksum_, kBlocksOnDevice, stream, ranges, sums);
}

bool Device::pack(const Packing& packing, uint64_t overfull, Stream stream) const {
  return start("start the kernel that packs", pack_, kBlocksOnDevice, stream, packing) &&
         start("start the kernel that places ends", place_ends_, kBlocksOnDevice, stream, packing, overfull);
}

bool Device::unpack(const Packing& packing, uint64_t harmed, Stream stream) const {
  return start("start the kernel that unpacks", unpack_, kBlocksOnDevice, stream, packing, harmed);
}

bool Device::clear(uint64_t words, uint64_t count, Stream stream) const {
  return !count || call(&Driver::fill, "fill memory", words, 0u, count, stream);
}

bool Device::tell(uint64_t words, uint64_t count, uint64_t told, Stream stream) const {
  return !count || call(&Driver::copy_to_host, "copy checksums to the host", reinterpret_cast<void*>(told), words,
                        count * sizeof(uint32_t), stream);
}

}  // namespace kvtier
