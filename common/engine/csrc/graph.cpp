// The class torch.classes.galley.Graph: a model compiled by AOTInductor, run without Python's lock.
//
// torch's own Python binding of the loader keeps the lock for a whole step, so that the event loop would stand
// still meanwhile: no beats, no frames.

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/custom_class.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace {

class Graph : public torch::CustomClassHolder {
 public:
  explicit Graph(const std::string& path) : loader_(path, "model", /*run_single_threaded=*/true) {}

  std::vector<std::string> constants() { return loader_.get_constant_fqns(); }

  // Use these tensors for the constants, all of them, without a copy.
  void use(const c10::Dict<std::string, at::Tensor>& tensors) {
    std::unordered_map<std::string, at::Tensor> named;
    for (const auto& entry : tensors) named.emplace(entry.key(), entry.value());
    loader_.load_constants(named, /*use_inactive=*/false, /*check_full_update=*/true, /*user_managed=*/true);
  }

  at::Tensor run(std::vector<at::Tensor> inputs) { return loader_.boxed_run(std::move(inputs)).at(0); }

 private:
  torch::inductor::AOTIModelPackageLoader loader_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(galley, library) {
  library.class_<Graph>("Graph")
      .def(torch::init<std::string>())
      .def("constants", [](const c10::intrusive_ptr<Graph>& self) { return self->constants(); })
      .def("use", [](const c10::intrusive_ptr<Graph>& self, const c10::Dict<std::string, at::Tensor>& tensors) {
        self->use(tensors);
      })
      .def("run", [](const c10::intrusive_ptr<Graph>& self, std::vector<at::Tensor> inputs) {
        return self->run(std::move(inputs));
      });
}
