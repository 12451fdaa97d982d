// A CUDA driver without a GPU: the device's memory is the host's, and its kernel is the same code, run one lane after
// the other. Work lies on streams until fake_step takes some of it, or is done at once. It counts the calls of each
// function and fails those that a test wants to fail.
//
// What is asked of it that a real driver would refuse, or that would be undefined there, is an error of its own.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "checksums.h"
#include "driver.h"
#include "packing.h"
#include "pages.h"

using namespace kvtier;

namespace {

constexpr Result kNoContext = 201, kNotReady = 600, kAlreadyRegistered = 712, kNotRegistered = 713, kNotFound = 500, kCapturing = 900;
constexpr Result kIllegalAddress = 700;
constexpr int kGlobalCapture = 0;

struct FakeEvent {
  std::shared_ptr<bool> past = std::make_shared<bool>(true);  // of the last record
};

struct Work {
  std::function<bool()> ready;
  std::function<void()> run;
};

struct FakeStream {
  std::deque<Work> work;
};

struct Failure {
  int after, times, result;
};

struct State {
  bool deferred = false, discards = false, has_code = true, lost = false;
  int version = 13000;
  std::map<int, int> attributes{{19, 1}, {41, 1}, {91, 1}, {99, 1}};
  std::map<std::string, int> calls;
  std::map<std::string, Failure> failures;
  std::map<uint64_t, uint64_t> locked, allocated;
  std::vector<std::unique_ptr<FakeStream>> streams;
  size_t longest_batch = 0, most_in_batch = SIZE_MAX, copies = 0, largest_copy = 0;
  void* held = nullptr;
  bool sums_at_once = false;
  bool captures = false, spoiled = false;  // a graph, in global mode, as torch does
  unsigned lanes = 32;
};
State state;
std::recursive_mutex using_state;
thread_local int contexts = 0;
thread_local int capture_mode = kGlobalCapture;

Result called(const char* name) {
  state.calls[name]++;
  if (state.lost) return kIllegalAddress;
  auto found = state.failures.find(name);
  if (found == state.failures.end()) return kSuccess;
  Failure& failure = found->second;
  if (failure.after-- > 0) return kSuccess;
  if (failure.times-- <= 0) return kSuccess;
  return failure.result;
}

#define CALLED(name)                                             \
  const std::lock_guard<std::recursive_mutex> alone{using_state}; \
  if (const Result result = called(name); result != kSuccess) return result
#define IN_CONTEXT(name) \
  CALLED(name);          \
  if (!contexts) return kNoContext

// What a thread must not call while any thread captures a graph, unless its own mode is relaxed.
#define UNSAFE(name) \
  IN_CONTEXT(name);  \
  if (state.captures && capture_mode == kGlobalCapture) return state.spoiled = true, kCapturing

void put(void* stream, std::function<void()> run, std::function<bool()> ready = [] { return true; }) {
  if (state.discards) return;
  if (!state.deferred) return run();
  static_cast<FakeStream*>(stream)->work.push_back({std::move(ready), std::move(run)});
}

bool within(const std::map<uint64_t, uint64_t>& ranges, uint64_t begin, uint64_t nbytes) {
  auto behind = ranges.upper_bound(begin);
  if (behind == ranges.begin()) return false;
  const auto& [at, length] = *std::prev(behind);
  return begin + nbytes <= at + length;
}

// A copy that leaves one page-locked range would fault, and one of other memory would wait for the stream.
bool fits(uint64_t host, size_t nbytes) { return within(state.locked, host, nbytes); }

void enqueue_copy(void* stream, uint64_t to, uint64_t from, size_t nbytes) {
  put(stream, [=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), nbytes); });
}

void copy(void* stream, uint64_t to, uint64_t from, size_t nbytes) {
  state.copies++;
  state.largest_copy = std::max(state.largest_copy, nbytes);
  enqueue_copy(stream, to, from, nbytes);
}

// In any order the source may be read at once, or as late as in the order of the stream: each of two copies does either.
void copy_early(void* stream, uint64_t to, uint64_t from, size_t nbytes) {
  const auto* bytes = reinterpret_cast<const char*>(from);
  put(stream, [to, early = std::vector<char>(bytes, bytes + nbytes)] {
    std::memcpy(reinterpret_cast<void*>(to), early.data(), early.size());
  });
}

Result batch(const uint64_t* to, const uint64_t* from, const size_t* sizes, size_t count, bool any_order, size_t* failed,
             void* stream) {
  state.longest_batch = std::max(state.longest_batch, count);
  for (size_t i = 0; i < count; ++i) {
    if (i >= state.most_in_batch || !(fits(to[i], sizes[i]) || fits(from[i], sizes[i]))) {
      if (failed) *failed = i;
      return kInvalidValue;  // after some were enqueued
    }
    state.copies++;
    state.largest_copy = std::max(state.largest_copy, sizes[i]);
    (any_order && state.copies % 2 ? copy_early : enqueue_copy)(stream, to[i], from[i], sizes[i]);
  }
  return kSuccess;
}

Result batch_of_12(const uint64_t* to, const uint64_t* from, const size_t* sizes, size_t count,
                   const CopyAttributes* attributes, const size_t*, size_t, size_t* failed, void* stream) {
  IN_CONTEXT("cuMemcpyBatchAsync");
  if (!attributes->source_order) return kInvalidValue;
  return batch(to, from, sizes, count, attributes->source_order == kInAnyOrder, failed, stream);
}

// In 13 the place for the failed copy is gone: called with the older signature, its stream would be that.
Result batch_of_13(const uint64_t* to, const uint64_t* from, const size_t* sizes, size_t count,
                   const CopyAttributes* attributes, const size_t*, size_t, void* stream) {
  IN_CONTEXT("cuMemcpyBatchAsync of 13");
  return batch(to, from, sizes, count, attributes->source_order == kInAnyOrder, nullptr, stream);
}

}  // namespace

extern "C" {

// -- for tests -----------------------------------------------------------------------------------------

void fake_reset(int deferred) {
  state = State{};
  state.deferred = deferred != 0;
}
void fake_discard() { state.discards = true; }  // nothing is ever done: only what it takes to ask for it is measured
void fake_lose() {  // some errors a context never forgets
  state.lost = true;
  for (auto& stream : state.streams) stream->work.clear();
}
void fake_version(int version) { state.version = version; }
void fake_code(int fits) { state.has_code = fits != 0; }
void fake_sum_at_once() { state.sums_at_once = true; }  // a bug: what lies there when the kernel is enqueued
void fake_capture(int begin) { state.captures = begin != 0; }
int fake_spoiled() { return state.spoiled; }
void fake_attribute(int number, int value) { state.attributes[number] = value; }
void fake_most_in_batch(uint64_t count) { state.most_in_batch = count; }
void fake_fail(const char* name, int after, int times, int result) { state.failures[name] = {after, times, result}; }
int fake_calls(const char* name) { return state.calls[name]; }
uint64_t fake_longest_batch() { return state.longest_batch; }
uint64_t fake_copies() { return state.copies; }
uint64_t fake_largest_copy() { return state.largest_copy; }
uint64_t fake_locked_ranges() { return state.locked.size(); }
uint64_t fake_allocations() { return state.allocated.size(); }
int fake_contexts() { return contexts; }
// Is this an address of device memory? Then where that begins, and how long it is.
int fake_on_device(uint64_t address, uint64_t* begin, size_t* nbytes) {
  const std::lock_guard<std::recursive_mutex> alone{using_state};
  if (!within(state.allocated, address, 1)) return 0;
  const auto& [at, length] = *std::prev(state.allocated.upper_bound(address));
  if (begin) *begin = at;
  if (nbytes) *nbytes = length;
  return 1;
}

void* fake_stream() {
  state.streams.push_back(std::make_unique<FakeStream>());
  return state.streams.back().get();
}

void fake_call(void* stream, void (*function)()) { put(stream, function); }

uint64_t fake_work(void* stream) { return static_cast<FakeStream*>(stream)->work.size(); }

void fake_hold(void* stream) { state.held = stream; }

// Does the next work of one of the streams that may go on, the `chosen`-th of them. Returns how many there were.
uint64_t fake_step(uint64_t chosen) {
  std::vector<FakeStream*> ready;
  for (auto& stream : state.streams)
    if (stream.get() != state.held && !stream->work.empty() && stream->work.front().ready()) ready.push_back(stream.get());
  if (ready.empty()) return 0;
  FakeStream* stream = ready[chosen % ready.size()];
  const auto run = std::move(stream->work.front().run);
  stream->work.pop_front();
  run();
  return ready.size();
}

// -- the driver ------------------------------------------------------------------------------------------

Result cuInit(unsigned) {
  CALLED("cuInit");
  return kSuccess;
}
Result cuDeviceGet(int* device, int ordinal) {
  if (ordinal) return 101;
  *device = ordinal;
  return kSuccess;
}
Result cuDeviceGetAttribute(int* value, int number, int) {
  *value = state.attributes[number];
  return kSuccess;
}
Result cuGetErrorName(Result, const char** name) {
  *name = "CUDA_ERROR_OF_A_TEST";
  return kSuccess;
}
Result cuGetErrorString(Result, const char** text) {
  *text = "a test wants it";
  return kSuccess;
}
Result cuDevicePrimaryCtxRetain(Context* context, int) {
  *context = &state;
  return kSuccess;
}
Result cuCtxPushCurrent_v2(Context) {
  contexts++;
  return kSuccess;
}
Result cuCtxPopCurrent_v2(Context*) {
  contexts--;
  return kSuccess;
}

Result cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return kSuccess;
}
Result cuMemAlloc_v2(uint64_t* address, size_t nbytes) {
  UNSAFE("cuMemAlloc");
  if (!nbytes) return kInvalidValue;
  *address = reinterpret_cast<uint64_t>(std::aligned_alloc(256, (nbytes + 255) / 256 * 256));
  std::memset(reinterpret_cast<void*>(*address), 0x5A, nbytes);
  state.allocated[*address] = nbytes;
  return kSuccess;
}
Result cuMemFree_v2(uint64_t address) {
  UNSAFE("cuMemFree");
  if (!state.allocated.erase(address)) return kInvalidValue;
  std::free(reinterpret_cast<void*>(address));
  return kSuccess;
}

Result cuMemHostRegister_v2(void* memory, size_t nbytes, unsigned) {
  UNSAFE("cuMemHostRegister");
  const uint64_t begin = reinterpret_cast<uint64_t>(memory);
  for (const auto& [at, length] : state.locked)
    if (begin < at + length && at < begin + nbytes) return kAlreadyRegistered;
  state.locked[begin] = nbytes;
  return kSuccess;
}
Result cuMemHostUnregister(void* memory) {
  UNSAFE("cuMemHostUnregister");
  return state.locked.erase(reinterpret_cast<uint64_t>(memory)) ? kSuccess : kNotRegistered;
}

Result cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t nbytes) {
  IN_CONTEXT("cuMemcpyHtoD");
  std::memcpy(reinterpret_cast<void*>(to), from, nbytes);
  return kSuccess;
}
Result cuStreamSynchronize(Stream) {
  CALLED("cuStreamSynchronize");
  return kSuccess;
}
Result cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t nbytes, void* stream) {
  IN_CONTEXT("cuMemcpyHtoDAsync");
  if (!fits(reinterpret_cast<uint64_t>(from), nbytes)) return kInvalidValue;
  copy(stream, to, reinterpret_cast<uint64_t>(from), nbytes);
  return kSuccess;
}
Result cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t nbytes, void* stream) {
  IN_CONTEXT("cuMemcpyDtoHAsync");
  if (!fits(reinterpret_cast<uint64_t>(to), nbytes)) return kInvalidValue;
  copy(stream, reinterpret_cast<uint64_t>(to), from, nbytes);
  return kSuccess;
}

Result cuMemsetD32Async(uint64_t to, unsigned word, size_t count, void* stream) {
  IN_CONTEXT("cuMemsetD32Async");
  if (!count || to % 4) return kInvalidValue;
  put(stream, [=] { std::fill_n(reinterpret_cast<uint32_t*>(to), count, word); });
  return kSuccess;
}

Result cuEventCreate(Event* event, unsigned) {
  IN_CONTEXT("cuEventCreate");
  *event = new FakeEvent;
  return kSuccess;
}
Result cuEventDestroy_v2(Event) { return kSuccess; }  // a stream may still have work that names it
Result cuEventRecord(Event event, Stream stream) {
  CALLED("cuEventRecord");
  const auto past = static_cast<FakeEvent*>(event)->past = std::make_shared<bool>(false);
  put(stream, [=] { *past = true; });
  return kSuccess;
}
// Waits for the latest record so far, not for later ones. An event that was never recorded has passed.
Result cuStreamWaitEvent(Stream stream, Event event, unsigned) {
  CALLED("cuStreamWaitEvent");
  const auto past = static_cast<FakeEvent*>(event)->past;
  put(stream, [] {}, [=] { return *past; });
  return kSuccess;
}
Result cuEventQuery(Event event) {
  CALLED("cuEventQuery");
  if (state.captures && capture_mode == kGlobalCapture) return state.spoiled = true, kCapturing;
  return *static_cast<FakeEvent*>(event)->past ? kSuccess : kNotReady;
}

Result cuModuleLoadData(void** module, const void*) {
  IN_CONTEXT("cuModuleLoadData");
  if (!state.has_code) return 209;
  *module = &state;
  return kSuccess;
}
Result cuModuleGetFunction(Function* function, void*, const char* name) {
  static const std::set<std::string> names{"kvtier_copy", "kvtier_checksum", "kvtier_pack", "kvtier_place_ends",
                                           "kvtier_unpack"};
  const auto found = names.find(name);
  if (found == names.end()) return kNotFound;
  *function = const_cast<std::string*>(&*found);
  return kSuccess;
}

static void checksum(unsigned warps, Stream stream, void** arguments) {
  const auto ranges = *static_cast<const Ranges*>(arguments[0]);
  auto* sums = *static_cast<uint32_t* const*>(arguments[1]);
  const auto add_all = [=](uint32_t* to) {
    static constexpr ChecksumTables tables = checksum_tables();
    // From the last to the first: whatever order warps come in.
    for (uint32_t worker = warps; worker--;)
      for (uint32_t lane = 0; lane < kLanes; ++lane) sum_ranges(ranges, tables, to, worker, warps, lane);
  };
  if (!state.sums_at_once) return put(stream, [=] { add_all(sums); });
  std::vector<uint32_t> early(ranges.count);
  add_all(early.data());
  put(stream, [=] {
    for (uint32_t i = 0; i < ranges.count; ++i) sums[i] ^= early[i];
  });
}

// From the last warp to the first, as above.
static void pack(const std::string& kernel, uint32_t warps, Stream stream, void** arguments) {
  const auto packing = *static_cast<const Packing*>(arguments[0]);
  if (kernel == "kvtier_pack")
    return put(stream, [=] {
      for (uint32_t warp = warps; warp--;) pack_shards(packing, warp, warps);
    });
  auto* flags = *static_cast<uint32_t* const*>(arguments[1]);
  const auto run = kernel == "kvtier_unpack" ? unpack_shards : place_ends;
  put(stream, [=] {
    for (uint32_t warp = warps; warp--;) run(packing, flags, warp, warps);
  });
}

Result cuLaunchKernel(Function function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                      unsigned, Stream stream, void** arguments, void**) {
  IN_CONTEXT("cuLaunchKernel");
  const std::string& kernel = *static_cast<const std::string*>(function);
  const uint32_t warps = blocks * threads / kLanes;
  if (kernel == "kvtier_checksum") return checksum(warps, stream, arguments), kSuccess;
  if (kernel != "kvtier_copy") return pack(kernel, warps, stream, arguments), kSuccess;
  const auto pieces = *static_cast<const Batch*>(arguments[0]);
  const auto shards = *static_cast<const Shards*>(arguments[1]);
  const auto* layers = *static_cast<const Layer* const*>(arguments[2]);
  const auto layer_count = *static_cast<const uint32_t*>(arguments[3]);
  const auto segments = *static_cast<const uint32_t*>(arguments[4]);
  const auto to_slots = *static_cast<const uint32_t*>(arguments[5]);
  const uint32_t workers = blocks * threads / state.lanes;
  put(stream, [=] {
    for (uint32_t worker = 0; worker < workers; ++worker)
      for (uint32_t lane = 0; lane < state.lanes; ++lane)
        copy_batch(pieces, shards, layers, layer_count, segments, to_slots != 0, worker, workers, lane, state.lanes);
  });
  return kSuccess;
}

Result cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t, int* status) {
  *function = nullptr;
  *status = 1;
  if (std::string(name) != "cuMemcpyBatchAsync" || state.version < 12080 || version < 12080) return kNotFound;
  *status = 0;
  *function = version >= 13000 && state.version >= 13000 ? reinterpret_cast<void*>(batch_of_13)
                                                          : reinterpret_cast<void*>(batch_of_12);
  return kSuccess;
}

// The kernels that pack, over any memory.
void fake_pack(const Packing* packing, uint32_t* overfull, uint32_t warps) {
  for (uint32_t warp = warps; warp--;) pack_shards(*packing, warp, warps);
  for (uint32_t warp = warps; warp--;) place_ends(*packing, overfull, warp, warps);
}
void fake_unpack(const Packing* packing, uint32_t* harmed, uint32_t warps) {
  for (uint32_t warp = warps; warp--;) unpack_shards(*packing, harmed, warp, warps);
}

// One page by one worker.
void fake_copy_bytes(uint64_t to, uint64_t from, uint64_t nbytes, uint32_t lanes) {
  for (uint32_t lane = 0; lane < lanes; ++lane) copy_bytes(to, from, nbytes, lane, lanes);
}

}  // extern "C"
