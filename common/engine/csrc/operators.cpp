// The operators torch.ops.galley.{pack,linear,attend}: borders between tensors and the kernels beside this file.
//
// They check shapes and cut work for torch's threads. `attend` writes into its pool, and its schema does not say
// so on purpose: in a compiled graph every layer depends on the one before, so the order is sure, and torch would
// copy the pool for a mutation that it knew of.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <vector>

#include "attention.h"
#include "product.h"

namespace {

using at::Tensor;
using galley::bf16;

constexpr size_t kHugePage = size_t(2) << 20;
constexpr int64_t kPanelsPerTask = 4;

const bf16* bits(const Tensor& tensor) { return static_cast<const bf16*>(tensor.const_data_ptr()); }
bf16* writable(const Tensor& tensor) { return static_cast<bf16*>(tensor.mutable_data_ptr()); }

void check_bfloat16(const Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == at::kBFloat16 && tensor.device().is_cpu(), name, " must be bfloat16 on the CPU");
}

// weight [n, k] to [panels, k / 2, 32, 2], in huge pages where the system has them, followed by room that
// prefetches may touch.
Tensor pack(const Tensor& weight) {
  check_bfloat16(weight, "weight");
  TORCH_CHECK(weight.dim() == 2 && weight.size(1) % 2 == 0, "weight must be [n, k] with an even k");
  const int64_t n = weight.size(0), pairs = weight.size(1) / 2, panels = (n + galley::kPanel - 1) / galley::kPanel;
  const size_t bytes = panels * pairs * galley::kPanelPair;
  const size_t room = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* memory = std::aligned_alloc(kHugePage, room);
  TORCH_CHECK(memory, "no memory for a packed weight of ", bytes, " bytes");
  madvise(memory, room, MADV_HUGEPAGE);
  std::memset(memory, 0, bytes);
  const Tensor source = weight.contiguous();
  galley::pack(bits(source), n, pairs, static_cast<bf16*>(memory));
  return at::from_blob(memory, {panels, pairs, galley::kPanel, 2}, [](void* p) { std::free(p); },
                       at::TensorOptions(at::kBFloat16));
}

// x [..., k] with a packed weight of n outputs; bias float32 [panels * 32]. The sums are float32, and rounded to
// bfloat16 unless `unrounded`.
Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t n, bool unrounded) {
  check_bfloat16(x, "x");
  const Tensor input = x.contiguous();
  check_bfloat16(packed, "packed");
  TORCH_CHECK(packed.dim() == 4 && packed.size(2) == galley::kPanel && packed.is_contiguous(), "packed must be packed");
  const int64_t panels = packed.size(0), pairs = packed.size(1), k = 2 * pairs;
  TORCH_CHECK(input.size(-1) == k, "x has ", input.size(-1), " inputs, the weight ", k);
  TORCH_CHECK(n > 0 && (n + galley::kPanel - 1) / galley::kPanel == panels, "no weight of ", n, " outputs");
  TORCH_CHECK(!bias || (bias->scalar_type() == at::kFloat && bias->numel() == panels * galley::kPanel &&
                        bias->is_contiguous()),
              "bias must be float32 [", panels * galley::kPanel, "]");
  auto shape = input.sizes().vec();
  shape.back() = n;
  Tensor out = at::empty(shape, input.options().dtype(unrounded ? at::kFloat : at::kBFloat16));
  const float* biases = bias ? bias->const_data_ptr<float>() : nullptr;
  const int64_t rows = input.numel() / k;
  const auto fill = [&](auto* sums) {
    at::parallel_for(0, panels, kPanelsPerTask, [&](int64_t first, int64_t last) {
      galley::multiply(bits(input), rows, bits(packed), pairs, biases, sums, n, first, last);
    });
  };
  if (unrounded)
    fill(out.mutable_data_ptr<float>());
  else
    fill(writable(out));
  return out;
}

struct Step {
  const galley::Row* rows;
  int64_t count;
  const int32_t* tables;
};

// The kernels trust these numbers with memory.
void check_operands(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& pool, const Tensor& rows,
                    const Tensor& tables, int64_t layer) {
  check_bfloat16(query, "query");
  check_bfloat16(key, "key");
  check_bfloat16(value, "value");
  check_bfloat16(pool, "pool");
  TORCH_CHECK(query.dim() == 3 && key.dim() == 3, "query and key must be [heads, tokens, head_dim]");
  const int64_t heads = query.size(0), tokens = query.size(1), dim = query.size(2), kv_heads = key.size(0);
  TORCH_CHECK(key.size(1) == tokens && key.size(2) == dim, "key must be [kv_heads, ", tokens, ", ", dim, "]");
  TORCH_CHECK(value.sizes() == key.sizes(), "value must be as key is");
  TORCH_CHECK(query.stride(2) == 1 && key.stride(2) == 1 && value.stride(2) == 1, "head_dim must be contiguous");
  TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, heads, " heads cannot share keys of ", kv_heads);
  TORCH_CHECK(heads <= kv_heads * galley::kMostGroup, "more than ", galley::kMostGroup, " heads share keys");
  TORCH_CHECK(pool.dim() == 6 && pool.size(1) == kv_heads && pool.size(3) == 2 && pool.size(5) == dim &&
                  pool.is_contiguous(),
              "pool must be [blocks, ", kv_heads, ", layers, 2, block_size, ", dim, "]");
  TORCH_CHECK(layer >= 0 && layer < pool.size(2), "the pool has no layer ", layer);
  TORCH_CHECK(rows.scalar_type() == at::kInt && rows.dim() == 2 && rows.size(1) == 3 && rows.is_contiguous(),
              "rows must be int32 [rows, 3]");
  TORCH_CHECK(tables.scalar_type() == at::kInt && tables.dim() == 2 && tables.size(0) == rows.size(0) &&
                  tables.is_contiguous(),
              "tables must be int32 [", rows.size(0), ", blocks]");
}

void check_rows(const Step& step, int64_t tokens, int64_t blocks, const galley::Shape& shape) {
  for (int64_t r = 0; r < step.count; ++r) {
    const int64_t first = step.rows[r].first, count = step.rows[r].count, start = step.rows[r].start;
    TORCH_CHECK(first >= 0 && count >= 0 && start >= 0 && first + count <= tokens &&
                    start + count <= shape.width * shape.block_size,
                "row ", r, " is not within the step: ", first, ", ", count, ", ", start);
    const int32_t* table = step.tables + r * shape.width;
    const int64_t used = count ? (start + count + shape.block_size - 1) / shape.block_size : 0;
    for (int64_t i = 0; i < used; ++i) TORCH_CHECK(table[i] >= 0 && table[i] < blocks, "no block ", table[i]);
  }
}

void write_kv(const Tensor& key, const Tensor& value, bf16* pool, const Step& step, const galley::Shape& shape,
              int64_t dim) {
  const int64_t half = shape.block_size * dim, per_head = shape.layers * 2 * half;
  for (int64_t r = 0; r < step.count; ++r) {
    const galley::Row& row = step.rows[r];
    for (int64_t t = 0; t < row.count; ++t) {
      const int64_t position = row.start + t, block = step.tables[r * shape.width + position / shape.block_size];
      bf16* slot = pool + block * shape.kv_heads * per_head + position % shape.block_size * dim;
      for (int64_t head = 0; head < shape.kv_heads; ++head) {
        const int64_t token = row.first + t;
        bf16* to = slot + head * per_head;
        std::memcpy(to, bits(key) + head * key.stride(0) + token * key.stride(1), dim * sizeof(bf16));
        std::memcpy(to + half, bits(value) + head * value.stride(0) + token * value.stride(1), dim * sizeof(bf16));
      }
    }
  }
}

template <int D>
void attend_all(const bf16* query, const bf16* pool, const Step& step, const galley::Shape& shape, bf16* out) {
  std::vector<galley::Item> items;
  for (int64_t r = 0; r < step.count; ++r)
    for (int begin = 0; begin < step.rows[r].count; begin += galley::kQueries)
      for (int64_t head = 0; head < shape.kv_heads; ++head)
        items.push_back({step.tables + r * shape.width, step.rows[r], begin,
                         std::min(begin + galley::kQueries, step.rows[r].count), head});
  at::parallel_for(0, items.size(), 1, [&](int64_t first, int64_t last) {
    const auto scratch = std::make_unique_for_overwrite<galley::Scratch<D>>();
    galley::Feed<D> feed(pool, &items[first], last - first, shape);
    for (int64_t i = first; i < last; ++i) galley::attend_tile<D>(query, items[i], feed, shape, out, *scratch);
  });
}

// query [heads, tokens, d], key and value [kv_heads, tokens, d], pool [blocks, kv_heads, layers, 2, block_size, d],
// rows int32 [rows, 3] (first packed token, tokens, position of the first), tables int32 [rows, blocks];
// answers [tokens, heads, d]. Tokens of no row get zeros.
Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& pool, const Tensor& rows,
              const Tensor& tables, int64_t layer, double scaling, int64_t window, double softcap) {
  check_operands(query, key, value, pool, rows, tables, layer);
  const int64_t heads = query.size(0), tokens = query.size(1), dim = query.size(2), block_size = pool.size(4);
  TORCH_CHECK(scaling > 0 && softcap >= 0, "scaling must be positive, softcap not negative");
  const galley::Shape shape{heads, key.size(0), pool.size(2), block_size, tables.size(1), query.stride(1),
                            query.stride(0), static_cast<float>(scaling), static_cast<float>(softcap), window};
  const Step step{reinterpret_cast<const galley::Row*>(rows.const_data_ptr<int32_t>()), rows.size(0),
                  tables.const_data_ptr<int32_t>()};
  check_rows(step, tokens, pool.size(0), shape);
  bf16* layer_pool = static_cast<bf16*>(pool.data_ptr()) + layer * 2 * block_size * dim;
  write_kv(key, value, layer_pool, step, shape, dim);
  Tensor out = at::zeros({tokens, heads, dim}, query.options());
  switch (dim) {
    case 32: attend_all<32>(bits(query), layer_pool, step, shape, writable(out)); break;
    case 64: attend_all<64>(bits(query), layer_pool, step, shape, writable(out)); break;
    case 96: attend_all<96>(bits(query), layer_pool, step, shape, writable(out)); break;
    case 128: attend_all<128>(bits(query), layer_pool, step, shape, writable(out)); break;
    case 256: attend_all<256>(bits(query), layer_pool, step, shape, writable(out)); break;
    default: TORCH_CHECK(false, "head_dim ", dim, " is not 32, 64, 96, 128 or 256");
  }
  return out;
}

}  // namespace

TORCH_LIBRARY(galley, library) {
  library.def("pack(Tensor weight) -> Tensor");
  library.def("linear(Tensor x, Tensor packed, Tensor? bias, int n, bool unrounded) -> Tensor");
  library.def(
      "attend(Tensor query, Tensor key, Tensor value, Tensor pool, Tensor rows, Tensor tables, int layer, "
      "float scaling, int window, float softcap) -> Tensor");
  library.impl("pack", c10::DispatchKey::CPU, pack);
  library.impl("linear", c10::DispatchKey::CPU, linear);
  library.impl("attend", c10::DispatchKey::CPU, attend);
}
