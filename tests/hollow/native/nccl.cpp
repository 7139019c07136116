// NCCL: communicators that know their size. Collectives take their time; every rank is taken to hold what this one
// holds.
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "device.hpp"

using namespace hollow;

struct Comm {
  int ranks, rank, device;
};
STAND_IN int hollow_ncclGetVersion(int* v) {
  *v = 23007;
  return 0;
}
STAND_IN int hollow_ncclGetUniqueId(char* id) {
  memset(id, 0, 128);
  snprintf(id, 128, "hollow-%d-%zu", getpid(), (size_t)new_handle());
  return 0;
}
struct UniqueId {
  char bytes[128];
};
STAND_IN int hollow_ncclCommInitRank(void** c, int n, UniqueId, int r) {
  *c = new Comm{n, r, current_device()};
  return 0;
}
STAND_IN int hollow_ncclCommInitRankConfig(void** c, int n, UniqueId, int r, void*) {
  *c = new Comm{n, r, current_device()};
  return 0;
}
STAND_IN int hollow_ncclCommInitRankScalable(void** c, int n, int r, int, void*, void*) {
  *c = new Comm{n, r, current_device()};
  return 0;
}
STAND_IN int hollow_ncclCommSplit(void* c, int, int key, void** out, void*) {
  *out = new Comm{((Comm*)c)->ranks, key, ((Comm*)c)->device};
  return 0;
}
STAND_IN int hollow_ncclCommCount(void* c, int* n) {
  *n = ((Comm*)c)->ranks;
  return 0;
}
STAND_IN int hollow_ncclCommUserRank(void* c, int* n) {
  *n = ((Comm*)c)->rank;
  return 0;
}
STAND_IN int hollow_ncclCommGetAsyncError(void*, int* e) {
  *e = 0;
  return 0;
}
STAND_IN const char* hollow_ncclGetErrorString(int) { return "hollow"; }
STAND_IN const char* hollow_ncclGetLastError(void*) { return ""; }
static const double LINK = 3e11;  // bytes a second between cards
static size_t nccl_size(int t) {
  static const size_t s[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return t >= 0 && t < 12 ? s[t] : 4;
}
STAND_IN int hollow_ncclAllReduce(const void* s, void* d, size_t n, int t, int, void*, void*) {
  if (s != d && n * nccl_size(t) <= copied_bytes()) memmove(d, s, n * nccl_size(t));
  work(1e-5 + 2.0 * n * nccl_size(t) / LINK);
  return 0;
}
STAND_IN int hollow_ncclAllGather(const void* s, void* d, size_t n, int t, void* c, void*) {
  size_t bytes = n * nccl_size(t);
  if (bytes <= copied_bytes())
    for (int r = 0; r < ((Comm*)c)->ranks; r++) memmove((char*)d + r * bytes, s, bytes);
  work(1e-5 + (double)n * nccl_size(t) * ((Comm*)c)->ranks / LINK);
  return 0;
}
STAND_IN int hollow_ncclReduceScatter(const void*, void*, size_t n, int t, int, void* c, void*) {
  work(1e-5 + (double)n * nccl_size(t) * ((Comm*)c)->ranks / LINK);
  return 0;
}
STAND_IN int hollow_ncclBroadcast(const void* s, void* d, size_t n, int t, int, void*, void*) {
  if (s != d && n * nccl_size(t) <= copied_bytes()) memmove(d, s, n * nccl_size(t));
  work(1e-5 + (double)n * nccl_size(t) / LINK);
  return 0;
}
