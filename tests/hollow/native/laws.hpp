// The time of PyTorch's own kernels: see laws.cpp.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

// While one is alive, what its thread launches takes no time of its own: `done` adds what the whole operator takes.
// Operators that an operator calls count with it.
class Timed {
 public:
  Timed(const c10::OperatorHandle& op, const std::vector<c10::IValue>& given);
  ~Timed();
  void done(const torch::jit::Stack& results);

 private:
  const c10::OperatorHandle& op_;
  const std::vector<c10::IValue>& given_;
  bool outermost_, by_laws_;
};
