// Products by the tile registers of AMX, whatever the format of the numbers.
#pragma once

#include "panels.h"
#include "tiles.h"

#if defined(HEADRACE_AMX)

#include <algorithm>
#include <cstdint>

namespace headrace {

// What `Format` is asked for: Number; Sum; DEPTH, the inputs of a tile; x, whose row(token) are
// numbers; w, with column(index) and `inputs`; the instruction that multiplies, for each of the
// sums; and the sums of some tokens as float32, which may lie where they were.
//
// The tiles of a panel's weights stay in the nearest cache while all tokens pass by, which are
// loaded with the hint that they need not stay there. A panel that is larger than that cache is
// taken some of its inputs at a time, and the sums go on from what they were: the order is the
// same. The weights of the next panel are asked for meanwhile, a few in each step, since the lines
// that a core can wait for at once are few.
template <class Format>
class TilePanels : public Multiplying {
  using Number = typename Format::Number;
  using Sum = typename Format::Sum;

 public:
  TilePanels(const Format& format, int64_t tokens)
      : format_(format), rows_(std::min<int64_t>(tokens, ROWS)) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.set(tile, tile < 6 ? rows_ : ROWS, 64);
    tiles_.configure(shapes);
  }

  void operator()(const Share& share, const Sums& sums) override {
    const int64_t tokens = share.end_token - share.first_token;
    const int64_t steps = format_.w.inputs / DEPTH;
    // Tokens that are all computed at once find nothing in the cache.
    const int64_t parts = tokens <= TOGETHER ? 1 : (steps + NEAR_STEPS - 1) / NEAR_STEPS;
    const int64_t all_steps = (tokens + TOGETHER - 1) / TOGETHER * steps;
    for (int64_t panel = share.first_panel; panel < share.end_panel; ++panel) {
      const Columns columns = Columns::of(sums, panel);
      const bool is_last = panel + 1 == share.end_panel;
      next_.begin(is_last ? share.then : Columns::of(sums, panel + 1).in(format_.w), all_steps);
      for (int64_t part = 0; part < parts; ++part) {
        const Steps some{steps * part / parts, steps * (part + 1) / parts};
        for (int64_t token = share.first_token; token < share.end_token; token += TOGETHER) {
          const int64_t rows = std::min<int64_t>(share.end_token - token, TOGETHER);
          Sum* to = sums_ + (parts == 1 ? other_place() : token - share.first_token) * WIDTH;
          add(token, rows, columns, some, to);
          hand_over(TOGETHER);
          if (part < parts - 1) continue;
          waiting_ = {&sums, panel, columns, token, rows, to};
          if (!sums.computes() || parts > 1) hand_over(TOGETHER);
        }
      }
    }
    hand_over(TOGETHER);
  }

 private:
  static constexpr int DEPTH = Format::DEPTH;
  static constexpr int64_t TILE = COLUMN * DEPTH, LINE = WIDTH * sizeof(Sum);
  // So many tiles of two columns fit into the nearest cache, with tokens beside them.
  static constexpr int64_t NEAR_STEPS = 18;

  // Of the inputs of a product, in tiles.
  struct Steps {
    int64_t begin, end;
  };
  // Sums that have not been handed over.
  struct Waiting {
    const Sums* sums;
    int64_t panel;
    Columns columns;
    int64_t token, rows;
    Sum* from;
  };

  // Sums that wait are not written over.
  int64_t other_place() { return place_ = TOGETHER - place_; }

  // So many rows of what waits. Called only when they have been stored for a while: a load would
  // wait for the tiles otherwise.
  HEADRACE_INLINE void hand_over(int64_t most) {
    if (waiting_.rows <= 0) return;
    Waiting& some = waiting_;
    const int64_t rows = std::min(most, some.rows);
    some.sums->take(some.token, rows, some.panel,
                    format_.floats(some.token, rows, some.columns.index, some.from));
    some.token += rows;
    some.rows -= rows;
    some.from += rows * WIDTH;
  }

  void add(int64_t token, int64_t rows, const Columns& columns, Steps steps, Sum* sums) {
    const Number* weights[PANEL] = {format_.w.column(columns.index[0]),
                                    format_.w.column(columns.index[1])};
    if (rows == 2 * ROWS) return two(token, weights, steps, sums);
    int64_t row = 0;
    for (; row + rows_ <= rows; row += rows_) one(token + row, weights, steps, sums + row * WIDTH);
    if (row == rows) return;
    // Tokens that fill no tile: with some before them once more, in a full one. They are the same
    // bits.
    const int64_t again = rows_ - (rows - row);
    one(token + row - again, weights, steps, spare_);
    std::copy_n(spare_ + again * WIDTH, (rows - row) * WIDTH, sums + row * WIDTH);
  }

  // Tiles 0 to 3 are sums, 4 and 5 tokens, 6 and 7 weights.
  void two(int64_t token, const Number* const* weights, Steps steps, Sum* sums) {
    const int64_t width = format_.w.inputs * sizeof(Number);
    const Number *x = format_.x.row(token), *below = format_.x.row(token + ROWS);
    memory_is_read(x);
    if (steps.begin == 0) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, sums, LINE);
      _tile_loadd(1, sums + COLUMN, LINE);
      _tile_loadd(2, sums + ROWS * WIDTH, LINE);
      _tile_loadd(3, sums + ROWS * WIDTH + COLUMN, LINE);
    }
    for (int64_t step = steps.begin; step < steps.end; ++step) {
      _tile_stream_loadd(4, x + step * DEPTH, width);
      _tile_loadd(6, weights[0] + step * TILE, 64);
      Format::add_above_left();
      _tile_loadd(7, weights[1] + step * TILE, 64);
      Format::add_above_right();
      _tile_stream_loadd(5, below + step * DEPTH, width);
      Format::add_below_left();
      Format::add_below_right();
      next_.ask();
      if (step >= steps.begin + STORED_AFTER) hand_over(ROWS_A_STEP);
    }
    _tile_stored(0, sums, LINE);
    _tile_stored(1, sums + COLUMN, LINE);
    _tile_stored(2, sums + ROWS * WIDTH, LINE);
    _tile_stored(3, sums + ROWS * WIDTH + COLUMN, LINE);
    memory_is_read(sums);
  }

  void one(int64_t token, const Number* const* weights, Steps steps, Sum* sums) {
    const int64_t width = format_.w.inputs * sizeof(Number);
    const Number* x = format_.x.row(token);
    memory_is_read(x);
    if (steps.begin == 0) {
      _tile_zero(0);
      _tile_zero(1);
    } else {
      _tile_loadd(0, sums, LINE);
      _tile_loadd(1, sums + COLUMN, LINE);
    }
    for (int64_t step = steps.begin; step < steps.end; ++step) {
      _tile_loadd(4, x + step * DEPTH, width);
      _tile_loadd(6, weights[0] + step * TILE, 64);
      Format::add_above_left();
      _tile_loadd(7, weights[1] + step * TILE, 64);
      Format::add_above_right();
      next_.ask();
    }
    _tile_stored(0, sums, LINE);
    _tile_stored(1, sums + COLUMN, LINE);
    memory_is_read(sums);
  }

  // Steps until the sums before have been stored, and rows of them that are handed over in each
  // one then.
  static constexpr int64_t STORED_AFTER = 5, ROWS_A_STEP = 3;

  const Format format_;
  const int64_t rows_;
  BorrowedTiles tiles_;
  Waiting waiting_{};
  NextPanel next_;
  int64_t place_ = 0;
  alignas(64) Sum sums_[TOKENS_AT_ONCE * WIDTH];
  alignas(64) Sum spare_[ROWS * WIDTH];
};

}  // namespace headrace

#endif
