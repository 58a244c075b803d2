#include "sampling.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "vectors.h"
#include "workers.h"

namespace headrace {
namespace {

// The first of the largest; 0 if there is no number at all.
int32_t first_largest(const float* x, int64_t count) {
  Floats largest = all(-std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) largest = larger(load<Floats>(x + i), largest);
  float value = largest_lane(largest);
  for (; i < count; ++i) value = x[i] > value ? x[i] : value;
  const float* found = std::find(x, x + count, value);
  return found == x + count ? 0 : found - x;
}

class Drawing {
 public:
  explicit Drawing(const Sampling& sampling)
      : s_(sampling), depths_(sampling.vocab + LANES), weights_(sampling.vocab + LANES) {}

  int32_t operator()(int64_t row) {
    const float* x = s_.logits + row * s_.vocab;
    const int32_t likeliest = first_largest(x, s_.vocab);
    if (!(s_.temperature[row] > 0)) return likeliest;
    weigh(x, x[likeliest], 1.0f / s_.temperature[row]);
    const float deepest = deepest_kept(row);
    double total = 0;
    for (int64_t i = 0; i < s_.vocab; ++i) total += depths_[i] <= deepest ? weights_[i] : 0.0f;
    const double target = total * s_.uniform[row];
    double sum = 0;
    for (int64_t i = 0; i < s_.vocab; ++i) {
      if (depths_[i] <= deepest) sum += weights_[i];
      if (sum > target) return i;
    }
    return likeliest;  // the sum is not a number
  }

 private:
  // Bins of depths, which are a 64th wide. The last one holds all that is deeper: weights there are
  // below e ** -32, all of them together nothing that a uniform number could tell, so it is not
  // worth while to cut it.
  static constexpr int BINS = 2048;
  static constexpr float PER_DEPTH = 64;

  static int bin(float depth) {
    return depth < BINS / PER_DEPTH ? (int)(depth * PER_DEPTH) : BINS - 1;
  }

  // How far each token is below the likeliest, in nats, and e ** -depth.
  void weigh(const float* x, float largest, float inverse) {
    for (int64_t i = 0; i < s_.vocab; i += LANES) {
      Floats below{};
      if (i + LANES <= s_.vocab) below = (largest - load<Floats>(x + i)) * inverse;
      else
        for (int lane = 0; i + lane < s_.vocab; ++lane)
          below[lane] = (largest - x[i + lane]) * inverse;
      store(depths_.data() + i, below);
      store(weights_.data() + i, exponential(-below));
    }
  }

  float deepest_kept(int64_t row) {
    const int64_t k = s_.top_k[row];
    const bool needs_k = k > 0 && k < s_.vocab, needs_p = s_.top_p[row] < 1;
    float deepest = std::numeric_limits<float>::infinity();
    if (needs_k || needs_p) fill_bins();
    if (needs_k) deepest = depth_of([&](int64_t count, double) { return count >= k; });
    if (needs_p) {
      double total = 0;
      for (int64_t i = 0; i < s_.vocab; ++i) total += depths_[i] <= deepest ? weights_[i] : 0.0f;
      const double wanted = total * std::max(s_.top_p[row], 0.0f);
      deepest = std::min(deepest, depth_of([&](int64_t, double mass) { return mass >= wanted; }));
    }
    if (s_.min_p[row] > 0) deepest = std::min(deepest, -std::log(std::min(s_.min_p[row], 1.0f)));
    return deepest;
  }

  void fill_bins() {
    counts_.fill(0);
    masses_.fill(0);
    for (int64_t i = 0; i < s_.vocab; ++i) {
      const int at = bin(depths_[i]);
      ++counts_[at];
      masses_[at] += weights_[i];
    }
  }

  // The depth of the first token, from the likeliest down, with which enough are kept.
  template <class Enough>
  float depth_of(const Enough& enough) {
    int64_t count = 0;
    double mass = 0;
    int at = 0;
    for (; at < BINS - 1 && !enough(count + counts_[at], mass + masses_[at]); ++at) {
      count += counts_[at];
      mass += masses_[at];
    }
    if (at == BINS - 1) return std::numeric_limits<float>::infinity();
    std::vector<float>& inside = sorted_;
    inside.clear();
    for (int64_t i = 0; i < s_.vocab; ++i)
      if (bin(depths_[i]) == at) inside.push_back(depths_[i]);
    std::sort(inside.begin(), inside.end());
    for (const float depth : inside) {
      ++count;
      mass += exponential(all(-depth))[0];
      if (enough(count, mass)) return depth;
    }
    return std::numeric_limits<float>::infinity();  // the rounding of sums
  }

  const Sampling s_;
  std::vector<float> depths_, weights_, sorted_;
  std::array<int64_t, BINS> counts_;
  std::array<double, BINS> masses_;
  NoSubnormals no_subnormals_;
};

}  // namespace

void add_sampling(Phases& phases, const Sampling& sampling, int64_t rows) {
  phases.add(rows, [=] {
    return [=, drawing = std::make_unique<Drawing>(sampling)](int64_t row) {
      sampling.out[row] = sampling.wanted[row] == 0 ? 0 : (*drawing)(row);
    };
  });
}

}  // namespace headrace
