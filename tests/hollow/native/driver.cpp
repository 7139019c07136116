// The CUDA driver, which Triton and expandable segments call.
#include <sys/mman.h>

#include <cstdio>
#include <cstring>

#include "device.hpp"

using namespace hollow;

static CUcontext context_of(int device) { return (CUcontext)(size_t)(0x100 + device); }
static int device_of(CUcontext context) { return (int)((size_t)context - 0x100); }

STAND_IN CUresult hollow_cuInit(unsigned) { return device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
STAND_IN CUresult hollow_cuDriverGetVersion(int* v) {
  *v = 13020;
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuDeviceGetCount(int* n) {
  *n = device_count();
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuDeviceGet(CUdevice* d, int i) {
  *d = i;
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuDeviceGetName(char* s, int n, CUdevice) {
  snprintf(s, n, "%s", card().name.c_str());
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuDeviceGetAttribute(int* v, int a, CUdevice d) {
  *v = attribute(a, d);
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuDeviceTotalMem_v2(size_t* n, CUdevice) {
  *n = card().total_bytes;
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuDeviceGetUuid(CUuuid* u, CUdevice d) {
  memcpy(u->bytes, uuid_of(d).data(), 16);
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuDeviceGetUuid_v2(CUuuid* u, CUdevice d) {
  memcpy(u->bytes, uuid_of(d).data(), 16);
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuDevicePrimaryCtxGetState(CUdevice d, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = has_context(d);
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice d) {
  open_context(d);
  *c = context_of(d);
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuCtxGetCurrent(CUcontext* c) {
  *c = has_context(current_device()) ? context_of(current_device()) : nullptr;
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuCtxSetCurrent(CUcontext c) {
  if (c) current_device() = device_of(c);
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuCtxPushCurrent_v2(CUcontext c) {
  if (c) current_device() = device_of(c);
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuCtxPopCurrent_v2(CUcontext* c) {
  if (c) *c = context_of(current_device());
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuCtxGetDevice(CUdevice* d) {
  *d = current_device();
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuMemGetInfo_v2(size_t* free, size_t* total) {
  size_t used = used_bytes(card_of(current_device()));
  *total = card().total_bytes;
  *free = *total > used ? *total - used : 0;
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuMemAlloc_v2(CUdeviceptr* p, size_t n) {
  *p = (CUdeviceptr)allocate(n, current_device());
  return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
STAND_IN CUresult hollow_cuMemFree_v2(CUdeviceptr p) {
  return release((void*)p) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
STAND_IN CUresult hollow_cuGetErrorString(CUresult e, const char** s) {
  *s = e == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : e ? "unknown error" : "no error";
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuGetErrorName(CUresult e, const char** s) {
  *s = e ? "CUDA_ERROR_UNKNOWN" : "CUDA_SUCCESS";
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuGetProcAddress_v2(const char* name, void** f, int, cuuint64_t,
                                             CUdriverProcAddressQueryResult* status) {
  std::string v2 = std::string(name) + "_v2";
  *f = driver_symbol(v2.c_str());
  if (!*f) *f = driver_symbol(name);
  if (status) *status = *f ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *f ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
STAND_IN CUresult hollow_cuGetProcAddress(const char* name, void** f, int v, cuuint64_t fl) {
  return hollow_cuGetProcAddress_v2(name, f, v, fl, nullptr);
}
STAND_IN CUresult hollow_cuPointerGetAttribute(void* v, int which, CUdeviceptr p) {
  int device = current_device();
  bool found = is_on_device((void*)p, &device);
  switch (which) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      if (!found) return CUDA_ERROR_INVALID_VALUE;
      *(unsigned*)v = CU_MEMORYTYPE_DEVICE;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      *(CUdeviceptr*)v = p;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *(int*)v = device;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *(CUcontext*)v = context_of(device);
      return CUDA_SUCCESS;
    default:
      *(int*)v = 0;
      return CUDA_SUCCESS;
  }
}

// Expandable segments: addresses are reserved at once, memory is counted as it is created.
struct Physical {
  size_t bytes;
  int device;
};
STAND_IN CUresult hollow_cuMemGetAllocationGranularity(size_t* n, const CUmemAllocationProp*, int) {
  *n = 2u << 20;
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuMemAddressReserve(CUdeviceptr* p, size_t n, size_t, CUdeviceptr, unsigned long long) {
  *p = (CUdeviceptr)reserve_addresses(n);
  return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
STAND_IN CUresult hollow_cuMemAddressFree(CUdeviceptr p, size_t n) {
  release_addresses((void*)p, n);
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuMemCreate(CUmemGenericAllocationHandle* h, size_t n, const CUmemAllocationProp* properties,
                                     unsigned long long) {
  int device = properties ? properties->location.id : current_device();
  if (!take(n, device)) return CUDA_ERROR_OUT_OF_MEMORY;
  *h = (CUmemGenericAllocationHandle) new Physical{n, device};
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuMemRelease(CUmemGenericAllocationHandle h) {
  auto* physical = (Physical*)h;
  give(physical->bytes, physical->device);
  delete physical;
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuMemUnmap(CUdeviceptr p, size_t n) {
  madvise((void*)p, n, MADV_DONTNEED);
  return CUDA_SUCCESS;
}

static CUresult handle_out(void** p) {
  *p = new_handle();
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuModuleLoadData(void** m, const void*) { return handle_out(m); }
STAND_IN CUresult hollow_cuModuleLoadDataEx(void** m, const void*, unsigned, void*, void*) { return handle_out(m); }
STAND_IN CUresult hollow_cuModuleLoad(void** m, const char*) { return handle_out(m); }
STAND_IN CUresult hollow_cuModuleGetFunction(void** f, void*, const char*) { return handle_out(f); }
STAND_IN CUresult hollow_cuLibraryLoadData(void** m, const void*, void*, void*, unsigned, void*, void*, unsigned) {
  return handle_out(m);
}
STAND_IN CUresult hollow_cuLibraryGetKernel(void** k, void*, const char*) { return handle_out(k); }
STAND_IN CUresult hollow_cuKernelGetFunction(void** f, void* k) {
  *f = k;
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuFuncGetAttribute(int* v, int a, void*) {
  *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, void*, int, size_t) {
  *n = 2;
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuOccupancyMaxActiveClusters(int* n, void*, void*) {
  *n = 8;
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuLaunchKernel(void*, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                        unsigned bz, unsigned, void*, void**, void**) {
  kernel((double)gx * gy * gz, (double)bx * by * bz);
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuLaunchKernelEx(const CUlaunchConfig* c, void*, void**, void**) {
  kernel((double)c->gridDimX * c->gridDimY * c->gridDimZ, (double)c->blockDimX * c->blockDimY * c->blockDimZ);
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuStreamCreate(void** s, unsigned) { return handle_out(s); }
STAND_IN CUresult hollow_cuStreamSynchronize(void*) {
  synchronize();
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuCtxSynchronize() {
  synchronize();
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuMemcpyHtoD_v2(CUdeviceptr d, const void* s, size_t n) {
  copy((void*)d, s, n, true);
  return CUDA_SUCCESS;
}
STAND_IN CUresult hollow_cuMemcpyDtoH_v2(void* d, CUdeviceptr s, size_t n) {
  copy(d, (void*)s, n, true);
  return CUDA_SUCCESS;
}
