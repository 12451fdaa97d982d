// The loops over values are plain and without branches, so that the compiler makes vector instructions of them: once for
// each instruction set. On arm64 the baseline has NEON.
#include "packed.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "crc32.h"

namespace kvtier {
namespace {

constexpr size_t kHeaderNbytes = 64;
constexpr size_t kValuesUnit = 128;  // of values in the last tile
constexpr size_t kEscapes = 9;
constexpr uint8_t kRaw = 255;
constexpr unsigned char kMagic[8] = {'k', 'v', 'p', 2};

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

constexpr size_t kPieces = 8;  // of a tile: between them the next one is fetched into the caches

// Of a tile of n values.
constexpr size_t body_nbytes(size_t n) { return n * 3 / 2; }
constexpr size_t end_nbytes(size_t n) { return n / 2; }

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
                         uint8_t base, uint8_t least, size_t begin, size_t end) {
  const size_t pairs = n / 2;
  for (size_t i = begin; i < end; i++) {
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

// Returns false if the tile is raw; what is written to `to` is then undefined.
KVTIER_INLINE bool pack_tile(TileHead& head, std::byte* to, const std::byte* from, size_t n, const std::byte* next) {
  const auto* values = reinterpret_cast<const Value*>(from);
  auto* body = reinterpret_cast<uint8_t*>(to);
  alignas(64) uint8_t misses[kTileValues / 2];
  const uint8_t highest = highest_exponent(values, n), base = highest > 15 ? highest - 15 : 0;
  for (const uint8_t least : {base, uint8_t{0}}) {  // where there are many zeros they take a code
    head = {base, least, 0, {}, {}};
    for (size_t i = 0; i < kPieces; i++) {
      for (size_t line = kTileNbytes * i / kPieces; line < kTileNbytes * (i + 1) / kPieces; line += 64)
        __builtin_prefetch(next + line);
      split(body, misses, values, n, base, least, n / 2 * i / kPieces, n / 2 * (i + 1) / kPieces);
    }
    if (list_escapes(head, misses, values, n)) return true;
  }
  return false;
}

// A tile that is not raw. Returns false if it is damaged.
KVTIER_INLINE bool unpack_tile(std::byte* to, const TileHead& head, const std::byte* from, size_t n) {
  auto* values = reinterpret_cast<Value*>(to);
  const auto* body = reinterpret_cast<const uint8_t*>(from);
  const size_t nbytes = body_nbytes(n);
  for (size_t i = 0; i < kPieces; i++) {
    for (size_t line = nbytes * i / kPieces; line < nbytes * (i + 1) / kPieces; line += 64)
      __builtin_prefetch(from + nbytes + line);
    join(values, body, n, head.base, head.least, n / 2 * i / kPieces, n / 2 * (i + 1) / kPieces);
  }
  for (size_t i = 0; i < head.escapes; i++) {
    const auto& [position, exponent] = head.escape[i];
    const size_t place = position[0] | position[1] << 8;
    if (place >= n) return false;
    values[place] = static_cast<uint16_t>((values[place] & 0x807F) | exponent << 7);
  }
  return true;
}

struct Method {
  const char* name;
  bool (*pack_tile)(TileHead&, std::byte*, const std::byte*, size_t, const std::byte*);
  bool (*unpack_tile)(std::byte*, const TileHead&, const std::byte*, size_t);
};

#define KVTIER_METHOD(name, attributes)                                                                           \
  attributes bool pack_##name(TileHead& head, std::byte* to, const std::byte* from, size_t n,                     \
                              const std::byte* next) {                                                            \
    return pack_tile(head, to, from, n, next);                                                                    \
  }                                                                                                               \
  attributes bool unpack_##name(std::byte* to, const TileHead& head, const std::byte* from, size_t n) {           \
    return unpack_tile(to, head, from, n);                                                                        \
  }                                                                                                               \
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

PackedForm::PackedForm(size_t payload_nbytes)
    : values(payload_nbytes / (2 * kValuesUnit) * kValuesUnit),
      rest(payload_nbytes - 2 * values),
      bodies(kHeaderNbytes + ((values + kTileValues - 1) / kTileValues * sizeof(TileHead) + 63) / 64 * 64),
      ends(bodies + body_nbytes(values) + rest) {}

size_t packed_bound(size_t nbytes) {
  const PackedForm form(nbytes);
  return form.ends + end_nbytes(form.values);
}

Packer::Packer(std::byte* into, size_t room, size_t payload_nbytes, Destination destination, size_t method)
    : form_(payload_nbytes),
      into_(into),
      room_(room),
      payload_nbytes_(payload_nbytes),
      destination_(destination),
      method_(method),
      used_(form_.ends),
      fits_(form_.ends <= room) {}

void Packer::add(const std::byte* from, size_t nbytes, const std::byte* next) {
  while (nbytes && fits_) {
    const size_t n = std::min(kTileValues, form_.values - values_);
    const bool whole = n && !pending_ && nbytes >= 2 * n && from;
    const size_t some = whole ? 2 * n : std::min(nbytes, (n ? 2 * n : form_.rest) - pending_);
    if (whole) {
      add_tile(from, n, some < nbytes ? from + some : next);
    } else {
      if (from)
        std::memcpy(tile_ + pending_, from, some);
      else
        std::memset(tile_ + pending_, 0, some);
      pending_ += some;
      if (n && pending_ == 2 * n) add_tile(tile_, n, next), pending_ = 0;
    }
    if (from) from += some;
    nbytes -= some;
  }
}

void Packer::add_tile(const std::byte* from, size_t n, const std::byte* next) {
  alignas(64) std::byte body[body_nbytes(kTileValues)];
  TileHead head;
  std::byte* const to = into_ + form_.bodies + body_nbytes(values_);
  const bool packed = kMethods[method_].pack_tile(head, body, from, n, next);
  bodies_crc_ = crc32_copy(bodies_crc_, to, packed ? body : from, body_nbytes(n), destination_, next);
  if (!packed) {
    fits_ = end_nbytes(n) <= room_ - used_;
    if (!fits_) return;
    head = {0, 0, kRaw, {}, {}};
    std::memcpy(head.escape, &raw_, sizeof(uint32_t));
    std::memcpy(into_ + used_, from + body_nbytes(n), end_nbytes(n));
    used_ += end_nbytes(n);
    raw_++;
  }
  std::memcpy(into_ + kHeaderNbytes + values_ / kTileValues * sizeof head, &head, sizeof head);
  values_ += n;
}

size_t Packer::finish() {
  if (!fits_) return 0;
  const uint64_t told = payload_nbytes_;
  const size_t heads_end = kHeaderNbytes + (values_ + kTileValues - 1) / kTileValues * sizeof(TileHead);
  std::memset(into_, 0, kHeaderNbytes);
  std::memcpy(into_, kMagic, sizeof kMagic);
  std::memcpy(into_ + sizeof kMagic, &told, sizeof told);
  std::memset(into_ + heads_end, 0, form_.bodies - heads_end);
  std::memcpy(into_ + form_.ends - form_.rest, tile_, form_.rest);
  store_fence();
  return used_;
}

uint32_t Packer::fill() {
  std::memset(into_ + used_, 0, room_ - used_);
  const size_t bodies_end = form_.ends - form_.rest;
  const uint32_t crc = crc32_combine(crc32(0, into_, form_.bodies), bodies_crc_, bodies_end - form_.bodies);
  return crc32(crc, into_ + bodies_end, room_ - bodies_end);
}

Unpacker::Unpacker(const std::byte* encoded, size_t nbytes, size_t payload_nbytes, Destination destination,
                   size_t method)
    : form_(payload_nbytes),
      encoded_(encoded),
      nbytes_(nbytes),
      destination_(destination),
      method_(method),
      used_(form_.ends) {
  uint64_t told;
  whole_ = nbytes >= form_.ends && !std::memcmp(encoded, kMagic, sizeof kMagic);
  if (whole_) std::memcpy(&told, encoded + sizeof kMagic, sizeof told);
  whole_ = whole_ && told == payload_nbytes;
}

bool Unpacker::take(std::byte* to, size_t nbytes) {
  while (nbytes && whole_) {
    size_t some = std::min(nbytes, left_);
    if (!left_) {
      const size_t n = std::min(kTileValues, form_.values - values_);
      tile_nbytes_ = n ? 2 * n : form_.rest;
      if (nbytes >= tile_nbytes_) {
        some = tile_nbytes_;
        whole_ = decode(to, n);
      } else {
        left_ = tile_nbytes_;
        whole_ = decode(tile_, n);
        continue;
      }
    } else {
      if (to) copy(to, tile_ + (tile_nbytes_ - left_), some, destination_);
      left_ -= some;
    }
    if (to) to += some;
    nbytes -= some;
  }
  return whole_;
}

// Decodes the next tile, of n values; if n is 0, the bytes behind the last tile. Skips them if `to` is null.
bool Unpacker::decode(std::byte* to, size_t n) {
  const std::byte* const from = encoded_ + form_.bodies + body_nbytes(values_);
  if (!n) {
    if (to) std::memcpy(to, from, form_.rest);
    return true;
  }
  TileHead head;
  std::memcpy(&head, encoded_ + kHeaderNbytes + values_ / kTileValues * sizeof head, sizeof head);
  values_ += n;
  if (head.escapes == kRaw) {
    uint32_t before;
    std::memcpy(&before, head.escape, sizeof before);
    if (before != raw_++ || end_nbytes(n) > nbytes_ - used_) return false;
    if (to) copy(to, from, body_nbytes(n), destination_);
    if (to) copy(to + body_nbytes(n), encoded_ + used_, end_nbytes(n), destination_);
    used_ += end_nbytes(n);
    return true;
  }
  if (head.escapes > kEscapes) return false;
  if (!to) return true;
  alignas(64) std::byte values[kTileNbytes];
  if (!kMethods[method_].unpack_tile(values, head, from, n)) return false;
  copy(to, values, 2 * n, destination_);
  return true;
}

bool Unpacker::finish() const {
  return whole_ && std::all_of(encoded_ + used_, encoded_ + nbytes_, [](std::byte each) { return each == std::byte{0}; });
}

size_t pack(std::byte* into, size_t room, const std::byte* payload, size_t nbytes, size_t method) {
  Packer packer(into, room, nbytes, destination_of(nbytes), method);
  packer.add(payload, nbytes, payload);
  return packer.finish();
}

bool unpack(std::byte* into, size_t payload_nbytes, const std::byte* encoded, size_t nbytes, size_t method) {
  Unpacker unpacker(encoded, nbytes, payload_nbytes, destination_of(payload_nbytes), method);
  const bool whole = unpacker.take(into, payload_nbytes) && unpacker.finish();
  store_fence();
  return whole;
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
