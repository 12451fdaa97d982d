// CRC-32, as zlib computes it, of memory on the device. Compiled for the GPU, and for the host, where tests run it.
//
// The lanes of a warp are the braids of zlib's crc32.c (M. Adler, 1.2.12), after A. Kadatch and B. Jenkins, "Everything
// we know about CRC but afraid to forget", 2010: each word is added to what its lane has, moved over what the others
// read meanwhile. Then each lane moves its share to the end of all that is summed, by a power of x modulo the
// polynomial. So shares are added in any order, and no warp waits for another.
#pragma once

#include <cstdint>

#include "warp.h"

namespace kvtier {

// Range i begins at base + i * stride. What is summed goes on for `behind` bytes after it.
struct Ranges {
  uint64_t base;
  uint64_t stride;
  uint64_t nbytes;
  uint64_t behind;
  uint32_t count;
};

// A warp sums this much, and then of another place: moving its sum to the end costs as much as some KiB.
constexpr uint64_t kSummed = 64 << 10;

constexpr uint32_t kPolynomial = 0xEDB88320;  // bit i is the coefficient of x^(31-i)

struct ChecksumTables {
  uint32_t powers[32];      // x^(8 * 2^k); from there on they repeat
  uint32_t forward[4][256];  // byte n of a word, moved over the words of all lanes
};

KVTIER_BOTH constexpr uint32_t times(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (int i = 0; i < 32; ++i, a <<= 1) {
    product ^= b & (0u - (a >> 31));
    b = (b >> 1) ^ (kPolynomial & (0u - (b & 1)));
  }
  return product;
}

constexpr ChecksumTables checksum_tables() {
  ChecksumTables tables{};
  tables.powers[0] = 0x80000000u >> 8;
  for (int k = 1; k < 32; ++k) tables.powers[k] = times(tables.powers[k - 1], tables.powers[k - 1]);
  for (int n = 0; n < 4; ++n)
    for (uint32_t byte = 0; byte < 256; ++byte)
      tables.forward[n][byte] = times(byte << (8 * n), tables.powers[9]);  // 512 bytes
  return tables;
}
static_assert(kLanes * sizeof(Wide) == 512);

// What `sum`, in the first of so many bytes, adds to the checksum of all of them.
KVTIER_BOTH uint32_t moved(const ChecksumTables& tables, uint32_t sum, uint64_t nbytes) {
  for (uint32_t k = 0; nbytes; nbytes >>= 1, k = (k + 1) % 32)
    if (nbytes & 1) sum = times(sum, tables.powers[k]);
  return sum;
}

KVTIER_BOTH uint32_t forward(const ChecksumTables& tables, uint32_t sum) {
  return tables.forward[0][sum & 0xFF] ^ tables.forward[1][sum >> 8 & 0xFF] ^ tables.forward[2][sum >> 16 & 0xFF] ^
         tables.forward[3][sum >> 24];
}

// One lane's share of `nbytes` at `at`; `left` is the distance from there to the end of all that is summed.
KVTIER_BOTH uint32_t sum_share(const ChecksumTables& tables, uint64_t at, uint64_t nbytes, uint64_t left,
                               uint32_t lane) {
  uint32_t sum = 0;
  const auto take = [&](uint64_t begin, uint64_t end) {
    for (uint64_t i = begin + lane; i < end; i += kLanes)
      sum ^= moved(tables, *reinterpret_cast<const uint8_t*>(at + i), left - i);
  };
  const uint64_t aligned = (0 - at) % sizeof(Wide), head = aligned < nbytes ? aligned : nbytes;
  const uint64_t words = (nbytes - head) / sizeof(Wide);
  take(0, head);
  take(head + words * sizeof(Wide), nbytes);
  const Wide* from = reinterpret_cast<const Wide*>(at + head);
  uint32_t a = 0, b = 0, c = 0, d = 0;
  uint64_t i = lane;
#ifdef __CUDA_ARCH__
#pragma unroll 4
#endif
  for (; i < words; i += kLanes) {
    const Wide word = read(from + i);
    a = forward(tables, a) ^ static_cast<uint32_t>(word.low);
    b = forward(tables, b) ^ static_cast<uint32_t>(word.low >> 32);
    c = forward(tables, c) ^ static_cast<uint32_t>(word.high);
    d = forward(tables, d) ^ static_cast<uint32_t>(word.high >> 32);
  }
  if (lane >= words) return sum;
  const uint32_t over = tables.powers[2];  // 4 bytes
  const uint32_t last = times(times(times(a, over) ^ b, over) ^ c, over) ^ d;
  return sum ^ moved(tables, last, left - head - (i - kLanes) * sizeof(Wide) - 12);
}

KVTIER_BOTH void add(uint32_t* sum, uint32_t share) {
#ifdef __CUDA_ARCH__
  atomicXor(sum, share);
#else
  *sum ^= share;
#endif
}

// Adds one lane's share of all ranges, each to its sum. Sums begin with `sum_of_zeros`.
KVTIER_BOTH void sum_ranges(const Ranges& ranges, const ChecksumTables& tables, uint32_t* sums, uint32_t worker,
                            uint32_t workers, uint32_t lane) {
  const uint64_t segments = (ranges.nbytes + kSummed - 1) / kSummed;
  for (uint64_t item = worker; item < ranges.count * segments; item += workers) {
    const uint64_t begin = item % segments * kSummed, left = ranges.nbytes - begin;
    const uint64_t at = ranges.base + item / segments * ranges.stride + begin;
    add(sums + item / segments, sum_share(tables, at, left < kSummed ? left : kSummed, left + ranges.behind, lane));
  }
}

// The checksum of so many bytes of 0. That of other bytes differs from it by the sum of their shares.
KVTIER_BOTH uint32_t sum_of_zeros(const ChecksumTables& tables, uint64_t nbytes) {
  return ~moved(tables, ~0u, nbytes);
}

}  // namespace kvtier
