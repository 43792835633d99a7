// The operator torch.ops.galley.draw: tokens for the rows of a step.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <memory>
#include <vector>

#include "sampling.h"

namespace {

// logits float32 [rows, vocab] and a value per row of everything else; answers a token per row, -1 for a row whose
// logits are not numbers or all -inf.
std::vector<int64_t> draw(const at::Tensor& logits, at::ArrayRef<double> temperatures, at::IntArrayRef keys,
                          at::IntArrayRef top_k, at::ArrayRef<double> top_p, at::ArrayRef<double> min_p) {
  TORCH_CHECK(logits.scalar_type() == at::kFloat && logits.device().is_cpu() && logits.dim() == 2 &&
                  logits.stride(1) == 1,
              "logits must be float32 [rows, vocab] on the CPU, each row contiguous");
  const size_t rows = logits.size(0);
  TORCH_CHECK(temperatures.size() == rows && keys.size() == rows && top_k.size() == rows && top_p.size() == rows &&
                  min_p.size() == rows,
              "there must be a value for each of ", rows, " rows");
  const int64_t vocab = logits.size(1), stride = logits.stride(0);
  const float* first_row = logits.const_data_ptr<float>();
  std::vector<int64_t> tokens(rows);
  at::parallel_for(0, rows, 1, [&](int64_t first, int64_t last) {
    const auto scratch = std::make_unique_for_overwrite<float[]>(2 * (vocab + galley::kLanes));
    for (int64_t row = first; row < last; ++row)
      tokens[row] = galley::draw(first_row + row * stride, vocab, static_cast<float>(temperatures[row]), keys[row],
                                 {top_k[row], top_p[row], min_p[row]}, scratch.get());
  });
  return tokens;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(galley, library) {
  library.def("draw(Tensor logits, float[] temperatures, int[] keys, int[] top_k, float[] top_p, float[] min_p) -> int[]");
  library.impl("draw", c10::DispatchKey::CPU, draw);
}
