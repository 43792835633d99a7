// Causal attention of packed rows over a paged KV pool in bfloat16, on AVX-512 BF16.
//
// Keys and values are met in units of 64, counted from position 0; a unit is turned once into the pair layout of
// VDPBF16PS and used by all queries of a tile that share its KV head. Softmax is online (Milakov and Gimelshein
// 2018; FlashAttention, Dao 2022). A query's result depends on its own position and keys alone: the same bits in
// a prompt, a chunk or a decode step, whatever the batch. Knows nothing of torch.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "product.h"

namespace galley {

constexpr int kUnit = 64;       // keys per step of the online softmax
constexpr int kQueries = 32;    // queries per tile
constexpr int kLanes = 16;      // floats per register
constexpr int kMostGroup = 16;  // query heads that share a KV head

// One sequence's share of a step.
struct Row {
  int32_t first, count, start;  // its first packed token, how many, the position of the first
};

struct Shape {
  int64_t heads, kv_heads, layers, block_size, width;  // width: blocks in a block table
  int64_t query_token, query_head;                     // strides in elements
  float scaling, softcap;                              // softcap 0: none
  int64_t window;                                      // 0: all keys
};

inline __m512 exp_ps(__m512 x) {
  // Cody-Waite reduction and a degree-6 polynomial on [-ln2/2, ln2/2]; -inf gives 0.
  x = _mm512_max_ps(x, _mm512_set1_ps(-104.f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 y = _mm512_set1_ps(1.f / 720);
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.f / 120));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.f / 24));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.f / 6));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.5f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(y, n);
}

inline __m512 tanh_ps(__m512 x) {
  const __m512 bounded = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(20.f)), _mm512_set1_ps(-20.f));
  const __m512 e = exp_ps(_mm512_add_ps(bounded, bounded));
  const __m512 one = _mm512_set1_ps(1.f);
  return _mm512_div_ps(_mm512_sub_ps(e, one), _mm512_add_ps(e, one));
}

// 16 x 16 lanes of 32 bits, rows to columns, in place.
inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Where the keys of a unit are; `pool` points at one layer's keys of (block 0, head 0).
struct Places {
  const bf16* keys[kUnit];
  int count = 0;

  Places(const bf16* pool, const int32_t* table, int base, int end, int64_t head, int64_t dim, const Shape& shape) {
    const int64_t per_head = shape.layers * 2 * shape.block_size * dim;
    int64_t block = base / shape.block_size, slot = base % shape.block_size;
    while (base + count < end && count < kUnit) {
      const bf16* from = pool + (table[block] * shape.kv_heads + head) * per_head;
      for (; slot < shape.block_size && base + count < end && count < kUnit; ++slot) keys[count++] = from + slot * dim;
      slot = 0;
      ++block;
    }
  }

  // Prefetch a 2 / kUnit part of them.
  template <int D>
  void ask(int pair, int64_t offset) const {
    for (int key = 2 * pair; key < 2 * pair + 2; ++key)
      if (key < count)
        for (int part = 0; part < D / 32; ++part)
          _mm_prefetch((const char*)(keys[key] + offset + part * 32), _MM_HINT_T0);
  }
};

// The keys and values of one unit, head_dim D: keys [D / 2][64][2], values [32 pairs of keys][D][2], the latter in the
// order that unpacking leaves: per 32 dimensions, 4 low lanes of 4, then 4 high ones.
template <int D>
struct alignas(64) Unit {
  bf16 keys[D * kUnit];
  bf16 values[D * kUnit];

  void load(const Places& here, int64_t half) {
    for (int group = 0; group * 16 < here.count; ++group) {
      for (int part = 0; part < D / 32; ++part) {
        __m512i rows[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
          const int key = group * 16 + i;
          rows[i] = key < here.count ? _mm512_loadu_si512(here.keys[key] + part * 32) : _mm512_setzero_si512();
        }
        transpose(rows);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) _mm512_store_si512(keys + (part * 16 + i) * 2 * kUnit + group * 32, rows[i]);
      }
    }
    for (int key = 0; key < here.count; key += 2) {
      for (int part = 0; part < D / 32; ++part) {
        const int64_t at = half + part * 32;
        const __m512i a = _mm512_loadu_si512(here.keys[key] + at);
        const __m512i b = key + 1 < here.count ? _mm512_loadu_si512(here.keys[key + 1] + at) : _mm512_setzero_si512();
        bf16* to = values + (key * D / 2 + part * 32) * 2;
        _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(to + 32, _mm512_unpackhi_epi16(a, b));
      }
    }
  }
};

// What is known of one query head so far.
template <int D>
struct alignas(64) Running {
  float sum[D];
  float largest, weight;
};

// One query head in one unit: only keys [low, high) of it are seen.
template <int D>
struct Lane {
  const bf16* query;
  Running<D>* run;
  int low, high;
};

// Scaled, capped scores to weights in `s`; returns what earlier sums are to be multiplied with.
template <int D>
inline __m512 soften(__m512* s, const Lane<D>& lane, const Shape& shape) {
  const __m512 hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  const uint64_t seen = (~uint64_t(0) >> (kUnit - lane.high)) & (~uint64_t(0) << lane.low);
  __m512 top = hidden;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    s[i] = _mm512_mul_ps(s[i], _mm512_set1_ps(shape.scaling));
    if (shape.softcap > 0)
      s[i] = _mm512_mul_ps(tanh_ps(_mm512_div_ps(s[i], _mm512_set1_ps(shape.softcap))), _mm512_set1_ps(shape.softcap));
    s[i] = _mm512_mask_mov_ps(hidden, __mmask16(seen >> (16 * i)), s[i]);
    top = _mm512_max_ps(top, s[i]);
  }
  Running<D>& run = *lane.run;
  const float largest = std::max(run.largest, _mm512_reduce_max_ps(top));
  const __m512 base = _mm512_set1_ps(largest);
  __m512 total = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    s[i] = _mm512_maskz_mov_ps(__mmask16(seen >> (16 * i)), exp_ps(_mm512_sub_ps(s[i], base)));
    total = _mm512_add_ps(total, s[i]);
  }
  const __m512 fade = exp_ps(_mm512_set1_ps(run.largest - largest));
  run.weight = run.weight * _mm512_cvtss_f32(fade) + _mm512_reduce_add_ps(total);
  run.largest = largest;
  return fade;
}

// Take one unit into account for N lanes at a time: their sums hide each other's latency.
// Meanwhile asks for the keys and values that are loaded next.
template <int D, int N>
inline void meet(const Lane<D>* lanes, const Unit<D>& unit, const Places* next, int64_t half, const Shape& shape) {
  alignas(64) bf16 weights[N][kUnit];
  __m512 fade[N];
  int low = kUnit, high = 0;
  {
    __m512 s[N][4];
#pragma GCC unroll 16
    for (int i = 0; i < N * 4; ++i) s[i / 4][i % 4] = _mm512_setzero_ps();
    for (int pair = 0; pair < D / 2; ++pair) {
      const bf16* keys = unit.keys + pair * 2 * kUnit;
      if (next) next->ask<D>(pair, 0);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const __m512bh q = pair_at(lanes[n].query + 2 * pair);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) s[n][i] = _mm512_dpbf16_ps(s[n][i], q, as_bf16(_mm512_load_si512(keys + i * 32)));
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      fade[n] = soften<D>(s[n], lanes[n], shape);
      _mm512_store_si512(weights[n], (__m512i)_mm512_cvtne2ps_pbh(s[n][1], s[n][0]));
      _mm512_store_si512(weights[n] + 32, (__m512i)_mm512_cvtne2ps_pbh(s[n][3], s[n][2]));
      low = std::min(low, lanes[n].low), high = std::max(high, lanes[n].high);
    }
  }
  constexpr int kSums = D / kLanes;
  __m512 sum[N][kSums];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) sum[n][i] = _mm512_mul_ps(_mm512_load_ps(lanes[n].run->sum + i * kLanes), fade[n]);
  for (int pair = low / 2; pair < (high + 1) / 2; ++pair) {
    const bf16* values = unit.values + pair * D * 2;
    if (next) next->ask<D>(pair, half);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const __m512bh w = pair_at(weights[n] + 2 * pair);
#pragma GCC unroll 16
      for (int i = 0; i < kSums; ++i)
        sum[n][i] = _mm512_dpbf16_ps(sum[n][i], w, as_bf16(_mm512_load_si512(values + i * 32)));
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) _mm512_store_ps(lanes[n].run->sum + i * kLanes, sum[n][i]);
}

template <int D>
inline void meet_all(const Lane<D>* lanes, int count, const Unit<D>& unit, const Places* next, int64_t half,
                     const Shape& shape) {
  constexpr int kMost = D <= 64 ? 4 : D <= 128 ? 3 : 1;
  for (; count >= kMost; count -= kMost, lanes += kMost, next = nullptr) meet<D, kMost>(lanes, unit, next, half, shape);
  if constexpr (kMost > 3)
    if (count == 3) return meet<D, 3>(lanes, unit, next, half, shape);
  if constexpr (kMost > 2)
    if (count == 2) return meet<D, 2>(lanes, unit, next, half, shape);
  if (count == 1) meet<D, 1>(lanes, unit, next, half, shape);
}

// Divide by the weight, bring the dimensions back into order, round, store.
template <int D>
inline void finish(const Running<D>& run, bf16* out) {
  const __m512 scale = _mm512_set1_ps(1 / run.weight);
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (int part = 0; part < D / 32; ++part) {
    const __m512 low = _mm512_mul_ps(_mm512_load_ps(run.sum + part * 32), scale);
    const __m512 high = _mm512_mul_ps(_mm512_load_ps(run.sum + part * 32 + 16), scale);
    const __m512 a = _mm512_permutex2var_ps(low, first, high), b = _mm512_permutex2var_ps(low, second, high);
    _mm512_storeu_si512(out + part * 32, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  }
}

template <int D>
struct Scratch {
  Unit<D> unit;
  Running<D> running[kQueries * kMostGroup];
  Lane<D> lanes[kQueries * kMostGroup];
};

// One tile of queries of one row, for one KV head.
struct Item {
  const int32_t* table;
  Row row;
  int begin, end;  // queries of the row
  int64_t head;

  int oldest(const Shape& shape) const {
    const int64_t low = shape.window > 0 ? std::max<int64_t>(0, row.start + begin - shape.window + 1) : 0;
    return low / kUnit * kUnit;
  }
  int newest() const { return row.start + end; }
};

template <int D>
void attend_tile(const bf16* query, const bf16* pool, const Item& item, const Item* next, const Shape& shape, bf16* out,
                 Scratch<D>& scratch) {
  const int64_t group = shape.heads / shape.kv_heads;
  const int64_t half = shape.block_size * D;  // elements from a block's keys to its values
  const int queries = item.end - item.begin;
  for (int64_t i = 0; i < queries * group; ++i) {
    auto& run = scratch.running[i];
    std::memset(run.sum, 0, sizeof run.sum);
    run.largest = -std::numeric_limits<float>::infinity();
    run.weight = 0;
  }
  const int end = item.newest();
  Places here(pool, item.table, item.oldest(shape), end, item.head, D, shape);
  for (int base = item.oldest(shape); base < end; base += kUnit) {
    const bool more = base + kUnit < end;
    const Item& after = more || !next ? item : *next;
    const int from = more ? base + kUnit : after.oldest(shape);
    const Places there(pool, after.table, from, after.newest(), after.head, D, shape);
    scratch.unit.load(here, half);
    int count = 0;
    for (int q = 0; q < queries; ++q) {
      const int position = item.row.start + item.begin + q;
      const int low = shape.window > 0 ? std::max<int64_t>(0, position - shape.window + 1 - base) : 0;
      const int high = std::min(kUnit, position + 1 - base);
      if (low >= high) continue;
      for (int64_t g = 0; g < group; ++g)
        scratch.lanes[count++] = {query + (item.row.first + item.begin + q) * shape.query_token +
                                      (item.head * group + g) * shape.query_head,
                                  &scratch.running[q * group + g], low, high};
    }
    meet_all<D>(scratch.lanes, count, scratch.unit, more || next ? &there : nullptr, half, shape);
    here = there;
  }
  for (int q = 0; q < queries; ++q)
    for (int64_t g = 0; g < group; ++g)
      finish<D>(scratch.running[q * group + g],
                out + ((item.row.first + item.begin + q) * shape.heads + item.head * group + g) * D);
}

}  // namespace galley
