#include "blake2b.h"

#include <bit>
#include <cstring>
#include <utility>

namespace kvtier {
namespace {

static_assert(std::endian::native == std::endian::little, "words are loaded as they lie");

constexpr size_t kBlock = 128;
constexpr std::array<uint64_t, 8> kStart = {
    0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1,
    0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179,
};
constexpr uint8_t kOrder[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

using State = std::array<uint64_t, 8>;

inline void mix(uint64_t* v, int a, int b, int c, int d, uint64_t x, uint64_t y) {
  v[a] += v[b] + x;
  v[d] = std::rotr(v[d] ^ v[a], 32);
  v[c] += v[d];
  v[b] = std::rotr(v[b] ^ v[c], 24);
  v[a] += v[b] + y;
  v[d] = std::rotr(v[d] ^ v[a], 16);
  v[c] += v[d];
  v[b] = std::rotr(v[b] ^ v[c], 63);
}

template <size_t kRound>
inline void round(uint64_t* v, const uint64_t* m) {
  constexpr const uint8_t* s = kOrder[kRound % 10];
  mix(v, 0, 4, 8, 12, m[s[0]], m[s[1]]);
  mix(v, 1, 5, 9, 13, m[s[2]], m[s[3]]);
  mix(v, 2, 6, 10, 14, m[s[4]], m[s[5]]);
  mix(v, 3, 7, 11, 15, m[s[6]], m[s[7]]);
  mix(v, 0, 5, 10, 15, m[s[8]], m[s[9]]);
  mix(v, 1, 6, 11, 12, m[s[10]], m[s[11]]);
  mix(v, 2, 7, 8, 13, m[s[12]], m[s[13]]);
  mix(v, 3, 4, 9, 14, m[s[14]], m[s[15]]);
}

// ``end``: bytes up to the end of this block.
void compress(State& state, const std::byte* block, uint64_t end, bool last) {
  uint64_t m[16], v[16];
  std::memcpy(m, block, kBlock);
  for (size_t i = 0; i < 8; i++) v[i] = state[i], v[i + 8] = kStart[i];
  v[12] ^= end;
  if (last) v[14] = ~v[14];
  [&]<size_t... kRounds>(std::index_sequence<kRounds...>) {
    (round<kRounds>(v, m), ...);
  }(std::make_index_sequence<12>());
  for (size_t i = 0; i < 8; i++) state[i] ^= v[i] ^ v[i + 8];
}

}  // namespace

Key blake2b(const std::byte* data, size_t nbytes, std::string_view person) {
  State state = kStart;
  state[0] ^= 0x01010000 | sizeof(Key);  // depth, fanout, no key, length of the digest
  uint64_t words[kPersonNbytes / sizeof(uint64_t)] = {};
  std::memcpy(words, person.data(), person.size());
  state[6] ^= words[0];
  state[7] ^= words[1];

  size_t done = 0;
  for (; nbytes - done > kBlock; done += kBlock) compress(state, data + done, done + kBlock, false);
  std::byte rest[kBlock] = {};
  if (nbytes) std::memcpy(rest, data + done, nbytes - done);
  compress(state, rest, nbytes, true);

  Key digest;
  std::memcpy(&digest, state.data(), sizeof digest);
  return digest;
}

}  // namespace kvtier
