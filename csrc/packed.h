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
// The place of a tile does not depend on the tiles before it, so that tiles can be coded in any order. The last quarter
// of a raw tile, its end, does not fit there: the ends of all raw tiles follow the bodies, and each head has the number
// of its end.
//
// The encoded form, integers little-endian:
//
//   0   4  "kvp" and the version, 2
//   4   4  zeros
//   8   8  bytes of the payload
//  16  48  zeros
//  64      the heads of the tiles, 32 bytes each, and zeros up to a multiple of 64
//          the bodies of the tiles
//          the bytes of the payload behind the last whole 128 values
//          the ends of the raw tiles
//          zeros, if there is room
//
// The head of a tile:
//
//   0   1  base: code c stands for the exponent base + c
//   1   1  least: the exponent that code 0 stands for, in place of base
//   2   1  the number of escapes, 9 at most; 255: the tile is raw
//   3  27  the escapes, value i before n/2 + i: the position in the tile (2 bytes) and the exponent;
//          of a raw tile the number of those before it (4 bytes)
//  30   2  zeros
//
// The body of a tile of n values:
//
//   0   n  of each value the mantissa in the upper seven bits, and the sign
//   n n/2  byte i has the code of value i in its lower four bits, and that of value n/2 + i above
//
// or, of a raw tile, its first 3 n / 2 bytes. The other n / 2 are its end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "copy.h"

namespace kvtier {

constexpr size_t kTileValues = 2048;
constexpr size_t kTileNbytes = 2 * kTileValues;

// The parts of the encoded form of a payload.
struct PackedForm {
  explicit PackedForm(size_t payload_nbytes);

  size_t values;  // in tiles
  size_t rest;    // bytes of the payload behind them
  size_t bodies;  // where they begin
  size_t ends;    // where those of raw tiles begin
};

// The most bytes that a payload of this length becomes.
size_t packed_bound(size_t nbytes);

// Encodes a payload that comes piece by piece.
class Packer {
 public:
  // `into` has `room` bytes, which do not overlap the payload. `method` is one of `packed_methods`; they differ in speed
  // alone.
  Packer(std::byte* into, size_t room, size_t payload_nbytes, Destination destination, size_t method = 0);

  // The next bytes of the payload; zeros if `from` is null. `next` is where the bytes behind them lie, if the caller
  // knows: they are fetched into the caches meanwhile.
  void add(const std::byte* from, size_t nbytes, const std::byte* next);

  // Call it when all is added. Returns the length of the encoded form, or 0 if it does not fit into the room.
  size_t finish();

  // Call it after `finish`. Fills the rest of the room with zeros, and returns the CRC-32 of the whole room.
  uint32_t fill();

 private:
  void add_tile(const std::byte* from, size_t n, const std::byte* next);

  const PackedForm form_;
  std::byte* const into_;
  const size_t room_;
  const size_t payload_nbytes_;
  const Destination destination_;
  const size_t method_;
  size_t values_ = 0;  // that are encoded
  size_t raw_ = 0;     // tiles
  size_t used_;        // bytes
  bool fits_;
  uint32_t bodies_crc_ = 0;
  size_t pending_ = 0;  // bytes of a tile that is not complete
  alignas(64) std::byte tile_[kTileNbytes];
};

// Decodes a payload piece by piece.
class Unpacker {
 public:
  // Any bytes may come in.
  Unpacker(const std::byte* encoded, size_t nbytes, size_t payload_nbytes, Destination destination, size_t method = 0);

  // Writes the next bytes of the payload, or skips them if `to` is null. Returns false if the encoded form is damaged;
  // what was written is then undefined.
  bool take(std::byte* to, size_t nbytes);

  // Call it when all is taken: is the encoded form followed by zeros alone?
  bool finish() const;

 private:
  bool decode(std::byte* to, size_t n);

  const PackedForm form_;
  const std::byte* const encoded_;
  const size_t nbytes_;
  const Destination destination_;
  const size_t method_;
  bool whole_;
  size_t values_ = 0;  // that were decoded
  size_t raw_ = 0;     // tiles
  size_t used_;        // bytes
  size_t left_ = 0;    // bytes of the last tile that were not taken
  size_t tile_nbytes_ = 0;
  alignas(64) std::byte tile_[kTileNbytes];
};

// A whole payload at once: the bytes that it took, 0 if there is no room.
size_t pack(std::byte* into, size_t room, const std::byte* payload, size_t nbytes, size_t method = 0);

// Returns false, with undefined content in `into`, if this does not encode a payload of this length.
bool unpack(std::byte* into, size_t payload_nbytes, const std::byte* encoded, size_t nbytes, size_t method = 0);

// The names of the instruction sets that this processor has code for here, best first.
const std::vector<std::string>& packed_methods();

}  // namespace kvtier
