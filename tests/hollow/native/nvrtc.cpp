// The compiler of kernels that PyTorch writes at run time (erfinv and others, in some versions): what it makes is a
// kernel like all others here.
#include <cstddef>

#include "device.hpp"

STAND_IN int hollow_nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return 0;
}
static int one_byte(size_t* size) {
  *size = 1;
  return 0;
}
STAND_IN int hollow_nvrtcGetProgramLogSize(void*, size_t* size) { return one_byte(size); }
STAND_IN int hollow_nvrtcGetPTXSize(void*, size_t* size) { return one_byte(size); }
STAND_IN int hollow_nvrtcGetCUBINSize(void*, size_t* size) { return one_byte(size); }
STAND_IN int hollow_nvrtcGetLoweredName(void*, const char* name, const char** lowered) {
  *lowered = name;
  return 0;
}
