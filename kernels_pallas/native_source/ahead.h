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

// Pieces of memory that will be needed, in order. A core that asks for more lines than it can wait
// for stands still, so it asks for some whenever it has read as many others: what has been asked
// for and not been read stays as much as it was.
class Ahead {
 public:
  static constexpr int MOST = 64;  // pieces

  void clear() { piece_ = pieces_, at_ = 0, lines_ = 0; }

  // There is room for it.
  void add(const char* from, int64_t bytes) {
    all_[pieces_++ % MOST] = {from, bytes};
    lines_ += (bytes + LINE_BYTES - 1) / LINE_BYTES;
  }

  // Lines that have been added and not been asked for.
  int64_t lines() const { return lines_; }

  HEADRACE_INLINE void ask(int64_t lines) {
    while (lines > 0 && lines_ > 0) {
      const Piece& piece = all_[piece_ % MOST];
      const int64_t begin = at_, end = std::min(piece.bytes, at_ + lines * LINE_BYTES);
      for (; at_ < end; at_ += LINE_BYTES)
        __builtin_prefetch(piece.from + at_, 0, NEARNESS);
      const int64_t asked = (at_ - begin) / LINE_BYTES;
      lines -= asked;
      lines_ -= asked;
      if (at_ >= piece.bytes) ++piece_, at_ = 0;
    }
  }

 private:
  struct Piece {
    const char* from;
    int64_t bytes;
  };

  Piece all_[MOST];
  unsigned piece_ = 0, pieces_ = 0;  // that is being asked for, and all there have been
  int64_t at_ = 0, lines_ = 0;       // byte of the piece
};

}  // namespace headrace
