// One token out of a row of logits, on AVX-512: argmax of score / temperature + Gumbel noise among the allowed.
//
// Gives what engine/sampler.py gives, where the why is told, but for scores that tie within float rounding. The
// noise itself takes two logarithms; a bound of it takes a few instructions and rules out all but some thirty
// tokens of a row. Knows nothing of torch.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>

#include "attention.h"

namespace galley {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kNoToken = -1;  // where a score is not a number, or none is above -inf

struct Cuts {
  int64_t top_k;  // 0: none
  double top_p;   // 1: none
  double min_p;   // 0: none
};

// The lanes of 16 that exist when `left` elements are left.
inline __mmask16 lanes(int64_t left) { return left >= kLanes ? 0xffff : (1u << left) - 1; }

// Those of the 16 scores from i on that x, which has n, has; 0 for others.
inline __m512 load(const float* x, int64_t i, int64_t n) { return _mm512_maskz_loadu_ps(lanes(n - i), x + i); }

// --- noise -----------------------------------------------------------------------------------------

inline __m512i xor_shifted(__m512i x, int places) { return _mm512_xor_si512(x, _mm512_srli_epi32(x, places)); }

// Wellons' low-bias hash.
inline __m512i mix(__m512i x) {
  x = _mm512_mullo_epi32(xor_shifted(x, 16), _mm512_set1_epi32(0x21F0AAAD));
  x = _mm512_mullo_epi32(xor_shifted(x, 15), _mm512_set1_epi32(0xD35A2D97));
  return xor_shifted(x, 15);
}

// 31 random bits for each of 16 tokens from `first` on.
inline __m512i random_bits(int64_t first, uint64_t key) {
  const __m512i step = _mm512_set1_epi32(0x1E3779B1);
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i id = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int32_t>(first)), lane);
  __m512i x = _mm512_add_epi32(_mm512_mullo_epi32(id, step), _mm512_set1_epi32(static_cast<int32_t>(key)));
  x = _mm512_xor_si512(mix(x), _mm512_set1_epi32(static_cast<int32_t>(key >> 32)));
  return _mm512_and_si512(mix(x), _mm512_set1_epi32(0x7FFFFFFF));
}

// -log(-log1p(-u)) for u = (bits + 1/2) / 2^31, rounded wherever sampler.py rounds.
inline float noise_of(int32_t bits) {
  const float u = std::min((static_cast<float>(bits) + 0.5f) * 0x1p-31f, 1.f - 0x1p-24f);
  return -std::log(-std::log1p(-u));
}

// No less than noise_of: that is at most -log(u), and read as an integer a float's bits are its logarithm to base
// 2, times 2^23, or up to 0.09 * 2^23 more than it should be less. The last summand is for rounding.
inline __m512 noise_bound(__m512i bits) {
  const __m512 log2 = _mm512_cvtepi32_ps(_mm512_castps_si512(_mm512_cvtepi32_ps(bits)));
  constexpr float ln2 = 0.69314718f;
  return _mm512_fnmadd_ps(log2, _mm512_set1_ps(ln2 * 0x1p-23f), _mm512_set1_ps(ln2 * (127 + 31) + 1e-3f));
}

// --- choosing --------------------------------------------------------------------------------------

// The token with the best of x + noise among those with x >= edge, the first of equals; kNoToken where that is a NaN
// or -inf. Comparisons are such that a NaN passes them.
template <bool Noisy>
int64_t best_of(const float* x, int64_t n, float edge, uint64_t key) {
  float best = -kInfinity;
  int64_t token = kNoToken;
  alignas(64) float scores[kLanes];
  alignas(64) int32_t bits[kLanes];
  for (int64_t i = 0; i < n; i += kLanes) {
    const __m512 score = load(x, i, n);
    const __m512i random = Noisy ? random_bits(i, key) : _mm512_setzero_si512();
    const __m512 most = Noisy ? _mm512_add_ps(score, noise_bound(random)) : score;
    __mmask16 able = _mm512_mask_cmp_ps_mask(lanes(n - i), score, _mm512_set1_ps(edge), _CMP_NLT_UQ);
    able = _mm512_mask_cmp_ps_mask(able, most, _mm512_set1_ps(best), _CMP_NLE_UQ);
    if (!able) continue;
    _mm512_store_ps(scores, score);
    _mm512_store_si512(bits, random);
    for (uint32_t rest = able; rest; rest &= rest - 1) {
      const int lane = std::countr_zero(rest);
      const float value = Noisy ? scores[lane] + noise_of(bits[lane]) : scores[lane];
      if (value <= best) continue;
      if (std::isnan(value)) return kNoToken;
      best = value;
      token = i + lane;
    }
  }
  return token;
}

// --- cuts ------------------------------------------------------------------------------------------

inline float best_score(const float* x, int64_t n) {
  __m512 best = _mm512_set1_ps(-kInfinity);
  for (int64_t i = 0; i < n; i += kLanes) best = _mm512_mask_max_ps(best, lanes(n - i), best, load(x, i, n));
  return _mm512_reduce_max_ps(best);
}

// What all scores >= least weigh together.
template <class Weigh>
double weight_from(const float* x, int64_t n, float least, Weigh weigh) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += kLanes) {
    const __m512 score = load(x, i, n);
    const __mmask16 in = _mm512_mask_cmp_ps_mask(lanes(n - i), score, _mm512_set1_ps(least), _CMP_GE_OQ);
    sum = _mm512_mask_add_ps(sum, in, sum, weigh(score));
  }
  return _mm512_reduce_add_ps(sum);
}

// Moves the scores in [from, below) to `to`, which may be x, and gives their number.
inline int64_t keep(const float* x, int64_t n, float from, float below, float* to) {
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const __m512 score = load(x, i, n);
    __mmask16 in = _mm512_mask_cmp_ps_mask(lanes(n - i), score, _mm512_set1_ps(from), _CMP_GE_OQ);
    in = _mm512_mask_cmp_ps_mask(in, score, _mm512_set1_ps(below), _CMP_LT_OQ);
    _mm512_storeu_ps(to + kept, _mm512_maskz_compress_ps(in, score));
    kept += std::popcount(static_cast<uint32_t>(in));
  }
  return kept;
}

// The largest t for which the scores >= t weigh `wanted` or more, -FLT_MAX where there is none.
//
// By bisection between a `low` that weighs enough and a `high` that does not, over the scores between the two. The
// first steps go down from the best in strides that double: what is wanted is nearly always close to it.
template <class Weigh>
float edge_of(const float* x, int64_t n, float best, double wanted, Weigh weigh, float* scratch) {
  float low = -FLT_MAX, high = std::nextafter(best, kInfinity), stride = 8.f;
  double above = 0;
  for (;;) {
    const float middle = high - std::min((high - low) / 2, stride);
    if (!(low < middle && middle < high)) return low;
    const double weight = above + weight_from(x, n, middle, weigh);
    if (weight >= wanted) {
      low = middle;
    } else {
      high = middle;
      above = weight;
      stride *= 2;
    }
    n = keep(x, n, low, high, scratch);
    x = scratch;
  }
}

// The least score that top_k, then top_p, then min_p allow. `scratch` has room for n scores and a register's more.
inline float lowest_allowed(const float* x, int64_t n, const Cuts& cuts, float* scratch) {
  const float best = best_score(x, n);
  float edge = -kInfinity;
  if (0 < cuts.top_k && cuts.top_k < n)
    edge = edge_of(x, n, best, cuts.top_k, [](__m512) { return _mm512_set1_ps(1.f); }, scratch);
  if (cuts.top_p < 1) {
    const auto weigh = [best](__m512 score) { return exp_ps(_mm512_sub_ps(score, _mm512_set1_ps(best))); };
    const double wanted = cuts.top_p * weight_from(x, n, edge, weigh);
    edge = std::max(edge, edge_of(x, n, best, wanted, weigh, scratch));
  }
  if (cuts.min_p > 0) edge = std::max(edge, best + static_cast<float>(std::log(cuts.min_p)));
  return edge;
}

// A row's token; temperature 0 takes the best. `scratch` has room for two rows and two registers more.
inline int64_t draw(const float* logits, int64_t n, float temperature, uint64_t key, const Cuts& cuts, float* scratch) {
  if (temperature == 0.f) return best_of<false>(logits, n, -kInfinity, 0);
  const float* x = logits;
  if (temperature != 1.f) {
    for (int64_t i = 0; i < n; ++i) scratch[i] = logits[i] / temperature;
    x = scratch;
  }
  const bool cut = cuts.top_k > 0 || cuts.top_p < 1 || cuts.min_p > 0;
  const float edge = cut ? lowest_allowed(x, n, cuts, scratch + n + kLanes) : -kInfinity;
  return best_of<true>(x, n, edge, key);
}

}  // namespace galley
