// The CUDA runtime: devices, memory, streams, events and launches.
#include <cstdio>
#include <cstring>

#include "device.hpp"

using namespace hollow;

STAND_IN cudaError_t hollow_cudaGetDeviceCount(int* n) {
  *n = device_count();
  return device_count() ? cudaSuccess : set_error(cudaErrorNoDevice);
}
STAND_IN cudaError_t hollow_cudaGetDevice(int* d) {
  *d = current_device();
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaSetDevice(int d) {
  if (d < 0 || d >= device_count()) return set_error(cudaErrorInvalidDevice);
  current_device() = d;
  open_context(d);
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaDriverGetVersion(int* v) {
  *v = 13020;
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaRuntimeGetVersion(int* v) {
  *v = 13020;
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaGetLastError() { return take_error(true); }
STAND_IN cudaError_t hollow_cudaPeekAtLastError() { return take_error(false); }
STAND_IN const char* hollow_cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorAssert:
      return "cudaErrorAssert";
    case cudaErrorInvalidDeviceFunction:
      return "cudaErrorInvalidDeviceFunction";
    default:
      return "cudaErrorUnknown";
  }
}
STAND_IN const char* hollow_cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorAssert:
      return "device-side assert triggered";
    case cudaErrorInvalidDeviceFunction:
      return "invalid device function";
    default:
      return "unknown error";
  }
}
STAND_IN cudaError_t hollow_cudaDeviceGetPCIBusId(char* s, int n, int d) {
  snprintf(s, n, "00000000:%02X:00.0", card_of(d) + 1);
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaDeviceGetStreamPriorityRange(int* least, int* most) {
  if (least) *least = 0;
  if (most) *most = -5;
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaDeviceCanAccessPeer(int* yes, int, int) {
  *yes = 1;
  return cudaSuccess;
}

static int most_threads() {  // of a multiprocessor
  if (card().major == 7 && card().minor == 5) return 1024;
  return card().minor >= 6 || card().major >= 12 ? 1536 : 2048;
}

STAND_IN cudaError_t hollow_cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  load_values();
  if (d < 0 || d >= device_count()) return set_error(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", card().name.c_str());
  memcpy(p->uuid.bytes, uuid_of(d).data(), 16);
  p->totalGlobalMem = card().total_bytes;
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = card().major;
  p->minor = card().minor;
  p->multiProcessorCount = card().multiprocessors;
  p->concurrentKernels = 1;
  p->pciBusID = card_of(d) + 1;
  p->unifiedAddressing = 1;
  p->memoryBusWidth = 5120;
  p->l2CacheSize = (int)card().l2_bytes;
  p->maxThreadsPerMultiProcessor = most_threads();
  p->sharedMemPerMultiprocessor = card().shared_optin_bytes + 1024;
  p->regsPerMultiprocessor = 65536;
  p->managedMemory = 1;
  p->sharedMemPerBlockOptin = card().shared_optin_bytes;
  p->maxBlocksPerMultiProcessor = 32;
  p->reservedSharedMemPerBlock = 1024;
  p->cooperativeLaunch = 1;
  p->asyncEngineCount = 3;
  p->canMapHostMemory = 1;
  p->streamPrioritiesSupported = 1;
  return cudaSuccess;
}

// The runtime and the driver number attributes alike.
int hollow::attribute(int which, int d) {
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock:
      return 1024;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      return 1024;
    case cudaDevAttrMaxBlockDimZ:
      return 64;
    case cudaDevAttrMaxGridDimX:
      return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return (int)card().shared_optin_bytes;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return (int)card().shared_optin_bytes + 1024;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return 65536;
    case cudaDevAttrWarpSize:
      return 32;
    case cudaDevAttrMultiProcessorCount:
      return card().multiprocessors;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return most_threads();
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      return 32;
    case cudaDevAttrComputeCapabilityMajor:
      return card().major;
    case cudaDevAttrComputeCapabilityMinor:
      return card().minor;
    case cudaDevAttrL2CacheSize:
      return (int)card().l2_bytes;
    case cudaDevAttrClockRate:
      return 1755000;
    case cudaDevAttrMemoryClockRate:
      return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth:
      return 5120;
    case cudaDevAttrPciBusId:
      return card_of(d) + 1;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:  // for expandable segments
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrStreamPrioritiesSupported:
      return 1;
    default:
      return 0;
  }
}
STAND_IN cudaError_t hollow_cudaDeviceGetAttribute(int* v, int a, int d) {
  *v = attribute(a, d);
  return cudaSuccess;
}

static cudaError_t allocated(void** address, void* got, size_t bytes) {
  *address = got;
  return got || !bytes ? cudaSuccess : set_error(cudaErrorMemoryAllocation);
}
static cudaError_t freed(void* address) {
  return !address || release(address) ? cudaSuccess : set_error(cudaErrorInvalidValue);
}
STAND_IN cudaError_t hollow_cudaMalloc(void** p, size_t n) {
  load_values();
  return allocated(p, n ? allocate(n, current_device()) : nullptr, n);
}
STAND_IN cudaError_t hollow_cudaMallocAsync(void** p, size_t n, cudaStream_t) { return hollow_cudaMalloc(p, n); }
STAND_IN cudaError_t hollow_cudaFree(void* p) {
  synchronize();
  open_context(current_device());
  return freed(p);
}
STAND_IN cudaError_t hollow_cudaFreeAsync(void* p, cudaStream_t) { return freed(p); }
// Managed memory lies on the host: what a card would hold of it is not counted.
STAND_IN cudaError_t hollow_cudaMallocManaged(void** p, size_t n, unsigned) {
  return allocated(p, allocate_host(n), n);
}
STAND_IN cudaError_t hollow_cudaHostAlloc(void** p, size_t n, unsigned) { return allocated(p, allocate_host(n), n); }
STAND_IN cudaError_t hollow_cudaMallocHost(void** p, size_t n) { return allocated(p, allocate_host(n), n); }
STAND_IN cudaError_t hollow_cudaFreeHost(void* p) {
  return release_host(p) ? cudaSuccess : set_error(cudaErrorInvalidValue);
}
STAND_IN cudaError_t hollow_cudaMemGetInfo(size_t* free, size_t* total) {
  open_context(current_device());
  size_t used = used_bytes(card_of(current_device()));
  *total = card().total_bytes;
  *free = *total > used ? *total - used : 0;
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaHostGetDevicePointer(void** d, void* h, unsigned) {
  *d = h;
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  memset(a, 0, sizeof *a);
  a->device = current_device();
  if (is_on_device(p, &a->device)) {
    a->type = cudaMemoryTypeDevice;
    a->devicePointer = (void*)p;
  } else if (is_pinned(p)) {
    a->type = cudaMemoryTypeHost;
    a->hostPointer = a->devicePointer = (void*)p;
  } else {
    a->type = cudaMemoryTypeUnregistered;
  }
  return cudaSuccess;
}

// Small copies are made at once, whatever the stream; large ones take their time and move nothing.
static void move(void* to, const void* from, size_t n) {
  if (n && n <= copied_bytes() && to && from) memmove(to, from, n);
}
cudaError_t hollow::copy(void* to, const void* from, size_t n, bool waits) {
  if (device_failed()) return set_error(cudaErrorAssert);
  work(4e-6 + (double)n / 25e9);
  if (waits) synchronize();
  move(to, from, n);
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaMemcpy(void* to, const void* from, size_t n, int) { return copy(to, from, n, true); }
STAND_IN cudaError_t hollow_cudaMemcpyAsync(void* to, const void* from, size_t n, int kind, cudaStream_t) {
  if (kind != cudaMemcpyDeviceToDevice && !(is_on_device(to) && is_on_device(from)))
    return copy(to, from, n, kind == cudaMemcpyDeviceToHost);
  work(2e-6 + 2 * (double)n / card().bytes_per_second);
  move(to, from, n);
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                              size_t width, size_t height, int, cudaStream_t) {
  work(4e-6 + (double)(width * height) / 25e9);
  if (width * height <= copied_bytes())
    for (size_t i = 0; i < height; i++) memmove((char*)to + i * to_pitch, (const char*)from + i * from_pitch, width);
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, cudaStream_t) {
  work(5e-6 + (double)n / 2e11);
  move(to, from, n);
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaMemset(void* p, int value, size_t n) {
  fill(p, value, n);
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t) {
  return hollow_cudaMemset(p, value, n);
}
STAND_IN cudaError_t hollow_cudaDeviceGetDefaultMemPool(void** pool, int) {
  *pool = (void*)0x10;
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaMemPoolGetAttribute(void*, int, void* v) {
  *(unsigned long long*)v = 0;
  return cudaSuccess;
}
STAND_IN cudaError_t hollow_cudaGetSymbolAddress(void** p, const void*) {
  static char room[1 << 20];
  *p = room;
  return cudaSuccess;
}
