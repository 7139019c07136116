// NVML: what nvidia-smi shows, whatever CUDA_VISIBLE_DEVICES says.
#include <nvml.h>

#include <cstdio>
#include <cstring>

#include "device.hpp"

using namespace hollow;

static nvmlDevice_t handle_of(int device) { return (nvmlDevice_t)(size_t)(0x200 + device); }
static int index_of(nvmlDevice_t d) { return (int)((size_t)d - 0x200); }

STAND_IN nvmlReturn_t hollow_nvmlDeviceGetCount_v2(unsigned* n) {
  *n = card_count();
  return NVML_SUCCESS;
}
STAND_IN nvmlReturn_t hollow_nvmlDeviceGetHandleByIndex_v2(unsigned i, nvmlDevice_t* d) {
  if ((int)i >= card_count()) return NVML_ERROR_INVALID_ARGUMENT;
  *d = handle_of((int)i);
  return NVML_SUCCESS;
}
STAND_IN nvmlReturn_t hollow_nvmlDeviceGetHandleByUUID(const char* u, nvmlDevice_t* d) {
  for (int i = 0; i < card_count(); i++)
    if (uuid_text_of(i) == u) {
      *d = handle_of((int)i);
      return NVML_SUCCESS;
    }
  return NVML_ERROR_NOT_FOUND;
}
STAND_IN nvmlReturn_t hollow_nvmlDeviceGetHandleByPciBusId_v2(const char* s, nvmlDevice_t* d) {
  int bus = 1;
  sscanf(s, "%*x:%x", &bus);
  *d = handle_of(bus - 1);
  return NVML_SUCCESS;
}
STAND_IN nvmlReturn_t hollow_nvmlDeviceGetUUID(nvmlDevice_t d, char* s, unsigned n) {
  snprintf(s, n, "%s", uuid_text_of(index_of(d)).c_str());
  return NVML_SUCCESS;
}
STAND_IN nvmlReturn_t hollow_nvmlDeviceGetIndex(nvmlDevice_t d, unsigned* i) {
  *i = index_of(d);
  return NVML_SUCCESS;
}
STAND_IN nvmlReturn_t hollow_nvmlDeviceGetName(nvmlDevice_t, char* s, unsigned n) {
  snprintf(s, n, "%s", card().name.c_str());
  return NVML_SUCCESS;
}
STAND_IN nvmlReturn_t hollow_nvmlDeviceGetMemoryInfo(nvmlDevice_t d, nvmlMemory_t* m) {
  m->total = card().total_bytes;
  m->used = used_bytes(index_of(d));
  m->free = m->total > m->used ? m->total - m->used : 0;
  return NVML_SUCCESS;
}
STAND_IN nvmlReturn_t hollow_nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t d, nvmlMemory_v2_t* m) {
  m->total = card().total_bytes;
  m->reserved = 0;
  m->used = used_bytes(index_of(d));
  m->free = m->total > m->used ? m->total - m->used : 0;
  return NVML_SUCCESS;
}
STAND_IN nvmlReturn_t hollow_nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t d, unsigned* n,
                                                                     nvmlProcessInfo_t* out) {
  const int most = 64;
  int pids[most];
  size_t bytes[most];
  unsigned room = *n;
  *n = (unsigned)processes(index_of(d), pids, bytes, most);
  for (unsigned i = 0; out && i < room && i < *n && i < most; i++) {
    memset(&out[i], 0, sizeof *out);
    out[i].pid = (unsigned)pids[i];
    out[i].usedGpuMemory = bytes[i];
  }
  return *n > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}
STAND_IN nvmlReturn_t hollow_nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t, unsigned* n, nvmlProcessInfo_t*) {
  *n = 0;
  return NVML_SUCCESS;
}
STAND_IN nvmlReturn_t hollow_nvmlSystemGetDriverVersion(char* s, unsigned n) {
  snprintf(s, n, "590.00");
  return NVML_SUCCESS;
}
STAND_IN nvmlReturn_t hollow_nvmlSystemGetCudaDriverVersion_v2(int* v) {
  *v = 13020;
  return NVML_SUCCESS;
}
STAND_IN nvmlReturn_t hollow_nvmlDeviceGetCudaComputeCapability(nvmlDevice_t, int* a, int* b) {
  *a = card().major;
  *b = card().minor;
  return NVML_SUCCESS;
}
STAND_IN nvmlReturn_t hollow_nvmlDeviceGetUtilizationRates(nvmlDevice_t, nvmlUtilization_t* u) {
  u->gpu = u->memory = 0;
  return NVML_SUCCESS;
}
STAND_IN nvmlReturn_t hollow_nvmlDeviceGetMigMode(nvmlDevice_t, unsigned* a, unsigned* b) {
  *a = *b = 0;
  return NVML_SUCCESS;
}
STAND_IN nvmlReturn_t hollow_nvmlDeviceGetComputeMode(nvmlDevice_t, int* m) {
  *m = 0;
  return NVML_SUCCESS;
}
STAND_IN nvmlReturn_t hollow_nvmlDeviceGetTemperature(nvmlDevice_t, int, unsigned* t) {
  *t = 40;
  return NVML_SUCCESS;
}
STAND_IN nvmlReturn_t hollow_nvmlDeviceGetPowerUsage(nvmlDevice_t, unsigned* p) {
  *p = 100000;
  return NVML_SUCCESS;
}
STAND_IN const char* hollow_nvmlErrorString(int) { return "hollow"; }
