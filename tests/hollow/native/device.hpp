// The emulated cards as the stand-ins of all libraries see them: memory that is counted, and a clock.
//
// A function of CUDA named `cudaMalloc` is defined as `hollow_cudaMalloc`; build.py makes the library that carries the
// real name and jumps here. So these sources never clash with the declarations in NVIDIA's headers.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#define STAND_IN extern "C" __attribute__((visibility("default")))

namespace hollow {

// One card, from the project's catalogue of cards (tests/hollow/cards.py writes HOLLOW_CARD). Rates are FLOP/s, dense.
struct Card {
  std::string name;
  size_t total_bytes;
  int major, minor, multiprocessors;
  double fp32, tf32, half, fp8, bytes_per_second;
  size_t shared_optin_bytes, l2_bytes;
};

const int MAX_DEVICES = 16;

// Devices are what this process sees: CUDA_VISIBLE_DEVICES, cards by their number or the beginning of their uuid.
const Card& card();
int card_count();
int device_count();
int card_of(int device);
std::string uuid_of(int device);     // 16 bytes
std::string uuid_text_of(int card);  // GPU-...
int& current_device();            // of this thread
size_t copied_bytes();            // larger copies take their time and move nothing
void open_context(int device);    // the first call of a process on a card takes the context's memory
bool has_context(int device);

// Memory of a card, in pages of 2 MiB, counted over all processes. Addresses are those of host memory.
void* allocate(size_t bytes, int device);  // nullptr: the card is full
bool release(void* address);               // false: no such allocation
bool take(size_t bytes, int device);       // counts memory that has no address (cuMemCreate)
void give(size_t bytes, int device);
size_t used_bytes(int card);
char* map_pages(size_t bytes);      // zeros that take no memory before they are written
void* allocate_host(size_t bytes);  // pinned memory, real
bool release_host(void* address);
void* reserve_addresses(size_t bytes);
void release_addresses(void* address, size_t bytes);
bool is_on_device(const void* address, int* device = nullptr);
bool is_pinned(const void* address);
void fill(void* address, int value, size_t bytes);

// The processes that hold memory of a card; the number of them, of which `room` at most are written down.
int processes(int card, int* pids, size_t* bytes, int room);

// When a process started, in ticks; 0: it is gone. A zombie has given its memory back.
long long start_of(int pid);

// The device's clock: work is queued behind what runs, and a synchronization waits for it.
double now();
void wait_until(double then);
void work(double seconds);
double busy_until();
void synchronize();
void kernel(double blocks, double threads);
void product(double m, double n, double k, double batch, double flops_per_second);
double rate_of(int cuda_type, bool tf32);  // FLOP/s of matrix products of a cudaDataType
void begin_capture();
void* end_capture();  // a graph: the seconds of the work captured
void* capturing();
double graph_seconds(void* graph);

cudaError_t set_error(cudaError_t error);  // remembered for cudaGetLastError, of this thread
cudaError_t take_error(bool clear);
void fail_device();  // an assertion of a kernel failed: every later call of this process says so
bool device_failed();

int attribute(int which, int device);  // cudaDeviceAttr, CUdevice_attribute
cudaError_t copy(void* to, const void* from, size_t bytes, bool waits);
void* driver_symbol(const char* name);
void* new_handle();
void load_values();  // loads values.cpp once PyTorch is there

}  // namespace hollow
