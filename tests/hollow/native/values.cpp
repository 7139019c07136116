// True values where the host decides from them.
//
// Kernels compute nothing here, but the host reads some of what they would have written: lengths, positions, masks,
// counts, the scale of a loss. So every ATen kernel for CUDA is wrapped. Where all tensors of a call are small and
// integer or boolean, or floating-point with few elements, the CPU's kernel runs on the same memory, and its results
// stand where the card's would. The card's kernel is called as well, for the memory and the time that it takes.
// Results of any other call are hollow: integers and small floating-point results are zeros, larger ones are not
// written. What is true is known by address (hollow_is_true), and a result of hollow inputs is hollow.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/library.h>

#include <cstdio>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "laws.hpp"

extern "C" void hollow_fail_device();
extern "C" void hollow_plans_attention(int64_t workspace);

namespace {

using c10::CachingDeviceAllocator::TraceEntry;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

const int64_t MOST_INTEGER_BYTES = 16 << 20, MOST_BYTE_ELEMENTS = 64 << 10, MOST_FLOATS = 1024;
const int64_t MOST_RESULT_ELEMENTS = 16 << 20;
const size_t CLEARED_BYTES = MOST_FLOATS * sizeof(double);

// Their shapes follow from values: the card's kernel would read what no kernel has written.
const std::set<std::string> SHAPED_BY_VALUES = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::_unique",
    "aten::unique_dim_consecutive",
    "aten::bincount",
    "aten::repeat_interleave",
    "aten::equal",
};
// They mix bits to random numbers where the integers are many (the guard's sketches and roundings), and nothing is
// decided by those: what is hollow, or is shifted, is not computed.
const std::set<std::string> MIXING = {
    "aten::add",  "aten::bitwise_and",  "aten::__rshift__",   "aten::mul",  "aten::sub",
    "aten::add_", "aten::bitwise_and_", "aten::bitwise_xor_", "aten::mul_",
};
const std::set<std::string> ALLOCATIONS = {"aten::empty", "aten::empty_strided"};
const std::set<std::string> UNTOUCHED = {
    "aten::resize_",   "aten::set_",        "aten::record_stream",
    "aten::is_pinned", "aten::_pin_memory", "aten::_local_scalar_dense",
};

// ---- which addresses hold true values

std::mutex lock;
std::map<char*, char*> true_ranges;

struct Range {
  char *begin, *end;
};

Range range_of(const at::Tensor& t) {
  int64_t last = 1;
  for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
  char* at = (char*)t.const_data_ptr();
  return {at, at + (t.numel() ? last * (int64_t)t.element_size() : 0)};
}

void forget(Range range) {
  std::lock_guard<std::mutex> guard(lock);
  auto each = true_ranges.lower_bound(range.begin);
  if (each != true_ranges.begin() && std::prev(each)->second > range.begin) --each;
  while (each != true_ranges.end() && each->first < range.end) {
    Range had{each->first, each->second};
    each = true_ranges.erase(each);
    if (had.begin < range.begin) true_ranges[had.begin] = range.begin;
    if (had.end > range.end) true_ranges[range.end] = had.end;
  }
}

void remember(Range range) {
  forget(range);
  std::lock_guard<std::mutex> guard(lock);
  if (range.begin < range.end) true_ranges[range.begin] = range.end;
}

bool holds_truth(Range range) {
  std::lock_guard<std::mutex> guard(lock);
  auto each = true_ranges.upper_bound(range.begin);
  if (each != true_ranges.begin()) --each;
  for (char* at = range.begin; at < range.end; at = each->second, ++each)
    if (each == true_ranges.end() || each->first > at || each->second <= at) return false;
  return true;
}

// What a block held before is not true of what lies there next. Small blocks are cleared: no kernel of Triton's writes
// the loss that the host reads there. Inductor allocates without an operator, so the allocator is asked.
void watch_allocations() {
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const TraceEntry& event) {
    if (event.action_ != TraceEntry::ALLOC) return;
    char* at = (char*)event.addr_;
    forget({at, at + event.size_});
    if (event.size_ <= CLEARED_BYTES) memset(at, 0, event.size_);
  });
}

// ---- tensors

bool on_card(const at::Tensor& t) { return t.defined() && t.device().is_cuda() && t.has_storage(); }

bool is_small(const at::Tensor& t) {
  if (!t.defined()) return true;
  if (!t.has_storage() || t.layout() != at::kStrided || !(t.device().is_cuda() || t.device().is_cpu())) return false;
  if (t.is_complex() || t.is_quantized()) return false;
  auto type = t.scalar_type();
  if (at::isFloatingType(type)) return t.numel() <= MOST_FLOATS;
  if (type == at::kByte || type == at::kChar) return t.numel() <= MOST_BYTE_ELEMENTS;
  return t.numel() * (int64_t)t.element_size() <= MOST_INTEGER_BYTES;
}

// The same memory as a tensor of the CPU.
at::Tensor host_view(const at::Tensor& t) {
  if (!on_card(t)) return t;
  return at::from_blob((void*)t.const_data_ptr(), t.sizes(), t.strides(), at::TensorOptions(t.scalar_type()));
}

// Calls back with each tensor of an argument or result; lists are walked.
template <class Visit>
void each_tensor(const IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector()) visit(t);
  } else if (value.isOptionalTensorList()) {
    for (const auto& t : value.toOptionalTensorVector())
      if (t) visit(*t);
  }
}

// What broadcasting all of them would give, at most.
int64_t broadcast_elements(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> most;
  for (const at::Tensor& t : tensors) {
    most.resize(std::max<size_t>(most.size(), (size_t)t.dim()), 1);
    for (int64_t d = 0; d < t.dim(); d++) most[(size_t)d] = std::max(most[(size_t)d], t.size(t.dim() - 1 - d));
  }
  double product = 1;
  for (int64_t size : most) product *= (double)size;
  return product < 1e15 ? (int64_t)product : INT64_MAX;
}

// ---- the CPU's kernel in place of the card's

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

IValue on_host(const IValue& value, bool written) {
  auto host = [&](const at::Tensor& t) {
    if (!t.defined()) return t;
    return written ? host_view(t).clone() : host_view(t);
  };
  if (value.isTensor()) return host(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) list.push_back(host(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& t : value.toOptionalTensorVector()) list.push_back(t ? std::optional(host(*t)) : std::nullopt);
    return list;
  }
  if (value.isDevice()) return c10::Device(c10::kCPU);
  return value;
}

// A generator of our own: the user's draws the same numbers as without this.
IValue generator() {
  static at::Generator own = at::detail::createCPUGenerator(0);
  return own;
}

struct HostCall {
  std::vector<IValue> arguments;  // those that are written hold their results afterwards
  Stack results;
  bool done = false;
};

const DispatchKeySet ABOVE =
    c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
    DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PythonDispatcher,
                    DispatchKey::PreDispatch, DispatchKey::FuncTorchDynamicLayerFrontMode,
                    DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::Tracer});

HostCall call_on_host(const OperatorHandle& op, const std::vector<IValue>& given, bool is_true) {
  HostCall call;
  const auto& schema = op.schema();
  for (size_t i = 0; i < given.size(); i++) {
    const auto& argument = schema.arguments()[i];
    call.arguments.push_back(argument.name() == "generator" ? generator() : on_host(given[i], is_written(argument)));
  }
  call.results = Stack(call.arguments.begin(), call.arguments.end());
  try {
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &call.results);
    call.done = true;
  } catch (const c10::IndexError& error) {
    if (is_true) {  // an assertion of the card's kernel
      fprintf(stderr, "hollow GPU: %s: %s\n", op.operator_name().name.c_str(), error.what_without_backtrace());
      hollow_fail_device();
    }
  } catch (const c10::Error&) {  // the CPU has no such kernel for these types
  }
  return call;
}

void write_result(const at::Tensor& to, const at::Tensor& from, bool is_true) {
  if (!to.defined() || !from.defined() || to.sizes() != from.sizes()) return;
  bool finite = is_true || !at::isFloatingType(from.scalar_type());
  host_view(to).copy_(finite ? from : at::nan_to_num(from, 0, 0, 0));  // a logarithm of zeros that nobody computed
  if (!on_card(to)) return;
  if (is_true)
    remember(range_of(to));
  else
    forget(range_of(to));
}

// The card's result is kept where it has the right shape; else a new one takes its place.
at::Tensor settled(const at::Tensor& device, const at::Tensor& host, bool is_true) {
  if (!host.defined()) return device;
  at::Tensor out = device;
  if (!out.defined() || out.sizes() != host.sizes())
    out = at::empty_strided(host.sizes(), host.strides(), host.options().device(c10::kCUDA));
  write_result(out, host, is_true);
  return out;
}

IValue settled(const IValue& device, const IValue& host, bool is_true) {
  if (host.isTensor()) return settled(device.isTensor() ? device.toTensor() : at::Tensor(), host.toTensor(), is_true);
  if (!host.isTensorList()) return host;
  auto ours = host.toTensorVector();
  auto theirs = device.isTensorList() ? device.toTensorVector() : std::vector<at::Tensor>(ours.size());
  c10::List<at::Tensor> list;
  for (size_t i = 0; i < ours.size(); i++) list.push_back(settled(theirs[i], ours[i], is_true));
  return list;
}

void make_hollow(const at::Tensor& t) {
  if (!on_card(t)) return;
  Range range = range_of(t);
  forget(range);
  bool integer = at::isIntegralType(t.scalar_type(), /*includeBool=*/true);
  if (integer || t.numel() <= MOST_FLOATS)
    if (is_small(t)) memset(range.begin, 0, (size_t)(range.end - range.begin));
}

// ---- the workspace of cuDNN's attention

// Beside what cuDNN's frontend tells, a plan takes 256 bytes; backward, where keys have fewer heads than queries, also
// their and the values' gradients for each head. Measured on an H100 with cuDNN 9.19.
class PlannedAttention {
 public:
  PlannedAttention(const std::string& name, const std::vector<IValue>& given)
      : backward_(name == "aten::_cudnn_attention_backward"),
        planned_(backward_ || name == "aten::_cudnn_attention_forward") {
    if (planned_) hollow_plans_attention(256 + (backward_ ? for_each_head(given) : 0));
  }
  ~PlannedAttention() {
    if (planned_) hollow_plans_attention(0);
  }

 private:
  static int64_t for_each_head(const std::vector<IValue>& given) {
    at::Tensor query = given[1].toTensor(), key = given[2].toTensor(), value = given[3].toTensor();
    if (query.size(1) == key.size(1)) return 0;
    return query.size(0) * query.size(1) * key.size(2) * (key.size(3) + value.size(3)) * (int64_t)key.element_size();
  }

  bool backward_, planned_;
};

// ---- the wrapper of one kernel

class Wrapper : public c10::OperatorKernel {
 public:
  Wrapper(const OperatorHandle& op, c10::SafeKernelFunction original)
      : original_(std::move(original)),
        allocates_(ALLOCATIONS.count(op.operator_name().name) > 0),
        shaped_by_values_(SHAPED_BY_VALUES.count(op.operator_name().name) > 0),
        on_host_(!allocates_ && op.hasComputedKernelForDispatchKey(DispatchKey::CPU)) {}

  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const auto& schema = op.schema();
    size_t count = schema.arguments().size();
    std::vector<IValue> given(stack->end() - (std::ptrdiff_t)count, stack->end());
    bool is_true = true;
    HostCall host;
    c10::impl::ExcludeDispatchKeyGuard below(ABOVE);
    Timed timed(op, given);
    if (on_host_ && fits(schema, given, &is_true)) host = call_on_host(op, given, is_true);
    if (host.done && shaped_by_values_) {
      stack->resize(stack->size() - count);
      for (const IValue& result : host.results) stack->push_back(settled(IValue(), result, is_true));
      return;
    }
    PlannedAttention planned(schema.name(), given);
    original_.callBoxed(op, keys, stack);
    static std::once_flag once;
    if (allocates_) std::call_once(once, watch_allocations);  // the allocator stands since the first
    for (size_t i = 0; i < count; i++)
      if (is_written(schema.arguments()[i])) finish_written(schema, given[i], host, i, is_true);
    size_t returned = schema.returns().size();
    timed.done(Stack(stack->end() - (std::ptrdiff_t)returned, stack->end()));
    for (size_t i = 0; i < returned; i++) {
      if (schema.returns()[i].alias_info()) continue;
      IValue& result = (*stack)[stack->size() - returned + i];
      if (host.done)
        result = settled(result, host.results[i], is_true);
      else if (!allocates_)
        each_tensor(result, make_hollow);
    }
  }

 private:
  // Whether the CPU may compute it; and whether all that goes in is true.
  static bool fits(const c10::FunctionSchema& schema, const std::vector<IValue>& given, bool* is_true) {
    bool fits = true;
    std::vector<at::Tensor> tensors;
    for (size_t i = 0; i < given.size(); i++) {
      bool written_only = schema.arguments()[i].is_out();
      each_tensor(given[i], [&](const at::Tensor& t) {
        fits = fits && is_small(t);
        if (!t.defined() || !fits) return;
        if (!written_only && on_card(t) && !holds_truth(range_of(t)) && !overwrites(schema, i)) *is_true = false;
        if (!given[i].isTensorList()) tensors.push_back(t);
      });
    }
    return fits && broadcast_elements(tensors) <= MOST_RESULT_ELEMENTS && !mixes_many(schema.name(), tensors, *is_true);
  }

  static bool mixes_many(const std::string& name, const std::vector<at::Tensor>& given, bool is_true) {
    return !given.empty() && given[0].numel() > MOST_BYTE_ELEMENTS &&
           at::isIntegralType(given[0].scalar_type(), /*includeBool=*/false) && MIXING.count(name) &&
           (!is_true || name == "aten::__rshift__");
  }

  // In-place operators that do not read what they write to.
  static bool overwrites(const c10::FunctionSchema& schema, size_t i) {
    static const std::set<std::string> names = {"aten::copy_",   "aten::fill_",    "aten::zero_",     "aten::random_",
                                                "aten::normal_", "aten::uniform_", "aten::bernoulli_"};
    return i == 0 && names.count(schema.name());
  }

  static void finish_written(const c10::FunctionSchema& schema, const IValue& given, const HostCall& host, size_t i,
                             bool is_true) {
    const auto& argument = schema.arguments()[i];
    bool whole = overwrites(schema, i);
    std::vector<at::Tensor> results;
    if (host.done) each_tensor(host.arguments[i], [&](const at::Tensor& t) { results.push_back(t); });
    size_t next = 0;
    each_tensor(given, [&](const at::Tensor& t) {
      if (host.done)
        write_result(t, results[next++], is_true);
      else if (argument.is_out() || whole)
        make_hollow(t);
      else if (on_card(t))
        forget(range_of(t));
    });
  }

  c10::SafeKernelFunction original_;
  bool allocates_, shaped_by_values_, on_host_;
};

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

void wrap_all() {
  static torch::Library library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0 || UNTOUCHED.count(name.name) || is_view(op->schema())) continue;
    bool own = op->hasKernelForDispatchKey(DispatchKey::CUDA) || name.name == "aten::copy_";
    if (!own || !op->hasComputedKernelForDispatchKey(DispatchKey::CUDA)) continue;
    auto original = op->getComputedKernelForDispatchKey(DispatchKey::CUDA);
    auto wrapper = std::make_unique<Wrapper>(*op, original);
    std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(wrapper)));
  }
}

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

const bool wrapped = [] {
  Silent silent;  // that a kernel is registered anew is meant
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  wrap_all();
  return true;
}();

}  // namespace

// Whether these bytes of a card hold what a card's would; tests ask.
extern "C" __attribute__((visibility("default"))) bool hollow_is_true(void* address, size_t bytes) {
  return holds_truth({(char*)address, (char*)address + bytes});
}
