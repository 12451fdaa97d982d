// Packs shards that lie on the device, and unpacks them. csrc/packed.h has the form, and csrc/packed.cpp makes the same
// bytes on the host. Compiled for the GPU, and for the host, where tests run it.
//
// A warp packs one tile after the other, in any order: only where the end of a raw tile lies depends on other tiles. A
// second kernel writes the ends, when all heads say which tiles are raw. Raw tiles are few, so each counts those before
// it by itself.
#pragma once

#include <cstdint>

#include "warp.h"

namespace kvtier {

// Shards as their pages lie, and packed: the address of the first, the bytes from one to the next, and those of one. All
// addresses, and the bytes of one that is packed, are multiples of 16.
struct Packing {
  uint64_t pages, pages_stride, pages_nbytes;
  uint64_t packed, packed_stride, packed_nbytes;
  uint32_t count;
};

constexpr uint32_t kTileValues = 2048;
constexpr uint32_t kValuesUnit = 128;
constexpr uint32_t kFormHeaderNbytes = 64;
constexpr uint32_t kTileHeadNbytes = 32;
constexpr uint32_t kEscapes = 9;
constexpr uint8_t kRaw = 255;
constexpr uint64_t kMagic = 0x0270766B;  // "kvp" and the version
// A lane codes this number of consecutive pairs (values i and n/2 + i) at a time.
constexpr uint32_t kPairs = sizeof(Wide) / 2;

KVTIER_BOTH uint64_t body_nbytes(uint64_t n) { return n * 3 / 2; }
KVTIER_BOTH uint64_t end_nbytes(uint64_t n) { return n / 2; }
KVTIER_BOTH uint8_t* bytes_at(uint64_t address) { return reinterpret_cast<uint8_t*>(address); }
KVTIER_BOTH Wide& wide_at(uint64_t address) { return *reinterpret_cast<Wide*>(address); }
KVTIER_BOTH uint64_t& word_at(uint64_t address) { return *reinterpret_cast<uint64_t*>(address); }

// One shard: its addresses, and the places of its parts in the packed form.
struct PackedShard {
  KVTIER_BOTH PackedShard(const Packing& packing, uint32_t number)
      : pages(packing.pages + number * packing.pages_stride),
        packed(packing.packed + number * packing.packed_stride),
        pages_nbytes(packing.pages_nbytes),
        packed_nbytes(packing.packed_nbytes),
        values(static_cast<uint32_t>(pages_nbytes / (2 * kValuesUnit) * kValuesUnit)),
        tiles((values + kTileValues - 1) / kTileValues),
        rest(static_cast<uint32_t>(pages_nbytes - 2 * uint64_t{values})),
        bodies(kFormHeaderNbytes + (tiles * kTileHeadNbytes + 63) / 64 * 64),
        ends(bodies + body_nbytes(values) + rest) {}

  KVTIER_BOTH uint64_t head(uint32_t tile) const { return packed + kFormHeaderNbytes + tile * kTileHeadNbytes; }
  KVTIER_BOTH bool is_raw(uint32_t tile) const { return bytes_at(head(tile))[2] == kRaw; }

  // The address of the end of a raw tile, before which there are `number` raw tiles.
  KVTIER_BOTH uint64_t end(uint32_t number) const { return packed + ends + number * end_nbytes(kTileValues); }

  const uint64_t pages, packed, pages_nbytes, packed_nbytes;
  const uint32_t values, tiles, rest;
  const uint64_t bodies, ends;  // behind `packed`
};

// The addresses of a tile, and its values.
struct Tile {
  KVTIER_BOTH Tile(const PackedShard& shard, uint32_t number)
      : values(shard.pages + 2 * uint64_t{kTileValues} * number),
        head(shard.head(number)),
        body(shard.packed + shard.bodies + body_nbytes(uint64_t{kTileValues} * number)),
        n(number + 1 < shard.tiles ? kTileValues : shard.values - number * kTileValues) {}

  const uint64_t values, head, body;
  const uint32_t n;
};

KVTIER_BOTH uint32_t value_of(const Wide& values, uint32_t i) {
  return static_cast<uint32_t>((i < 4 ? values.low : values.high) >> 16 * (i % 4)) & 0xFFFF;
}

KVTIER_BOTH uint32_t byte_of(uint64_t bytes, uint32_t i) { return static_cast<uint32_t>(bytes >> 8 * i) & 0xFF; }

KVTIER_BOTH uint32_t exponent_of(uint32_t value) { return value >> 7 & 0xFF; }

KVTIER_BOTH uint32_t without_exponent(uint32_t value) { return (value << 1 | value >> 15) & 0xFF; }

KVTIER_BOTH uint32_t code_of(uint32_t exponent, uint32_t base) { return exponent > base ? exponent - base : 0; }

KVTIER_BOTH uint32_t missed(uint32_t exponent, uint32_t base, uint32_t least) {
  return exponent <= base && exponent != least;
}

KVTIER_BOTH uint32_t highest_exponent(const Tile& tile) {
  Lanes highest;
  each_lane([&](uint32_t lane) {
    for (uint64_t i = lane; i < tile.n / kPairs; i += kLanes) {
      const Wide some = wide_at(tile.values + i * sizeof(Wide));
      for (uint32_t k = 0; k < kPairs; ++k) {
        const uint32_t each = value_of(some, k) & 0x7FFF;
        if (each > highest[lane]) highest[lane] = each;
      }
    }
  });
  return exponent_of(highest.highest());
}

// The code of eight pairs: their mantissas and signs, and their exponents. Returns a bit of each value that is an
// escape: of value i bit 2 i, of value n/2 + i the next one.
KVTIER_BOTH uint32_t split(const Tile& tile, uint32_t pair, uint32_t base, uint32_t least) {
  const uint32_t pairs = tile.n / 2;
  const Wide a = wide_at(tile.values + 2 * uint64_t{pair}), b = wide_at(tile.values + 2 * uint64_t{pairs + pair});
  uint64_t rests_a = 0, rests_b = 0, codes = 0;
  uint32_t misses = 0;
  for (uint32_t i = 0; i < kPairs; ++i) {
    const uint32_t first = value_of(a, i), second = value_of(b, i);
    const uint32_t code = code_of(exponent_of(first), base) | code_of(exponent_of(second), base) << 4;
    rests_a |= uint64_t{without_exponent(first)} << 8 * i;
    rests_b |= uint64_t{without_exponent(second)} << 8 * i;
    codes |= uint64_t{code} << 8 * i;
    misses |= missed(exponent_of(first), base, least) << 2 * i;
    misses |= missed(exponent_of(second), base, least) << (2 * i + 1);
  }
  word_at(tile.body + pair) = rests_a;
  word_at(tile.body + pairs + pair) = rests_b;
  word_at(tile.body + tile.n + pair) = codes;
  return misses;
}

KVTIER_BOTH void list_escape(const Tile& tile, uint32_t number, uint32_t place) {
  const uint8_t* value = bytes_at(tile.values + 2 * uint64_t{place});
  uint8_t* escape = bytes_at(tile.head + 3 + 3 * number);
  escape[0] = static_cast<uint8_t>(place);
  escape[1] = static_cast<uint8_t>(place >> 8);
  escape[2] = static_cast<uint8_t>(exponent_of(value[0] | value[1] << 8));
}

KVTIER_BOTH void write_head(const Tile& tile, uint32_t base, uint32_t least, uint32_t escapes) {
  wide_at(tile.head) = wide_at(tile.head + sizeof(Wide)) = Wide{0, 0};
  bytes_at(tile.head)[0] = static_cast<uint8_t>(base);
  bytes_at(tile.head)[1] = static_cast<uint8_t>(least);
  bytes_at(tile.head)[2] = static_cast<uint8_t>(escapes);
}

// Returns false if there are too many escapes; head and body are then undefined.
KVTIER_BOTH bool code_tile(const Tile& tile, uint32_t base, uint32_t least) {
  uint32_t escapes = 0;
  first_lane([&] { write_head(tile, base, least, 0); });
  for (uint32_t begin = 0; begin < tile.n / 2; begin += kPairs * kLanes) {
    Lanes misses;
    each_lane([&](uint32_t lane) {
      const uint32_t pair = begin + kPairs * lane;
      if (pair < tile.n / 2) misses[lane] = split(tile, pair, base, least);
    });
    for (uint32_t lanes = misses.not_zero(); lanes; lanes &= lanes - 1) {
      const uint32_t lane = lowest_bit(lanes);
      for (uint32_t bits = misses.of(lane); bits; bits &= bits - 1) {
        if (escapes == kEscapes) return false;
        const uint32_t bit = lowest_bit(bits);
        const uint32_t place = begin + kPairs * lane + bit / 2 + bit % 2 * (tile.n / 2);
        first_lane([&] { list_escape(tile, escapes, place); });
        ++escapes;
      }
    }
  }
  first_lane([&] { bytes_at(tile.head)[2] = static_cast<uint8_t>(escapes); });
  return true;
}

// A raw tile has neither its number yet nor its end.
KVTIER_BOTH void pack_tile(const Tile& tile) {
  const uint32_t highest = highest_exponent(tile), base = highest > 15 ? highest - 15 : 0;
  if (code_tile(tile, base, base) || code_tile(tile, base, 0)) return;
  meet();
  first_lane([&] { write_head(tile, 0, 0, kRaw); });
  each_lane([&](uint32_t lane) { copy_bytes(tile.body, tile.values, body_nbytes(tile.n), lane, kLanes); });
}

// `end` is a multiple of 16.
KVTIER_BOTH void write_zeros(uint64_t begin, uint64_t end, uint32_t lane) {
  const uint64_t wide = (begin + sizeof(Wide) - 1) / sizeof(Wide) * sizeof(Wide);
  for (uint64_t at = begin + lane; at < wide; at += kLanes) *bytes_at(at) = 0;
  for (uint64_t at = wide + lane * sizeof(Wide); at < end; at += kLanes * sizeof(Wide)) wide_at(at) = Wide{0, 0};
}

// Writes all but the tiles: the header, the bytes behind the last tile, and zeros elsewhere.
KVTIER_BOTH void pack_around(const PackedShard& shard) {
  first_lane([&] { wide_at(shard.packed) = Wide{kMagic, shard.pages_nbytes}; });
  each_lane([&](uint32_t lane) {
    write_zeros(shard.packed + sizeof(Wide), shard.packed + kFormHeaderNbytes, lane);
    write_zeros(shard.head(shard.tiles), shard.packed + shard.bodies, lane);
    copy_bytes(shard.packed + shard.ends - shard.rest, shard.pages + 2 * uint64_t{shard.values}, shard.rest, lane,
               kLanes);
    write_zeros(shard.packed + shard.ends, shard.packed + shard.packed_nbytes, lane);
  });
}

// One worker's share of all tiles.
KVTIER_BOTH void pack_shards(const Packing& packing, uint32_t worker, uint32_t workers) {
  const uint32_t items = PackedShard(packing, 0).tiles + 1;
  for (uint32_t item = worker; item < packing.count * items; item += workers) {
    const PackedShard shard(packing, item / items);
    const uint32_t number = item % items;
    if (number < shard.tiles) {
      pack_tile(Tile(shard, number));
    } else {
      pack_around(shard);
    }
  }
}

// How many tiles before this one are raw?
KVTIER_BOTH uint32_t raw_before(const PackedShard& shard, uint32_t tile) {
  Lanes raw;
  each_lane([&](uint32_t lane) {
    for (uint32_t i = lane; i < tile; i += kLanes) raw[lane] += shard.is_raw(i);
  });
  return raw.sum();
}

KVTIER_BOTH bool has_room(const PackedShard& shard, uint32_t number, uint32_t n) {
  return shard.ends + number * end_nbytes(kTileValues) + end_nbytes(n) <= shard.packed_nbytes;
}

// One worker's share of all ends, when all tiles are packed. Sets the flag of a shard that has no room for them.
KVTIER_BOTH void place_ends(const Packing& packing, uint32_t* overfull, uint32_t worker, uint32_t workers) {
  const uint32_t tiles = PackedShard(packing, 0).tiles;
  for (uint32_t item = worker; item < packing.count * tiles; item += workers) {
    const PackedShard shard(packing, item / tiles);
    if (!shard.is_raw(item % tiles)) continue;
    const Tile tile(shard, item % tiles);
    const uint32_t number = raw_before(shard, item % tiles);
    if (!has_room(shard, number, tile.n)) {
      first_lane([&] { overfull[item / tiles] = 1; });
      continue;
    }
    first_lane([&] {
      for (uint32_t i = 0; i < 4; ++i) bytes_at(tile.head)[3 + i] = static_cast<uint8_t>(byte_of(number, i));
    });
    each_lane([&](uint32_t lane) {
      copy_bytes(shard.end(number), tile.values + body_nbytes(tile.n), end_nbytes(tile.n), lane, kLanes);
    });
  }
}

// Eight pairs, with any value where there is an escape.
KVTIER_BOTH void join(const Tile& tile, uint32_t pair, uint32_t base, uint32_t least) {
  const uint32_t pairs = tile.n / 2;
  const uint64_t codes = word_at(tile.body + tile.n + pair);
  for (uint32_t half = 0; half < 2; ++half) {
    const uint64_t rests = word_at(tile.body + half * pairs + pair);
    Wide values = {0, 0};
    for (uint32_t i = 0; i < kPairs; ++i) {
      const uint32_t rest = byte_of(rests, i), code = byte_of(codes, i) >> 4 * half & 15;
      const uint32_t exponent = code ? (base + code) & 0xFF : least;
      const uint64_t value = (rest & 1) << 15 | exponent << 7 | rest >> 1;
      (i < 4 ? values.low : values.high) |= value << 16 * (i % 4);
    }
    wide_at(tile.values + 2 * uint64_t{half * pairs + pair}) = values;
  }
}

// Returns false if the tile is damaged; then anything may be among its values.
KVTIER_BOTH bool uncode_tile(const Tile& tile) {
  const uint8_t* head = bytes_at(tile.head);
  const uint32_t base = head[0], least = head[1], escapes = head[2];
  if (escapes > kEscapes) return false;
  each_lane([&](uint32_t lane) {
    for (uint32_t pair = kPairs * lane; pair < tile.n / 2; pair += kPairs * kLanes) join(tile, pair, base, least);
  });
  meet();
  for (uint32_t i = 0; i < escapes; ++i) {
    const uint8_t* escape = head + 3 + 3 * i;
    const uint32_t place = escape[0] | escape[1] << 8, exponent = escape[2];
    if (place >= tile.n) return false;
    first_lane([&] {
      uint8_t* value = bytes_at(tile.values + 2 * uint64_t{place});
      value[0] = static_cast<uint8_t>((value[0] & 0x7F) | exponent << 7);
      value[1] = static_cast<uint8_t>((value[1] & 0x80) | exponent >> 1);
    });
  }
  return true;
}

KVTIER_BOTH bool unpack_tile(const PackedShard& shard, uint32_t number) {
  const Tile tile(shard, number);
  const uint8_t* head = bytes_at(tile.head);
  if (head[2] != kRaw) return uncode_tile(tile);
  const uint32_t before = raw_before(shard, number);
  for (uint32_t i = 0; i < 4; ++i)
    if (head[3 + i] != byte_of(before, i)) return false;
  if (!has_room(shard, before, tile.n)) return false;
  each_lane([&](uint32_t lane) {
    copy_bytes(tile.values, tile.body, body_nbytes(tile.n), lane, kLanes);
    copy_bytes(tile.values + body_nbytes(tile.n), shard.end(before), end_nbytes(tile.n), lane, kLanes);
  });
  return true;
}

KVTIER_BOTH bool unpack_around(const PackedShard& shard) {
  each_lane([&](uint32_t lane) {
    copy_bytes(shard.pages + 2 * uint64_t{shard.values}, shard.packed + shard.ends - shard.rest, shard.rest, lane,
               kLanes);
  });
  const Wide header = wide_at(shard.packed);
  return header.low == kMagic && header.high == shard.pages_nbytes;
}

// One worker's share of all tiles, unpacked. Sets the flag if a shard is damaged; writes to no other shard's pages.
KVTIER_BOTH void unpack_shards(const Packing& packing, uint32_t* harmed, uint32_t worker, uint32_t workers) {
  const uint32_t items = PackedShard(packing, 0).tiles + 1;
  for (uint32_t item = worker; item < packing.count * items; item += workers) {
    const PackedShard shard(packing, item / items);
    const uint32_t number = item % items;
    if (!(number < shard.tiles ? unpack_tile(shard, number) : unpack_around(shard))) first_lane([&] { *harmed = 1; });
  }
}

}  // namespace kvtier
