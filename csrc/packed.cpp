// The loops over values are plain and without branches, so that the compiler makes vector instructions of them: once for
// each instruction set. On arm64 the baseline has NEON.
#include "packed.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "copy.h"

namespace kvtier {
namespace {

constexpr size_t kHeaderNbytes = 64;
constexpr size_t kTileValues = 2048;
constexpr size_t kValuesUnit = 128;  // of values in the last tile
constexpr size_t kEscapes = 9;
constexpr uint8_t kRaw = 255;
constexpr unsigned char kMagic[8] = {'k', 'v', 'p', 1};

struct Escape {
  uint8_t position[2];
  uint8_t exponent;
};

struct TileHead {
  uint8_t base;
  uint8_t least;
  uint8_t escapes;
  Escape escape[kEscapes];
  uint8_t unused[2];
};
static_assert(sizeof(TileHead) == 32 && alignof(TileHead) == 1);

// The parts of the encoded form of a payload.
struct Form {
  size_t values;  // in tiles
  size_t heads;   // bytes
  size_t rest;    // bytes

  explicit Form(size_t payload_nbytes)
      : values(payload_nbytes / (2 * kValuesUnit) * kValuesUnit),
        heads(((values + kTileValues - 1) / kTileValues * sizeof(TileHead) + 63) / 64 * 64),
        rest(payload_nbytes - 2 * values) {}
};

using Value = uint16_t __attribute__((aligned(1), may_alias));

#define KVTIER_INLINE inline __attribute__((always_inline))

KVTIER_INLINE uint8_t exponent_of(uint16_t value) { return static_cast<uint8_t>(value >> 7); }

KVTIER_INLINE uint8_t without_exponent(uint16_t value) { return static_cast<uint8_t>(value << 1 | value >> 15); }

KVTIER_INLINE uint8_t code_of(uint8_t exponent, uint8_t base) {
  return static_cast<uint8_t>(std::max(exponent, base) - base);
}

// Not zero if no code stands for the exponent.
KVTIER_INLINE uint8_t missed(uint8_t exponent, uint8_t base, uint8_t least) {
  return static_cast<uint8_t>(-(code_of(exponent, base) == 0) & (exponent ^ least));
}

KVTIER_INLINE uint8_t highest_exponent(const Value* values, size_t n) {
  uint16_t highest = 0;
  for (size_t i = 0; i < n; i++) highest = std::max<uint16_t>(highest, values[i] & 0x7FFF);
  return exponent_of(highest);
}

// Values i and n/2 + i make pair i. Where one of a pair is an escape `misses` is not zero, and its code is 0.
KVTIER_INLINE void split(uint8_t* __restrict body, uint8_t* __restrict misses, const Value* __restrict values, size_t n,
                         uint8_t base, uint8_t least) {
  const size_t pairs = n / 2;
  for (size_t i = 0; i < pairs; i++) {
    const uint16_t a = values[i], b = values[pairs + i];
    body[i] = without_exponent(a);
    body[pairs + i] = without_exponent(b);
    body[n + i] = static_cast<uint8_t>(code_of(exponent_of(a), base) | code_of(exponent_of(b), base) << 4);
    misses[i] = missed(exponent_of(a), base, least) | missed(exponent_of(b), base, least);
  }
}

// Returns false if there are too many.
KVTIER_INLINE bool list_escapes(TileHead& head, const uint8_t* misses, const Value* values, size_t n) {
  const size_t pairs = n / 2;
  for (size_t begin = 0; begin < pairs; begin += 32) {
    uint64_t words[4];
    std::memcpy(words, misses + begin, sizeof words);
    if (!(words[0] | words[1] | words[2] | words[3])) continue;
    for (size_t i = begin; i < begin + 32; i++) {
      if (!misses[i]) continue;
      for (const size_t place : {i, pairs + i}) {
        const uint8_t exponent = exponent_of(values[place]);
        if (!missed(exponent, head.base, head.least)) continue;
        if (head.escapes == kEscapes) return false;
        head.escape[head.escapes++] = {{static_cast<uint8_t>(place), static_cast<uint8_t>(place >> 8)}, exponent};
      }
    }
  }
  return true;
}

// Pairs `begin` to `end` of a tile of n values.
KVTIER_INLINE void join(Value* __restrict values, const uint8_t* __restrict body, size_t n, uint8_t base, uint8_t least,
                        size_t begin, size_t end) {
  const auto value = [=](uint8_t rest, uint8_t code) {
    const uint8_t exponent = code ? static_cast<uint8_t>(base + code) : least;
    return static_cast<uint16_t>((rest & 1) << 15 | exponent << 7 | rest >> 1);
  };
  const size_t pairs = n / 2;
  for (size_t i = begin; i < end; i++) {
    values[i] = value(body[i], body[n + i] & 15);
    values[pairs + i] = value(body[pairs + i], body[n + i] >> 4);
  }
}

// Returns the bytes of the body, which is made in the first-level cache.
KVTIER_INLINE size_t pack_tile(TileHead& head, std::byte* to, const std::byte* from, size_t n,
                               Destination destination) {
  const auto* values = reinterpret_cast<const Value*>(from);
  alignas(64) uint8_t body[kTileValues * 3 / 2], misses[kTileValues / 2];
  const uint8_t highest = highest_exponent(values, n), base = highest > 15 ? highest - 15 : 0;
  for (const uint8_t least : {base, uint8_t{0}}) {  // where there are many zeros they take a code
    head = {base, least, 0, {}, {}};
    split(body, misses, values, n, base, least);
    if (!list_escapes(head, misses, values, n)) continue;
    copy(to, reinterpret_cast<const std::byte*>(body), n * 3 / 2, destination);
    return n * 3 / 2;
  }
  head = {0, 0, kRaw, {}, {}};
  copy(to, from, 2 * n, destination);
  return 2 * n;
}

// Returns the bytes of the body, of which `left` may be read at most; 0 if the tile is damaged.
KVTIER_INLINE size_t unpack_tile(std::byte* to, const TileHead& head, const std::byte* from, size_t left, size_t n,
                                 Destination destination) {
  const bool raw = head.escapes == kRaw;
  const size_t nbytes = raw ? 2 * n : n * 3 / 2;
  if (nbytes > left || (!raw && head.escapes > kEscapes)) return 0;
  if (raw) {
    copy(to, from, nbytes, destination);
    return nbytes;
  }
  alignas(64) uint16_t values[kTileValues];
  const auto* body = reinterpret_cast<const uint8_t*>(from);
  constexpr size_t kPieces = 8;  // between them the next tile is fetched into the caches
  for (size_t i = 0; i < kPieces; i++) {
    const size_t ahead = nbytes + nbytes * i / kPieces, end = std::min(ahead + nbytes / kPieces, left);
    for (size_t line = ahead; line < end; line += 64) __builtin_prefetch(from + line);
    join(values, body, n, head.base, head.least, n / 2 * i / kPieces, n / 2 * (i + 1) / kPieces);
  }
  for (size_t i = 0; i < head.escapes; i++) {
    const auto& [position, exponent] = head.escape[i];
    const size_t place = position[0] | position[1] << 8;
    if (place >= n) return 0;
    values[place] = static_cast<uint16_t>((values[place] & 0x807F) | exponent << 7);
  }
  copy(to, reinterpret_cast<const std::byte*>(values), 2 * n, destination);
  return nbytes;
}

struct Method {
  const char* name;
  size_t (*pack_tile)(TileHead&, std::byte*, const std::byte*, size_t, Destination);
  size_t (*unpack_tile)(std::byte*, const TileHead&, const std::byte*, size_t, size_t, Destination);
};

#define KVTIER_METHOD(name, attributes)                                                                             \
  attributes size_t pack_##name(TileHead& head, std::byte* to, const std::byte* from, size_t n, Destination where) { \
    return pack_tile(head, to, from, n, where);                                                                     \
  }                                                                                                                 \
  attributes size_t unpack_##name(std::byte* to, const TileHead& head, const std::byte* from, size_t left, size_t n, \
                                  Destination where) {                                                              \
    return unpack_tile(to, head, from, left, n, where);                                                             \
  }                                                                                                                 \
  constexpr Method k_##name{#name, pack_##name, unpack_##name};

KVTIER_METHOD(baseline, )
#if defined(__x86_64__)
KVTIER_METHOD(avx2, __attribute__((target("avx2"))))
KVTIER_METHOD(avx512, __attribute__((target("avx512bw,avx512vl,avx512vbmi"))))
#endif

const std::vector<Method> kMethods = [] {
  std::vector<Method> methods;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi"))
    methods.push_back(k_avx512);
  if (__builtin_cpu_supports("avx2")) methods.push_back(k_avx2);
#endif
  methods.push_back(k_baseline);
  return methods;
}();

}  // namespace

size_t packed_bound(size_t nbytes) { return kHeaderNbytes + Form(nbytes).heads + nbytes; }

size_t pack(std::byte* into, const std::byte* payload, size_t nbytes, size_t method) {
  const Form form(nbytes);
  const Destination destination = destination_of(nbytes);
  auto* head = reinterpret_cast<TileHead*>(into + kHeaderNbytes);
  std::byte* to = into + kHeaderNbytes + form.heads;
  const uint64_t told = nbytes;
  std::memset(into, 0, kHeaderNbytes + form.heads);
  std::memcpy(into, kMagic, sizeof kMagic);
  std::memcpy(into + sizeof kMagic, &told, sizeof told);
  for (size_t done = 0; done < form.values; done += kTileValues) {
    const size_t some = std::min(kTileValues, form.values - done);
    to += kMethods[method].pack_tile(*head++, to, payload + 2 * done, some, destination);
  }
  std::memcpy(to, payload + 2 * form.values, form.rest);
  store_fence();
  return static_cast<size_t>(to - into) + form.rest;
}

bool unpack(std::byte* into, size_t payload_nbytes, const std::byte* encoded, size_t nbytes, size_t method) {
  const Form form(payload_nbytes);
  const Destination destination = destination_of(payload_nbytes);
  if (nbytes < kHeaderNbytes + form.heads + form.rest) return false;
  uint64_t told;
  std::memcpy(&told, encoded + sizeof kMagic, sizeof told);
  if (std::memcmp(encoded, kMagic, sizeof kMagic) || told != payload_nbytes) return false;
  const auto* head = reinterpret_cast<const TileHead*>(encoded + kHeaderNbytes);
  const std::byte* from = encoded + kHeaderNbytes + form.heads;
  size_t left = nbytes - kHeaderNbytes - form.heads;
  for (size_t done = 0; done < form.values; done += kTileValues) {
    const size_t some = std::min(kTileValues, form.values - done);
    const size_t used = kMethods[method].unpack_tile(into + 2 * done, *head++, from, left, some, destination);
    if (!used) return false;
    from += used, left -= used;
  }
  if (left != form.rest) return false;
  std::memcpy(into + 2 * form.values, from, form.rest);
  store_fence();
  return true;
}

const std::vector<std::string>& packed_methods() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Method& method : kMethods) all.emplace_back(method.name);
    return all;
  }();
  return names;
}

}  // namespace kvtier
