// Folding with carry-less multiplication: V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using
// PCLMULQDQ Instruction", Intel, 2009. A register of the message is moved forward over n bits by multiplying it with
// x^n modulo the polynomial and added to the data there. The remaining bytes are processed by table.
#include "crc32.h"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvtier {
namespace {

constexpr uint32_t kPolynomial = 0xEDB88320;  // bit i is the coefficient of x^(31-i)
constexpr uint32_t kOne = 0x80000000;         // the polynomial 1

constexpr uint32_t times_x(uint32_t a) { return (a >> 1) ^ ((a & 1) ? kPolynomial : 0); }

constexpr auto kTables = [] {  // [n][b]: the checksum of byte b with n zero bytes behind it
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t b = 0; b < 256; b++) {
    tables[0][b] = b;
    for (int i = 0; i < 8; i++) tables[0][b] = times_x(tables[0][b]);
  }
  for (int n = 1; n < 8; n++)
    for (uint32_t b = 0; b < 256; b++)
      tables[n][b] = (tables[n - 1][b] >> 8) ^ tables[0][tables[n - 1][b] & 0xFF];
  return tables;
}();

// Eight bytes at a time. Here and below `crc` is without the inversions at both ends.
uint32_t by_table(uint32_t crc, const std::byte* data, size_t nbytes) {
  for (; nbytes >= 8; data += 8, nbytes -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    word ^= crc;
    crc = 0;
    for (int n = 0; n < 8; n++) crc ^= kTables[7 - n][(word >> (8 * n)) & 0xFF];
  }
  for (; nbytes; data++, nbytes--) crc = (crc >> 8) ^ kTables[0][(crc ^ std::to_integer<uint32_t>(*data)) & 0xFF];
  return crc;
}

#if defined(__x86_64__)

// x^n for the multiplication of reflected operands: shifted up by one bit.
constexpr uint64_t power(int n) {
  uint32_t a = kOne;
  while (n--) a = times_x(a);
  return uint64_t{a} << 1;
}

// The factors that move the low and the high half of 128 bits forward over `bits`.
constexpr uint64_t low(int bits) { return power(bits + 32); }
constexpr uint64_t high(int bits) { return power(bits - 32); }

#define KVTIER_NARROW __attribute__((target("pclmul,sse4.1")))
#define KVTIER_WIDE __attribute__((target("vpclmulqdq,avx512f,avx512vl")))

KVTIER_NARROW inline __m128i narrow(const std::byte* data, int i) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i);
}

KVTIER_WIDE inline __m512i wide(const std::byte* data, int i) { return _mm512_loadu_si512(data + 64 * i); }

KVTIER_NARROW inline __m128i forward(__m128i x, __m128i factors, __m128i onto) {
  return _mm_xor_si128(onto, _mm_xor_si128(_mm_clmulepi64_si128(x, factors, 0x00),
                                           _mm_clmulepi64_si128(x, factors, 0x11)));
}

KVTIER_NARROW uint32_t by_128(uint32_t crc, const std::byte* data, size_t nbytes) {
  if (nbytes < 64) return by_table(crc, data, nbytes);
  __m128i x0 = _mm_xor_si128(narrow(data, 0), _mm_cvtsi32_si128(static_cast<int>(crc)));
  __m128i x1 = narrow(data, 1), x2 = narrow(data, 2), x3 = narrow(data, 3);
  const __m128i over_512 = _mm_set_epi64x(high(512), low(512));
  for (data += 64, nbytes -= 64; nbytes >= 64; data += 64, nbytes -= 64) {
    x0 = forward(x0, over_512, narrow(data, 0));
    x1 = forward(x1, over_512, narrow(data, 1));
    x2 = forward(x2, over_512, narrow(data, 2));
    x3 = forward(x3, over_512, narrow(data, 3));
  }
  const __m128i over_128 = _mm_set_epi64x(high(128), low(128));
  x0 = forward(x0, over_128, x1);
  x0 = forward(x0, over_128, x2);
  x0 = forward(x0, over_128, x3);
  for (; nbytes >= 16; data += 16, nbytes -= 16) x0 = forward(x0, over_128, narrow(data, 0));
  std::byte rest[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(rest), x0);
  return by_table(by_table(0, rest, sizeof rest), data, nbytes);
}

KVTIER_WIDE inline __m512i forward(__m512i x, __m512i factors, __m512i onto) {
  return _mm512_ternarylogic_epi64(onto, _mm512_clmulepi64_epi128(x, factors, 0x00),
                                   _mm512_clmulepi64_epi128(x, factors, 0x11), 0x96);  // the sum of three
}

struct Nowhere {
  void read_ahead(const std::byte*, size_t) const {}
  KVTIER_WIDE void take(__m512i, __m512i, __m512i, __m512i) {}
  void take(const std::byte*, size_t) {}
};

template <Destination kDestination>
struct Copied {
  std::byte* to;
  const std::byte* next;

  // 256 bytes, so far before they are needed that memory has time to answer. `left` are those of this piece from `data`
  // on; behind them it is the next piece that will be read.
  void read_ahead(const std::byte* data, size_t left) const {
    constexpr size_t kAhead = 4096;
    const std::byte* const at = left > kAhead ? data + kAhead : next + (kAhead - left);
    for (int line = 0; line < 4; line++) _mm_prefetch(at + 64 * line, _MM_HINT_T0);
  }
  KVTIER_WIDE void take(__m512i a, __m512i b, __m512i c, __m512i d) {
    put(0, a), put(1, b), put(2, c), put(3, d);
    to += 256;
  }
  KVTIER_WIDE void put(int i, __m512i x) {
    auto* at = reinterpret_cast<__m512i*>(to) + i;
    if constexpr (kDestination == Destination::kStreamed)
      _mm512_stream_si512(at, x);
    else
      _mm512_storeu_si512(at, x);
  }
  void take(const std::byte* data, size_t nbytes) { std::memcpy(to, data, nbytes); }
};

// For at least 256 bytes; hands all of them to `sink` on the way.
template <typename Sink>
KVTIER_WIDE uint32_t by_512(uint32_t crc, const std::byte* data, size_t nbytes, Sink sink) {
  __m512i a = wide(data, 0), b = wide(data, 1), c = wide(data, 2), d = wide(data, 3);
  sink.take(a, b, c, d);
  __m512i x0 = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
  __m512i x1 = b, x2 = c, x3 = d;
  const __m512i over_2048 = _mm512_maskz_broadcast_i32x4(0xFFFF, _mm_set_epi64x(high(2048), low(2048)));
  for (data += 256, nbytes -= 256; nbytes >= 256; data += 256, nbytes -= 256) {
    sink.read_ahead(data, nbytes);
    a = wide(data, 0), b = wide(data, 1), c = wide(data, 2), d = wide(data, 3);
    sink.take(a, b, c, d);
    x0 = forward(x0, over_2048, a);
    x1 = forward(x1, over_2048, b);
    x2 = forward(x2, over_2048, c);
    x3 = forward(x3, over_2048, d);
  }
  const __m512i over_512 = _mm512_maskz_broadcast_i32x4(0xFFFF, _mm_set_epi64x(high(512), low(512)));
  x0 = forward(x0, over_512, x1);
  x0 = forward(x0, over_512, x2);
  x0 = forward(x0, over_512, x3);
  std::byte rest[64];
  _mm512_storeu_si512(rest, x0);
  sink.take(data, nbytes);
  return by_128(by_128(0, rest, sizeof rest), data, nbytes);
}

#endif

enum class Method { kTable, kNarrow, kWide };

const Method kMethod = [] {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) {
    const bool has_wide = __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512vl");
    return has_wide ? Method::kWide : Method::kNarrow;
  }
#endif
  return Method::kTable;
}();

uint32_t update(uint32_t crc, const std::byte* data, size_t nbytes) {
#if defined(__x86_64__)
  if (kMethod == Method::kWide && nbytes >= 256) return by_512(crc, data, nbytes, Nowhere{});
  if (kMethod != Method::kTable) return by_128(crc, data, nbytes);
#endif
  return by_table(crc, data, nbytes);
}

}  // namespace

uint32_t crc32(uint32_t crc, const std::byte* data, size_t nbytes) { return ~update(~crc, data, nbytes); }

uint32_t crc32_copy(uint32_t crc, std::byte* to, const std::byte* from, size_t nbytes, Destination destination,
                    [[maybe_unused]] const std::byte* next) {
#if defined(__x86_64__)
  if (kMethod == Method::kWide && nbytes >= 256) {
    if (destination == Destination::kCached)
      return ~by_512(~crc, from, nbytes, Copied<Destination::kCached>{to, next});
    if (reinterpret_cast<uintptr_t>(to) % 64 == 0)
      return ~by_512(~crc, from, nbytes, Copied<Destination::kStreamed>{to, next});
  }
#endif
  constexpr size_t kBlock = 8192;  // what was checksummed is copied from the first-level cache
  for (size_t done = 0; done < nbytes; done += kBlock) {
    const size_t some = std::min(kBlock, nbytes - done);
    crc = crc32(crc, from + done, some);
    copy(to + done, from + done, some, destination);
  }
  return crc;
}

const char* crc32_method() {
  return kMethod == Method::kWide ? "vpclmulqdq" : kMethod == Method::kNarrow ? "pclmulqdq" : "table";
}

uint32_t crc32_combine(uint32_t first, uint32_t second, uint64_t second_nbytes) {
  // first * x^(8 * second_nbytes) + second, by squaring.
  const auto times = [](uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = kOne; bit; bit >>= 1, b = times_x(b))
      if (a & bit) product ^= b;
    return product;
  };
  uint32_t square = kOne;
  for (int i = 0; i < 8; i++) square = times_x(square);  // x^8
  for (uint64_t n = second_nbytes; n; n >>= 1, square = times(square, square))
    if (n & 1) first = times(first, square);
  return first ^ second;
}

}  // namespace kvtier
