// Products of bfloat16 rows, one or thousands, with a packed weight matrix, on AVX-512 BF16.
//
// Packed: [panels][K / 2][32][2], that is 32 outputs beside each other and, in each 32-bit lane, two consecutive
// inputs of one of them, as VDPBF16PS wants it. A panel is met by tiles of at most 12 rows, whose sums
// stay in registers. Every sum runs over its inputs in ascending order, in one accumulator, whatever the number of
// rows: a row's bits do not depend on its batch. Knows nothing of torch.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

namespace galley {

using bf16 = uint16_t;

constexpr int64_t kPanel = 32;
constexpr int64_t kPanelPair = kPanel * 2 * sizeof(bf16);  // bytes of a panel for one pair of inputs
constexpr int kTile = 12;
constexpr int64_t kRowBlock = 240;  // rows whose inputs stay in the second-level cache
constexpr int64_t kAhead = 8192;  // bytes between what is read and what is asked for: 200 ns at 40 GB/s

inline __m512bh as_bf16(__m512i bits) { return (__m512bh)bits; }

// Two consecutive elements in every lane.
inline __m512bh pair_at(const bf16* at) {
  int32_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return as_bf16(_mm512_set1_epi32(bits));
}

struct Panel {
  const bf16* weights;
  const float* bias;  // 32 of them, or null
  int64_t pairs;
  __mmask32 stored;  // which outputs exist
};

// Thirty-two sums of one row, as they are or rounded to bfloat16.
inline void store(float* out, __mmask32 stored, __m512 low, __m512 high) {
  _mm512_mask_storeu_ps(out, (__mmask16)stored, low);
  _mm512_mask_storeu_ps(out + 16, (__mmask16)(stored >> 16), high);
}
inline void store(bf16* out, __mmask32 stored, __m512 low, __m512 high) {
  _mm512_mask_storeu_epi16(out, stored, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

// R rows with one panel. `next` is asked for meanwhile, `stride` bytes per pair: the tiles that share a panel
// share out the next one among them, so that the memory is never idle.
template <class Out, int R>
void multiply_tile(const bf16* x, const Panel& panel, Out* out, int64_t n, const char* next, int64_t stride) {
  const int64_t k = 2 * panel.pairs;
  __m512 low[R], high[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    low[r] = panel.bias ? _mm512_loadu_ps(panel.bias) : _mm512_setzero_ps();
    high[r] = panel.bias ? _mm512_loadu_ps(panel.bias + 16) : _mm512_setzero_ps();
  }
  for (int64_t pair = 0; pair < panel.pairs; ++pair) {
    const bf16* at = panel.weights + pair * 2 * kPanel;
    _mm_prefetch((const char*)at + kAhead, _MM_HINT_T0);
    _mm_prefetch((const char*)at + kAhead + 64, _MM_HINT_T0);
    if (stride < kPanelPair) _mm_prefetch(next + pair * stride, _MM_HINT_T1);
    const __m512bh first = as_bf16(_mm512_loadu_si512(at)), second = as_bf16(_mm512_loadu_si512(at + kPanel));
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const __m512bh inputs = pair_at(x + r * k + 2 * pair);
      low[r] = _mm512_dpbf16_ps(low[r], inputs, first);
      high[r] = _mm512_dpbf16_ps(high[r], inputs, second);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) store(out + r * n, panel.stored, low[r], high[r]);
}

template <class Out>
using Tile = void (*)(const bf16*, const Panel&, Out*, int64_t, const char*, int64_t);

template <class Out, int... R>
constexpr std::array<Tile<Out>, sizeof...(R)> tiles_of(std::integer_sequence<int, R...>) {
  return {multiply_tile<Out, R + 1>...};
}
template <class Out>
inline constexpr auto kTiles = tiles_of<Out>(std::make_integer_sequence<int, kTile>());

// x [rows, 2 * pairs] with panels [first, last) of the packed weights, into out [rows, n]; all contiguous.
template <class Out>
void multiply(const bf16* x, int64_t rows, const bf16* packed, int64_t pairs, const float* bias, Out* out, int64_t n,
              int64_t first, int64_t last) {
  for (int64_t base = 0; base < rows; base += kRowBlock) {
    const int64_t block = std::min(kRowBlock, rows - base), tiles = (block + kTile - 1) / kTile;
    for (int64_t p = first; p < last; ++p) {
      const int64_t width = std::min(kPanel, n - p * kPanel), bytes = pairs * kPanelPair;
      const Panel panel{packed + p * pairs * 2 * kPanel, bias ? bias + p * kPanel : nullptr, pairs,
                        width == kPanel ? ~__mmask32(0) : (__mmask32(1) << width) - 1};
      const char* next = (const char*)panel.weights + bytes;
      int64_t row = base;
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t count = (base + block - row) / (tiles - t);
        kTiles<Out>[count - 1](x + row * 2 * pairs, panel, out + row * n + p * kPanel, n, next + bytes / tiles * t,
                          kPanelPair / tiles);
        row += count;
      }
    }
  }
}

// weight [n, 2 * pairs] into panels; outputs beyond n are zero, `packed` is zero before.
inline void pack(const bf16* weight, int64_t n, int64_t pairs, bf16* packed) {
  for (int64_t o = 0; o < n; ++o)
    for (int64_t pair = 0; pair < pairs; ++pair)
      std::memcpy(packed + ((o / kPanel * pairs + pair) * kPanel + o % kPanel) * 2, weight + (o * pairs + pair) * 2, 4);
}

}  // namespace galley
