// The time of PyTorch's own kernels on the emulated card, by the laws that `autofit estimate` uses.
//
// HOLLOW_LAWS  a Python file whose `seconds(text)` tells them (tests/hollow/clock.py); it is asked once for each shape.
//              Without it all kernels take the rough rule of device.cpp, as those outside of ATen always do.
#include "laws.hpp"

#include <dlfcn.h>

#include <cmath>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <unordered_map>

extern "C" int hollow_clocked();
extern "C" void hollow_suspend_clock(bool suspended);
extern "C" bool hollow_multiplied_in_tf32();  // since the clock was suspended
extern "C" void hollow_work(double seconds);

namespace {

using c10::IValue;

// ---- an operator's call as JSON

void write(std::ostream& out, const at::Tensor& t) {
  if (!t.defined() || t.layout() != at::kStrided) {
    out << "null";
    return;
  }
  out << "{\"dtype\":\"" << c10::toString(t.scalar_type()) << "\",\"sizes\":[" << c10::Join(",", t.sizes())
      << "],\"strides\":[" << c10::Join(",", t.strides()) << "]}";
}

void write(std::ostream& out, int64_t value) { out << value; }
void write(std::ostream& out, const std::optional<at::Tensor>& t) { write(out, t.value_or(at::Tensor())); }
void write(std::ostream& out, const c10::SymInt& value) { out << value.guard_int(__FILE__, __LINE__); }

void write(std::ostream& out, const IValue& value);

template <class Values>
void write_list(std::ostream& out, const Values& values) {
  out << '[';
  for (size_t i = 0; i < values.size(); i++) {
    if (i) out << ',';
    write(out, values[i]);
  }
  out << ']';
}

void write(std::ostream& out, const IValue& value) {
  if (value.isTensor())
    write(out, value.toTensor());
  else if (value.isBool())
    out << (value.toBool() ? "true" : "false");
  else if (value.isInt())
    out << value.toInt();
  else if (value.isSymInt())
    write(out, value.toSymInt());
  else if (value.isDouble() && std::isfinite(value.toDouble()))
    out << value.toDouble();
  else if (value.isTensorList())
    write_list(out, value.toTensorVector());
  else if (value.isOptionalTensorList())
    write_list(out, value.toOptionalTensorVector());
  else if (value.isIntList())
    write_list(out, value.toIntVector());
  else if (value.isSymIntList())
    write_list(out, value.toSymIntVector());
  else if (value.isDoubleList() || value.isBoolList())
    write_list(out, value.toListRef());
  else
    out << "null";
}

// ---- Python, which this library is not linked with

template <class Function>
Function python(const char* name) {
  static_assert(std::is_pointer_v<Function>);
  auto found = (Function)dlsym(RTLD_DEFAULT, name);
  TORCH_CHECK(found, "HOLLOW_LAWS is set, and this process has no Python: ", name);
  return found;
}

double asked(const std::string& text) {
  static auto acquire = python<int (*)()>("PyGILState_Ensure");
  static auto release = python<void (*)(int)>("PyGILState_Release");
  static auto run = python<int (*)(const char*)>("PyRun_SimpleString");
  static auto import = python<void* (*)(const char*)>("PyImport_ImportModule");
  static auto call = python<void* (*)(void*, const char*, const char*, ...)>("PyObject_CallMethod");
  static auto number = python<double (*)(void*)>("PyFloat_AsDouble");
  static auto drop = python<void (*)(void*)>("Py_DecRef");
  static auto print = python<void (*)()>("PyErr_Print");
  static bool loaded = false;
  int state = acquire();
  // a program that is being compiled would have the clock compiled, too
  void* frames = import("torch._C._dynamo.eval_frame");
  void* compiles = frames ? call(frames, "set_eval_frame", "O", dlsym(RTLD_DEFAULT, "_Py_NoneStruct")) : nullptr;
  if (!loaded) {
    std::string load = std::string("import importlib.util as _u, sys as _s\n_p = _u.spec_from_file_location('hollow_clock', '") +
                       getenv("HOLLOW_LAWS") +
                       "')\n_s.modules['hollow_clock'] = _m = _u.module_from_spec(_p)\n_p.loader.exec_module(_m)\ndel _u, _s, _p, _m\n";
    loaded = run(load.c_str()) == 0;
  }
  void* module = loaded ? import("hollow_clock") : nullptr;
  void* answer = module ? call(module, "seconds", "s", text.c_str()) : nullptr;
  double seconds = answer ? number(answer) : -1;
  if (!answer) print();
  for (void* held : {answer, module}) drop(held);
  if (compiles) drop(call(frames, "set_eval_frame", "O", compiles));
  for (void* held : {compiles, frames}) drop(held);
  release(state);
  TORCH_CHECK(seconds >= 0, "hollow GPU: no law tells the time of ", text);
  return seconds;
}

double seconds_of(const std::string& text) {
  static std::mutex lock;  // not held while Python runs
  static std::unordered_map<std::string, double> known;
  {
    std::lock_guard<std::mutex> guard(lock);
    auto found = known.find(text);
    if (found != known.end()) return found->second;
  }
  double seconds = asked(text);
  std::lock_guard<std::mutex> guard(lock);
  return known[text] = seconds;
}

thread_local int depth;

// What goes over the bus takes the time of its copy.
bool stays_on_card(const IValue& value) {
  auto stays = [](const at::Tensor& t) { return !t.defined() || t.device().is_cuda() || t.dim() == 0; };
  if (value.isTensor()) return stays(value.toTensor());
  if (value.isTensorList())
    for (const at::Tensor& t : value.toTensorVector())
      if (!stays(t)) return false;
  return true;
}

}  // namespace

Timed::Timed(const c10::OperatorHandle& op, const std::vector<IValue>& given)
    : op_(op), given_(given), outermost_(depth++ == 0), by_laws_(false) {
  static bool wanted = getenv("HOLLOW_LAWS") && hollow_clocked();
  if (!outermost_ || !wanted) return;
  by_laws_ = true;
  for (const IValue& value : given) by_laws_ = by_laws_ && stays_on_card(value);
  if (by_laws_) hollow_suspend_clock(true);
}

Timed::~Timed() {
  depth--;
  if (by_laws_) hollow_suspend_clock(false);
}

void Timed::done(const torch::jit::Stack& results) {
  if (!by_laws_) return;
  std::ostringstream text;
  const auto& name = op_.operator_name();
  text << "{\"op\":\"" << name.name << "\",\"overload\":\"" << name.overload_name << "\",\"tf32\":"
       << (hollow_multiplied_in_tf32() ? "true" : "false") << ",\"arguments\":";
  write_list(text, given_);
  text << ",\"results\":";
  write_list(text, results);
  text << '}';
  hollow_suspend_clock(false);
  by_laws_ = false;
  hollow_work(seconds_of(text.str()));
}
