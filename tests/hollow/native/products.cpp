// cuBLAS, cuDNN and their like: handles, and the time of matrix products.
#include <cstdint>
#include <cstring>

#include "device.hpp"

using namespace hollow;

static int give_handle(void** p) {
  *p = new_handle();
  return 0;
}
STAND_IN int hollow_cublasCreate_v2(void** p) { return give_handle(p); }
STAND_IN int hollow_cublasLtCreate(void** p) { return give_handle(p); }
STAND_IN int hollow_cublasLtMatmulPreferenceCreate(void** p) { return give_handle(p); }
STAND_IN int hollow_cudnnCreate(void** p) { return give_handle(p); }
STAND_IN int hollow_cusolverDnCreate(void** p) { return give_handle(p); }
STAND_IN int hollow_cusparseCreate(void** p) { return give_handle(p); }
STAND_IN int hollow_curandCreateGenerator(void** p) { return give_handle(p); }

static thread_local int math_mode;
static bool tf32() { return (math_mode & 3) == 3; }  // CUBLAS_TF32_TENSOR_OP_MATH
STAND_IN int hollow_cublasGetMathMode(void*, int* m) {
  *m = math_mode;
  return 0;
}
STAND_IN int hollow_cublasSetMathMode(void*, int m) {
  math_mode = m;
  return 0;
}
STAND_IN int hollow_cublasGetPointerMode_v2(void*, int* m) {
  *m = 0;
  return 0;
}
STAND_IN size_t hollow_cublasLtGetVersion() { return 130200; }
STAND_IN size_t hollow_cudnnGetVersion() { return 92600; }
STAND_IN int hollow_cudnnGetProperty(int which, int* value) {
  const int version[] = {9, 26, 0};
  *value = version[which];
  return 0;
}
STAND_IN size_t hollow_cudnnGetCudartVersion() { return 13020; }
STAND_IN const char* hollow_cudnnGetErrorString(int) { return "hollow"; }
// cuDNN's planner knows one engine for each graph, which needs no workspace, but for attention: values.cpp tells it.
// By the numbers of cudnn_graph.h.
const int KNOB_CHOICES = 302, CONFIG_WORKSPACE = 303, SHARED_MEMORY = 304, WORKSPACE_SIZE = 402, NUMERICAL_NOTE = 1303,
          BEHAVIOR_NOTE = 1305;
static thread_local int64_t plan_workspace;
STAND_IN void hollow_plans_attention(int64_t workspace) { plan_workspace = workspace; }
STAND_IN int hollow_cudnnBackendCreateDescriptor(int, void** d) { return give_handle(d); }
STAND_IN int hollow_cudnnBackendGetAttribute(void*, int name, int, int64_t, int64_t* count, void* found) {
  bool none = name == KNOB_CHOICES || name == NUMERICAL_NOTE || name == BEHAVIOR_NOTE;
  if (count) *count = none ? 0 : 1;
  if ((name == WORKSPACE_SIZE || name == CONFIG_WORKSPACE) && found) *(int64_t*)found = plan_workspace;
  if (name == SHARED_MEMORY && found) *(int32_t*)found = 0;
  return 0;
}
static int no_bytes(size_t* bytes) {
  *bytes = 0;
  return 0;
}
STAND_IN int hollow_cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    void*, int, int, void*, void*, void*, void*, void*, size_t* bytes) {
  return no_bytes(bytes);
}
STAND_IN int hollow_cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    void*, int, int, void*, void*, void*, void*, void*, void*, void*, size_t* bytes) {
  return no_bytes(bytes);
}
STAND_IN int hollow_cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void*, int, int, void*, void*, size_t* bytes) {
  return no_bytes(bytes);
}
STAND_IN int hollow_cudnnGetCTCLossWorkspaceSize(
    void*, void*, void*, const int*, const int*, const int*, int, void*, size_t* bytes) {
  return no_bytes(bytes);
}
STAND_IN int hollow_cudnnGetCTCLossWorkspaceSize_v8(void*, int, void*, void*, void*, size_t* bytes) {
  return no_bytes(bytes);
}
// how it lays out the weights of recurrent layers is not known
STAND_IN int hollow_cudnnGetRNNWeightSpaceSize(void*, void*, size_t*) { return 3000; }  // CUDNN_STATUS_NOT_SUPPORTED
// cuSOLVER's singular values: without a workspace, whose size nobody here knows, and at once; they converge.
#define SINGULAR_VALUES(type)                                                                                       \
  STAND_IN int hollow_cusolverDn##type##gesvdj_bufferSize(void*, int, int, int, int, const void*, int, const void*, \
                                                          const void*, int, const void*, int, int* count, void*) {  \
    *count = 0;                                                                                                     \
    return 0;                                                                                                       \
  }
SINGULAR_VALUES(S)
SINGULAR_VALUES(D)
// cuBLASLt, by the numbers of its header.
const int COMPUTE_32F_FAST_TF32 = 77, LAYOUT_BATCH_COUNT = 5;
struct Layout {
  int type;
  uint64_t rows, cols;
  int64_t ld;
  int batch;
};
STAND_IN int hollow_cublasLtMatrixLayoutCreate(void** l, int type, uint64_t rows, uint64_t cols, int64_t ld) {
  *l = new Layout{type, rows, cols, ld, 1};
  return 0;
}
STAND_IN int hollow_cublasLtMatrixLayoutSetAttribute(void* l, int a, const void* v, size_t) {
  if (a == LAYOUT_BATCH_COUNT) ((Layout*)l)->batch = *(const int*)v;
  return 0;
}
STAND_IN int hollow_cublasLtMatrixLayoutDestroy(void* l) {
  delete (Layout*)l;
  return 0;
}
struct Product {
  int compute;
};
STAND_IN int hollow_cublasLtMatmulDescCreate(void** d, int compute, int) {
  *d = new Product{compute};
  return 0;
}
STAND_IN int hollow_cublasLtMatmulDescDestroy(void* d) {
  delete (Product*)d;
  return 0;
}
struct Heuristic {
  uint64_t algo[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
STAND_IN int hollow_cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int wanted,
                                                   Heuristic* out, int* found) {
  int n = wanted > 0 ? 1 : 0;
  if (n) memset(out, 0, sizeof *out);
  *found = n;
  return 0;
}
STAND_IN int hollow_cublasLtMatmul(void*, void* P, const void*, const void*, void* A, const void*, void*, const void*,
                                   const void*, void*, void*, void* D, const void*, void*, size_t, void*) {
  auto* a = (Layout*)A;
  auto* d = (Layout*)D;
  if (a && d && d->rows)
    product(d->rows, d->cols, (double)a->rows * a->cols / d->rows, d->batch,
            rate_of(a->type, P && ((Product*)P)->compute == COMPUTE_32F_FAST_TF32));
  return 0;
}
STAND_IN int hollow_cublasSgemm_v2(void*, int, int, int m, int n, int k, const void*, const void*, int, const void*,
                                   int, const void*, void*, int) {
  product(m, n, k, 1, rate_of(0, tf32()));
  return 0;
}
STAND_IN int hollow_cublasSgemmEx(void*, int, int, int m, int n, int k, const void*, const void*, int t, int,
                                  const void*, int, int, const void*, void*, int, int) {
  product(m, n, k, 1, rate_of(t, tf32()));
  return 0;
}
STAND_IN int hollow_cublasGemmEx(void*, int, int, int m, int n, int k, const void*, const void*, int t, int,
                                 const void*, int, int, const void*, void*, int, int, int, int) {
  product(m, n, k, 1, rate_of(t, tf32()));
  return 0;
}
STAND_IN int hollow_cublasSgemmStridedBatched(void*, int, int, int m, int n, int k, const void*, const void*, int,
                                              long long, const void*, int, long long, const void*, void*, int,
                                              long long, int b) {
  product(m, n, k, b, rate_of(0, tf32()));
  return 0;
}
STAND_IN int hollow_cublasGemmStridedBatchedEx(void*, int, int, int m, int n, int k, const void*, const void*, int t,
                                               int, long long, const void*, int, int, long long, const void*, void*,
                                               int, int, long long, int b, int, int) {
  product(m, n, k, b, rate_of(t, tf32()));
  return 0;
}
