// The tile registers of AMX: whether this process may use them, and how they are shaped.
#pragma once

#include <cstdint>

#include "vectors.h"

#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && \
    defined(__AVX512F__) && !defined(HEADRACE_NO_AMX)
#define HEADRACE_AMX 1
#include <sys/syscall.h>
#include <unistd.h>

namespace headrace {

// Whether the kernel lets this process use the tiles; asks once.
inline bool may_use_tiles() {
  static const bool granted = [] {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
  }();
  return granted;
}

// The compiler does not know what the tile instructions read: nothing may wait in registers.
HEADRACE_INLINE void memory_is_read(const void* what) {
  __asm__ volatile("" : : "r"(what) : "memory");
}

// Rows and bytes of each tile, as the instructions want to read them.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int num_bytes) {
    rows[tile] = num_rows;
    bytes[tile] = num_bytes;
  }
};

// Others may use the tiles too: what they had configured comes back in the end.
class BorrowedTiles {
 public:
  BorrowedTiles() {
    memory_is_read(&previous_);
    _tile_storeconfig(&previous_);
  }
  ~BorrowedTiles() { configure(previous_); }
  BorrowedTiles(const BorrowedTiles&) = delete;
  BorrowedTiles& operator=(const BorrowedTiles&) = delete;

  void configure(const TileShapes& shapes) {
    memory_is_read(&shapes);
    _tile_loadconfig(&shapes);
  }

 private:
  TileShapes previous_;
};

}  // namespace headrace

#endif
