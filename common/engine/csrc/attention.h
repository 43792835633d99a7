// Causal attention of packed rows over a paged KV pool in bfloat16, on AVX-512 BF16.
//
// Keys and values are met in units of 64, counted from position 0, in the pair layout of VDPBF16PS: a few queries
// (decode) turn them in registers on the way, many turn a unit once for all that share its KV head. Softmax is
// online (Milakov and Gimelshein 2018; FlashAttention, Dao 2022). A query's result depends on its own position and
// keys alone: the same bits in a prompt, a chunk or a decode step, whatever the batch. Knows nothing of torch.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "product.h"

namespace galley {

constexpr int kUnit = 64;       // keys per step of the online softmax
constexpr int kQueries = 32;    // queries per tile
constexpr int kLanes = 16;      // floats per register
constexpr int kMostGroup = 16;  // query heads that share a KV head
constexpr float kSlack = 8;     // powers of two by which a weight may exceed 1
constexpr float kLog2E = 1.44269504f;

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

inline __m512 exp2_ps(__m512 x) {
  // 2^x = 2^floor(x) * a polynomial of degree 4, off by 3e-6 at most: bfloat16 keeps 4e-3. -inf gives 0.
  const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 y = _mm512_set1_ps(0.0134266843f);
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.0522424742f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.241280205f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.693044845f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(y, x);
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

// Where the keys of a unit are.
struct Places {
  const bf16* keys[kUnit + kLanes];
  int count = 0;

  // Positions [base, end) of a sequence, 64 at most; `pool` points at one layer's keys of (block 0, head 0).
  void find(const bf16* pool, const int32_t* table, int64_t base, int64_t end, int64_t head, int64_t dim,
            const Shape& shape) {
    const int64_t per_head = shape.layers * 2 * shape.block_size * dim;
    const int most = std::min<int64_t>(kUnit, end - base);
    const __m512i steps = _mm512_mullo_epi64(_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7), _mm512_set1_epi64(2 * dim));
    int64_t block = base / shape.block_size, slot = base % shape.block_size;
    // Eight pointers at a time; what is too many the next ones overwrite.
    for (count = 0; count < most; slot = 0, ++block) {
      const bf16* from = pool + (table[block] * shape.kv_heads + head) * per_head;
      for (; slot < shape.block_size && count < most; slot += 8) {
        _mm512_storeu_si512(keys + count, _mm512_add_epi64(all(from + slot * dim), steps));
        count += std::min<int64_t>(8, shape.block_size - slot);
      }
    }
    count = most;
    // Up to a multiple of 16 the last key stands in for those that are missing: hidden, hence of weight 0.
    for (int i = 0; i < kLanes; i += 8) _mm512_storeu_si512(keys + count + i, all(keys[count - 1]));
  }

  int groups() const { return (count + 15) / 16; }

 private:
  static __m512i all(const bf16* pointer) { return _mm512_set1_epi64(reinterpret_cast<int64_t>(pointer)); }
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

// The units of many items one after another, located and prefetched ahead of the computation. What is ahead is
// counted in groups of 16 keys: counted in units it would be next to nothing in a row's last unit, which may hold a
// single key. Prefetches are spread evenly over the computation, for bursts fill the queue of misses and stall it.
template <int D>
class Feed {
 public:
  Feed(const bf16* pool, const Item* items, int64_t count, const Shape& shape)
      : half(shape.block_size * D), pool_(pool), item_(items), last_(items + count), shape_(shape),
        base_(items->oldest(shape)) {
    locate();
    plan(kGroups);
    for (int group = 0; group < kGroups; ++group) {
      for (int part = 0; part < D; part += 32) ask_keys(group, part);
      for (int pair = 0; pair < 8; ++pair)
        for (int part = 0; part < D; part += 32) ask_values(group * 8 + pair, part);
    }
    plan(here().groups());
  }

  const int64_t half;  // elements from a key to its value

  const Places& here() const { return ring_[at_ % kRing]; }

  // Prefetch 32 dimensions of the keys that this group of the present unit is to ask for. Always inline, as GCC
  // drops calls of functions that do nothing but prefetch.
  [[gnu::always_inline]] void ask_keys(int group, int part) const {
    for (int i = 0; i < ahead_[group].count; ++i)
      _mm_prefetch((const char*)(ahead_[group].keys[i] + part), _MM_HINT_T0);
  }

  // The same for values, those of two keys.
  [[gnu::always_inline]] void ask_values(int pair, int part) const {
    const Group& group = ahead_[pair / 8];
    for (int i = pair % 8 * 2; i < std::min(pair % 8 * 2 + 2, group.count); ++i)
      _mm_prefetch((const char*)(group.keys[i] + half + part), _MM_HINT_T0);
  }

  void advance() {
    ++at_;
    if (at_ != made_ || locate()) plan(here().groups());
  }

 private:
  static constexpr int kGroups = kUnit / 16, kRing = 8;

  struct Group {
    const bf16* const* keys;
    int count;
  };

  void plan(int groups) {
    for (int i = 0; i < kGroups; ++i) ahead_[i] = i < groups ? next_group() : Group{nullptr, 0};
  }

  Group next_group() {
    if (group_ == newest().groups() && !locate()) return {nullptr, 0};
    const int first = 16 * group_++;
    return {newest().keys + first, std::min(16, newest().count - first)};
  }

  const Places& newest() const { return ring_[(made_ - 1) % kRing]; }

  bool locate() {
    if (item_ == last_ || made_ - at_ == kRing) return false;
    ring_[made_++ % kRing].find(pool_, item_->table, base_, item_->newest(), item_->head, D, shape_);
    group_ = 0;
    base_ += kUnit;
    if (base_ >= item_->newest() && ++item_ < last_) base_ = item_->oldest(shape_);
    return true;
  }

  const bf16* pool_;
  const Item *item_, *last_;
  const Shape& shape_;
  int64_t base_;
  Places ring_[kRing];
  Group ahead_[kGroups];
  unsigned at_ = 0, made_ = 0;
  int group_ = 0;
};

// 32 dimensions of the 16 keys at `keys`, in pairs: a register for two dimensions.
inline void load_keys(const bf16* const* keys, int64_t offset, __m512i (&rows)[16]) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) rows[i] = _mm512_loadu_si512(keys[i] + offset);
  transpose(rows);
}

// 32 dimensions of the values of two keys, in pairs. Unpacking leaves them out of order, see finish().
inline void load_values(const bf16* const* keys, int64_t offset, __m512i& low, __m512i& high) {
  const __m512i a = _mm512_loadu_si512(keys[0] + offset), b = _mm512_loadu_si512(keys[1] + offset);
  low = _mm512_unpacklo_epi16(a, b);
  high = _mm512_unpackhi_epi16(a, b);
}

// The keys and values of one unit as VDPBF16PS wants them, for tiles with many queries.
template <int D>
struct alignas(64) Unit {
  bf16 keys[D * kUnit];    // [D / 2][64][2]
  bf16 values[D * kUnit];  // [32 pairs of keys][D / 32][2 registers]

  void load(const Feed<D>& feed) {
    const Places& here = feed.here();
    for (int part = 0; part < D; part += 32) {
      for (int group = 0; group < here.count; group += 16) {
        __m512i rows[16];
        load_keys(here.keys + group, part, rows);
        feed.ask_keys(group / 16, part);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) _mm512_store_si512(keys + (part / 2 + i) * 2 * kUnit + group * 2, rows[i]);
      }
    }
    for (int key = 0; key < here.count; key += 2) {
#pragma GCC unroll 8
      for (int part = 0; part < D; part += 32) {
        __m512i low, high;
        load_values(here.keys + key, feed.half + part, low, high);
        feed.ask_values(key / 2, part);
        _mm512_store_si512(values + key * D + part * 2, low);
        _mm512_store_si512(values + key * D + part * 2 + 32, high);
      }
    }
  }
};

// What is known of one query head so far: weights are powers of two of scores above `base`.
template <int D>
struct alignas(64) Running {
  float sum[D];
  float weight[kLanes];  // to be summed up
  float base;

  void clear() {
    std::memset((void*)this, 0, sizeof *this);
    base = -std::numeric_limits<float>::infinity();
  }

  void rebase(float to) {
    const __m512 fade = exp2_ps(_mm512_set1_ps(base - to));
    for (int i = 0; i < D; i += kLanes) _mm512_store_ps(sum + i, _mm512_mul_ps(_mm512_load_ps(sum + i), fade));
    _mm512_store_ps(weight, _mm512_mul_ps(_mm512_load_ps(weight), fade));
    base = to;
  }
};

// One query head in one unit: only keys [low, high) of it are seen.
template <int D>
struct Lane {
  const bf16* query;
  Running<D>* run;
  int low, high;
};

// Products to weights. The base follows the largest score only where that has outrun it by 2^8: rarely after the
// first unit, so that the exponentials need not wait for the maximum.
template <int D>
inline void soften(__m512* s, bf16* weights, const Lane<D>& lane, const Shape& shape) {
  Running<D>& run = *lane.run;
  if (shape.softcap > 0)
    for (int i = 0; i < 4; ++i) s[i] = tanh_ps(_mm512_mul_ps(s[i], _mm512_set1_ps(shape.scaling / shape.softcap)));
  const __m512 scale = _mm512_set1_ps((shape.softcap > 0 ? shape.softcap : shape.scaling) * kLog2E);
  if (lane.low > 0 || lane.high < kUnit) {
    const uint64_t seen = (~uint64_t(0) >> (kUnit - lane.high)) & (~uint64_t(0) << lane.low);
    const __m512 hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) s[i] = _mm512_mask_mov_ps(hidden, __mmask16(seen >> (16 * i)), s[i]);
  }
  const __m512 top = _mm512_mul_ps(_mm512_max_ps(_mm512_max_ps(s[0], s[1]), _mm512_max_ps(s[2], s[3])), scale);
  if (_mm512_cmp_ps_mask(top, _mm512_set1_ps(run.base + kSlack), _CMP_GT_OQ)) [[unlikely]]
    run.rebase(_mm512_reduce_max_ps(top));
  const __m512 base = _mm512_set1_ps(run.base);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) s[i] = exp2_ps(_mm512_fmsub_ps(s[i], scale, base));
  const __m512 total = _mm512_add_ps(_mm512_add_ps(s[0], s[1]), _mm512_add_ps(s[2], s[3]));
  _mm512_store_ps(run.weight, _mm512_add_ps(_mm512_load_ps(run.weight), total));
  _mm512_store_si512(weights, (__m512i)_mm512_cvtne2ps_pbh(s[1], s[0]));
  _mm512_store_si512(weights + 32, (__m512i)_mm512_cvtne2ps_pbh(s[3], s[2]));
}

// Products of N queries with a unit's keys. Turned or not, each is one sum in ascending order of dimensions.
template <int D, int N, bool kTurned>
inline void score(const Lane<D>* lanes, const Feed<D>& feed, const Unit<D>& unit, __m512 (&s)[N][4]) {
#pragma GCC unroll 16
  for (int i = 0; i < N * 4; ++i) s[i / 4][i % 4] = _mm512_setzero_ps();
  if constexpr (kTurned) {
    for (int pair = 0; pair < D / 2; ++pair) {
      const bf16* keys = unit.keys + pair * 2 * kUnit;
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const __m512bh q = pair_at(lanes[n].query + 2 * pair);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) s[n][i] = _mm512_dpbf16_ps(s[n][i], q, as_bf16(_mm512_load_si512(keys + i * 32)));
      }
    }
  } else {
    const Places& here = feed.here();
    for (int part = 0; part < D; part += 32) {
      for (int group = 0; group < here.groups(); ++group) {
        __m512i rows[16];
        load_keys(here.keys + group * 16, part, rows);
        feed.ask_keys(group, part);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i)
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n)
            s[n][group] = _mm512_dpbf16_ps(s[n][group], pair_at(lanes[n].query + part + 2 * i), as_bf16(rows[i]));
      }
    }
  }
}

// Add the weighted values of key pairs [first, last) to the sums, kPart dimensions at a time: they stay in registers.
template <int D, int N, bool kTurned>
inline void add_values(const Lane<D>* lanes, const bf16 (&weights)[N][kUnit], const Feed<D>& feed,
                       const Unit<D>& unit, int first, int last) {
  const Places& here = feed.here();
  constexpr int kPart = D % 64 ? 32 : 64, kSums = kPart / kLanes;
  for (int part = 0; part < D; part += kPart) {
    __m512 sum[N][kSums];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int i = 0; i < kSums; ++i) sum[n][i] = _mm512_load_ps(lanes[n].run->sum + part + i * kLanes);
    for (int pair = first; pair < last; ++pair) {
      __m512i values[kSums];
#pragma GCC unroll 2
      for (int i = 0; i < kSums; i += 2) {
        if constexpr (kTurned) {
          const bf16* at = unit.values + pair * 2 * D + part * 2 + i * 32;
          values[i] = _mm512_load_si512(at), values[i + 1] = _mm512_load_si512(at + 32);
        } else {
          load_values(here.keys + 2 * pair, feed.half + part + i * 16, values[i], values[i + 1]);
          feed.ask_values(pair, part + i * 16);
        }
      }
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const __m512bh w = pair_at(weights[n] + 2 * pair);
#pragma GCC unroll 4
        for (int i = 0; i < kSums; ++i) sum[n][i] = _mm512_dpbf16_ps(sum[n][i], w, as_bf16(values[i]));
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int i = 0; i < kSums; ++i) _mm512_store_ps(lanes[n].run->sum + part + i * kLanes, sum[n][i]);
  }
}

// Take one unit into account for N queries at a time: their sums hide each other's latency.
template <int D, int N, bool kTurned>
inline void meet(const Lane<D>* lanes, const Feed<D>& feed, const Unit<D>& unit, const Shape& shape) {
  alignas(64) bf16 weights[N][kUnit];
  int low = kUnit, high = 0;
  __m512 s[N][4];
  score<D, N, kTurned>(lanes, feed, unit, s);
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    soften<D>(s[n], weights[n], lanes[n], shape);
    low = std::min(low, lanes[n].low), high = std::max(high, lanes[n].high);
  }
  add_values<D, N, kTurned>(lanes, weights, feed, unit, low / 2, (high + 1) / 2);
}

template <int D, bool kTurned>
inline void meet_up_to_4(const Lane<D>* lanes, int count, const Feed<D>& feed, const Unit<D>& unit,
                         const Shape& shape) {
  switch (count) {
    case 1: return meet<D, 1, kTurned>(lanes, feed, unit, shape);
    case 2: return meet<D, 2, kTurned>(lanes, feed, unit, shape);
    case 3: return meet<D, 3, kTurned>(lanes, feed, unit, shape);
    case 4: return meet<D, 4, kTurned>(lanes, feed, unit, shape);
  }
}

template <int D>
inline void meet_all(const Lane<D>* lanes, int count, const Feed<D>& feed, Unit<D>& unit, const Shape& shape) {
  if (count <= 4) return meet_up_to_4<D, false>(lanes, count, feed, unit, shape);
  unit.load(feed);
  for (; count > 0; count -= 4, lanes += 4) meet_up_to_4<D, true>(lanes, std::min(count, 4), feed, unit, shape);
}

// Divide by the weight, bring the dimensions back into order, round, store.
template <int D>
inline void finish(const Running<D>& run, bf16* out) {
  const __m512 scale = _mm512_set1_ps(1 / _mm512_reduce_add_ps(_mm512_load_ps(run.weight)));
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

// `feed` is at the item's first unit, and is left at the next item's.
template <int D>
void attend_tile(const bf16* query, const Item& item, Feed<D>& feed, const Shape& shape, bf16* out,
                 Scratch<D>& scratch) {
  const int64_t group = shape.heads / shape.kv_heads;
  const int queries = item.end - item.begin;
  for (int64_t i = 0; i < queries * group; ++i) scratch.running[i].clear();
  for (int base = item.oldest(shape); base < item.newest(); base += kUnit, feed.advance()) {
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
    meet_all<D>(scratch.lanes, count, feed, scratch.unit, shape);
  }
  for (int q = 0; q < queries; ++q)
    for (int64_t g = 0; g < group; ++g)
      finish<D>(scratch.running[q * group + g],
                out + ((item.row.first + item.begin + q) * shape.heads + item.head * group + g) * D);
}

}  // namespace galley
