// Somebody else's backend: its all-reduce doubles, its broadcast does nothing. It shows that what torch has never heard of is seen.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <pybind11/chrono.h>

namespace {

struct Done : c10d::Work {
  using c10d::Work::Work;
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
};

class Doubling : public c10d::Backend {
 public:
  Doubling(int rank, int size) : Backend(rank, size) {}

  const std::string getBackendName() const override { return "doubling"; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions&) override {
    for (auto& tensor : tensors) tensor.mul_(2);
    return c10::make_intrusive<Done>(getRank(), c10d::OpType::ALLREDUCE);
  }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>&, const c10d::BroadcastOptions&) override {
    return c10::make_intrusive<Done>(getRank(), c10d::OpType::BROADCAST);
  }
};

c10::intrusive_ptr<c10d::Backend> create(
    const c10::intrusive_ptr<c10d::Store>&, int rank, int size, const std::chrono::duration<float>&) {
  return c10::make_intrusive<Doubling>(rank, size);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("create", &create);
}
