// A lossless code for KV in bfloat16, 12 bits for a value of 16. Sign and mantissa are kept. Of the eight bits of the
// exponent little is information: in a stretch of KV nearly all exponents are among 16 that follow each other, and four
// bits say which. The others are listed beside it: a frame of reference with exceptions, as M. Zukowski et al. have it,
// "Super-Scalar RAM-CPU Cache Compression", ICDE 2006. All codes have one length, so that each value's place is known.
//
// Values are coded in tiles of 2048, so that no outlier spoils more than its own; the last tile has a multiple of 128.
// A tile that does not fit is kept raw. So may be all of them: the code is lossless for any bytes.
//
// In KV of SmolLM2-135M (prose, documentation and code) 0.02 % of the values are escapes, and at most 0.4 % of the tiles
// raw; of tiles of 4096 values 2 % are, because they reach from keys into values. Codes for the sixteen commonest
// exponents of a tile would leave fewer escapes, 0.007 %, but their list is longer than what it saves, and to find them
// takes a histogram.
//
// The encoded form, integers little-endian:
//
//   0   4  "kvp" and the version, 1
//   4   4  zeros
//   8   8  bytes of the payload
//  16  48  zeros
//  64      the heads of the tiles, 32 bytes each, and zeros up to a multiple of 64
//          the bodies of the tiles
//          the bytes of the payload behind the last whole 128 values
//
// The head of a tile:
//
//   0   1  base: code c stands for the exponent base + c
//   1   1  least: the exponent that code 0 stands for, in place of base
//   2   1  the number of escapes, 9 at most; 255: the tile is raw
//   3  27  the escapes, value i before n/2 + i: the position in the tile (2 bytes) and the exponent
//  30   2  zeros
//
// The body of a tile of n values:
//
//   0   n  of each value the mantissa in the upper seven bits, and the sign
//   n n/2  byte i has the code of value i in its lower four bits, and that of value n/2 + i above
//
// or, of a raw tile, its 2 n bytes.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace kvtier {

// The most bytes that a payload of this length becomes.
size_t packed_bound(size_t nbytes);

// Encodes a payload to `into`, which has room for its bound and does not overlap it. Returns the bytes that it took.
// `method` is one of `packed_methods`; they differ in speed alone.
size_t pack(std::byte* into, const std::byte* payload, size_t nbytes, size_t method = 0);

// Decodes to `into`, a payload of `payload_nbytes`. Returns false, with any content there, unless `encoded` is what some
// payload of this length could have become. Any bytes may come in.
bool unpack(std::byte* into, size_t payload_nbytes, const std::byte* encoded, size_t nbytes, size_t method = 0);

// The names of the instruction sets that this processor has code for here, best first.
const std::vector<std::string>& packed_methods();

}  // namespace kvtier
