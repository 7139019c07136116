// The CUDA runtime: streams, events, graphs, launches. All streams of a card are one queue.
#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <iterator>
#include <set>
#include <unordered_map>

#include "device.hpp"

using namespace hollow;

STAND_IN cudaError_t hollow_cudaStreamCreate(void** s) {
  *s = new_handle();
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaStreamCreateWithFlags(void** s, unsigned) { return hollow_cudaStreamCreate(s); }
STAND_IN cudaError_t hollow_cudaStreamCreateWithPriority(void** s, unsigned, int) { return hollow_cudaStreamCreate(s); }
STAND_IN cudaError_t hollow_cudaStreamGetPriority(cudaStream_t, int* p) {
  *p = 0;
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaStreamIsCapturing(cudaStream_t, int* status) {
  *status = capturing() != nullptr;
  return cudaSuccess;
}
static unsigned long long captures;
STAND_IN cudaError_t hollow_cudaStreamGetCaptureInfo(cudaStream_t, int* status, unsigned long long* id, void** graph,
                                                     void**, void**, size_t* edges) {
  *status = capturing() != nullptr;
  if (id) *id = captures;
  if (graph) *graph = capturing();
  if (edges) *edges = 0;
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaStreamBeginCapture(cudaStream_t, int) {
  synchronize();
  captures++;
  begin_capture();
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaStreamEndCapture(cudaStream_t, void** graph) {
  *graph = end_capture();
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaGraphInstantiate(void** e, void* g, unsigned long long) {
  *e = g;
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaGraphInstantiateWithFlags(void** e, void* g, unsigned long long) {
  *e = g;
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaGraphLaunch(void* e, cudaStream_t) {
  work(1e-5 + graph_seconds(e));
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaGraphGetNodes(void*, void**, size_t* n) {
  *n = 1;
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaStreamSynchronize(cudaStream_t) {
  synchronize();
  return device_failed() ? set_error(cudaErrorAssert) : cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaDeviceSynchronize() { return hollow_cudaStreamSynchronize(nullptr); }
STAND_IN cudaError_t hollow_cudaStreamQuery(cudaStream_t) {
  return now() >= busy_until() ? cudaSuccess : cudaErrorNotReady;
}
struct Event {
  double at;
};
STAND_IN cudaError_t hollow_cudaEventCreate(void** e) {
  *e = new Event{0};
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaEventCreateWithFlags(void** e, unsigned) { return hollow_cudaEventCreate(e); }
STAND_IN cudaError_t hollow_cudaEventDestroy(void* e) {
  delete (Event*)e;
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaEventRecord(void* e, cudaStream_t) {
  double t = now();
  ((Event*)e)->at = busy_until() > t ? busy_until() : t;
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaEventRecordWithFlags(void* e, cudaStream_t s, unsigned) {
  return hollow_cudaEventRecord(e, s);
}
STAND_IN cudaError_t hollow_cudaEventQuery(void* e) {
  return now() >= ((Event*)e)->at ? cudaSuccess : cudaErrorNotReady;
}
STAND_IN cudaError_t hollow_cudaEventSynchronize(void* e) {
  wait_until(((Event*)e)->at);
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaEventElapsedTime(float* ms, void* a, void* b) {
  *ms = (float)((((Event*)b)->at - ((Event*)a)->at) * 1e3);
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaLaunchHostFunc(cudaStream_t, void (*f)(void*), void* a) {
  synchronize();
  f(a);
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaStreamAddCallback(cudaStream_t s, void (*f)(cudaStream_t, cudaError_t, void*), void* a,
                                                  unsigned) {
  synchronize();
  f(s, cudaSuccess, a);
  return cudaSuccess;
}
struct Config {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
static thread_local Config pushed;
STAND_IN unsigned hollow___cudaPushCallConfiguration(dim3 g, dim3 b, size_t s, void* st) {
  pushed = {g, b, s, st};
  return 0;
}
STAND_IN cudaError_t hollow___cudaPopCallConfiguration(dim3* g, dim3* b, size_t* s, void* st) {
  *g = pushed.grid;
  *b = pushed.block;
  *s = pushed.shared;
  *(void**)st = pushed.stream;
  return cudaSuccess;
}
static cudaError_t launched(dim3 grid, dim3 block) {
  if (device_failed()) return set_error(cudaErrorAssert);
  kernel((double)grid.x * grid.y * grid.z, (double)block.x * block.y * block.z);
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaLaunchKernel(const void*, dim3 g, dim3 b, void**, size_t, cudaStream_t) {
  return launched(g, b);
}
STAND_IN cudaError_t hollow___cudaLaunchKernel(void*, dim3 g, dim3 b, void**, size_t, cudaStream_t) {
  return launched(g, b);
}
STAND_IN cudaError_t hollow_cudaLaunchCooperativeKernel(const void*, dim3 g, dim3 b, void**, size_t, cudaStream_t) {
  return launched(g, b);
}
STAND_IN cudaError_t hollow_cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void*, void**) {
  return launched(c->gridDim, c->blockDim);
}
STAND_IN cudaError_t hollow___cudaGetKernel(void** k, const void* f) {
  *k = (void*)f;
  return cudaSuccess;
}

// The kernels of a library come as an archive with one entry for each architecture it was compiled for.
struct Fatbin {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;
};
struct FatbinEntry {
  uint16_t kind, flags;
  uint32_t header_bytes;
  uint64_t bytes;
  uint32_t compressed_bytes, reserved;
  uint16_t minor, major;
  uint32_t architecture;
};
using Architectures = std::set<int>;
static std::unordered_map<const void*, Architectures*>& kernels() {
  static std::unordered_map<const void*, Architectures*> all;
  return all;
}
STAND_IN void** hollow___cudaRegisterFatBinary(void* wrapper) {
  auto* found = new Architectures;
  auto* archive = *(Fatbin**)((char*)wrapper + 8);
  if (!archive || archive->magic != 0xBA55ED50) return (void**)found;
  char* at = (char*)archive + archive->header_bytes;
  for (char* end = at + archive->bytes; at + sizeof(FatbinEntry) <= end;) {
    auto* entry = (FatbinEntry*)at;
    found->insert((int)entry->architecture);
    if (!entry->header_bytes) break;
    at += entry->header_bytes + entry->bytes;
  }
  return (void**)found;
}
STAND_IN void hollow___cudaRegisterFunction(void** library, const char* function, char*, const char*, int, void*, void*,
                                            void*, void*, int*) {
  kernels()[function] = (Architectures*)library;
}
// The kernel that runs is that of the newest architecture which is not newer than the card: CUB refuses any other.
STAND_IN cudaError_t hollow_cudaFuncGetAttributes(cudaFuncAttributes* a, const void* function) {
  int architecture = card().major * 10 + card().minor;
  auto found = kernels().find(function);
  if (found != kernels().end()) {
    auto above = found->second->upper_bound(architecture);
    if (above == found->second->begin()) return set_error(cudaErrorInvalidDeviceFunction);
    architecture = *std::prev(above);
  }
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->binaryVersion = a->ptxVersion = architecture;
  a->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) {
  *n = 2;
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t,
                                                                                   unsigned) {
  *n = 2;
  return cudaSuccess;
}
void* hollow::driver_symbol(const char* name) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  return driver ? dlsym(driver, name) : nullptr;
}
STAND_IN cudaError_t hollow_cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long,
                                                             int* status) {
  std::string v2 = std::string(name) + "_v2";
  *f = driver_symbol(v2.c_str());
  if (!*f) *f = driver_symbol(name);
  if (status) *status = *f ? 0 : 1;
  return *f ? cudaSuccess : set_error(cudaErrorSymbolNotFound);
}
STAND_IN cudaError_t hollow_cudaGetDriverEntryPoint(const char* name, void** f, unsigned long long fl, int* s) {
  return hollow_cudaGetDriverEntryPointByVersion(name, f, 0, fl, s);
}
