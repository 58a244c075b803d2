// Asking for memory while something else is computed.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tiles.h"
#include "vectors.h"

namespace headrace {

constexpr int64_t LINE_BYTES = 64;

// Which cache a line is asked into, as __builtin_prefetch counts them: tiles are loaded past the
// nearest one, which they would only fill.
#if defined(HEADRACE_AMX)
constexpr int NEARNESS = 2;
#else
constexpr int NEARNESS = 3;
#endif

// Pieces of memory that will be needed. A core that asks for more lines than it can wait for stands
// still, so it asks for some whenever it has read others.
class Ahead {
 public:
  static constexpr int MOST = 32;

  // Forgets what was there. At most MOST pieces are added then, and `rate` lines asked for where
  // one was read.
  void begin(int64_t rate) { piece_ = pieces_ = 0, at_ = 0, rate_ = rate; }

  void add(const char* from, int64_t bytes) { all_[pieces_++] = {from, bytes}; }

  // So many lines of something else were read.
  HEADRACE_INLINE void ask(int64_t lines_read) { ask_for(lines_read * rate_); }

  void ask_for_the_rest() {
    while (piece_ < pieces_) ask_for(1 << 10);
  }

 private:
  struct Piece {
    const char* from;
    int64_t bytes;
  };

  HEADRACE_INLINE void ask_for(int64_t lines) {
    while (lines > 0 && piece_ < pieces_) {
      const Piece& piece = all_[piece_];
      const int64_t end = std::min(piece.bytes, at_ + lines * LINE_BYTES);
      for (; at_ < end; at_ += LINE_BYTES, --lines) __builtin_prefetch(piece.from + at_, 0, NEARNESS);
      if (at_ < piece.bytes) return;
      ++piece_;
      at_ = 0;
    }
  }

  Piece all_[MOST];
  int piece_ = 0, pieces_ = 0;  // that is being asked for, and all
  int64_t at_ = 0, rate_ = 1;   // byte of the piece
};

}  // namespace headrace
