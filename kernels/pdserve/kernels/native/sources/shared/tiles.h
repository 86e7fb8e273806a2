// Tile registers of AMX, for sources that are compiled with it.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

// Rows of a tile, and bytes of a row, at most: 16 sums, or 32 numbers in bfloat16.
constexpr int64_t TILE_ROWS = 16, TILE_BYTES = 64, TILE_NUMBERS = 32;

// The tile registers of this thread, as long as this exists. oneDNN loads their shapes once for several of its calls, so those that were
// there are loaded again in the end.
class Tiles {
 public:
  Tiles() { _tile_storeconfig(&before_); }
  ~Tiles() { _tile_loadconfig(&before_); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // Rows of each register; each row has TILE_BYTES. The registers have no certain numbers afterwards.
  void shape(const int64_t (&rows)[8]) {
    if (!__builtin_memcmp(rows, rows_, sizeof rows_)) return;  // to load shapes takes as long as some products
    __builtin_memcpy(rows_, rows, sizeof rows_);
    Shapes shapes = {};
    shapes.palette = 1;
    for (int i = 0; i < 8; ++i) {
      shapes.rows[i] = static_cast<uint8_t>(rows[i]);
      shapes.row_bytes[i] = rows[i] ? TILE_BYTES : 0;
    }
    _tile_loadconfig(&shapes);
  }

 private:
  // As the CPU reads it.
  struct alignas(64) Shapes {
    uint8_t palette, start_row, unused[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  Shapes before_;
  int64_t rows_[8] = {};
};

}  // namespace
