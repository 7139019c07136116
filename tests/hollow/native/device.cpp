// Memory, processes and the clock of the emulated cards.
//
// HOLLOW_CARD   the card: bytes:major.minor:multiprocessors:fp32:tf32:half:fp8:bytes_per_second:shared_bytes:l2_bytes:name
// HOLLOW_GPUS   how many of it (1)
// HOLLOW_STATE  file in which all processes count the memory they hold
// HOLLOW_CONTEXT_MIB  memory that a process's context takes on a card (450)
// HOLLOW_CLOCK  0: work takes no time (1)
// HOLLOW_COPIED_BYTES  larger copies move nothing (1 MiB)
#include "device.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <iterator>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>
#include <vector>

namespace hollow {
namespace {

const size_t PAGE = 2u << 20;
const int MAX_PROCESSES = 512;

struct Slot {
  std::atomic<int> pid;
  std::atomic<long long> started;  // tells a process from a later one of the same id
  std::atomic<long long> used[MAX_DEVICES];
};
struct Shared {
  Slot slots[MAX_PROCESSES];
};
struct Block {
  size_t bytes;
  int device;
};
struct Graph {
  double seconds;
};

struct State {
  Card card;
  int cards;
  std::vector<int> visible;  // the card of each device
  size_t context_bytes, copied_bytes;
  bool clocked;
  Shared* shared;
};

std::recursive_mutex lock;
using Guard = std::lock_guard<std::recursive_mutex>;
Slot* own_slot;
int own_pid;
std::map<char*, Block> blocks;             // what the device holds
std::map<char*, size_t> pinned, reserved;  // host memory; address ranges
std::map<char*, char*> gaps = {{(char*)0x100000000000, (char*)0x500000000000}};  // addresses for device memory
bool contexts[MAX_DEVICES];
double busy[MAX_DEVICES];
Graph* graph_in_capture;
bool failed;
thread_local int current;
thread_local bool suspended, multiplied_in_tf32;
thread_local cudaError_t last_error;

long number(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text ? atol(text) : otherwise;
}

Card read_card() {
  Card card;
  int name_at = 0;
  const char* text = getenv("HOLLOW_CARD");
  const char* format = "%zu:%d.%d:%d:%lf:%lf:%lf:%lf:%lf:%zu:%zu:%n";
  if (!text ||
      sscanf(text, format, &card.total_bytes, &card.major, &card.minor, &card.multiprocessors, &card.fp32, &card.tf32,
             &card.half, &card.fp8, &card.bytes_per_second, &card.shared_optin_bytes, &card.l2_bytes, &name_at) != 11 ||
      !name_at) {
    fprintf(stderr, "hollow GPU: HOLLOW_CARD describes no card; run through `python -m tests.hollow`\n");
    abort();
  }
  card.name = text + name_at;
  card.total_bytes &= ~(PAGE - 1);
  return card;
}

Shared* open_shared() {
  const char* path = getenv("HOLLOW_STATE");
  int file = path ? open(path, O_RDWR | O_CREAT, 0600) : -1;
  if (file < 0 || ftruncate(file, sizeof(Shared)) != 0) {
    fprintf(stderr, "hollow GPU: cannot open HOLLOW_STATE=%s; run through `python -m tests.hollow`\n",
            path ? path : "");
    abort();
  }
  void* at = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return (Shared*)at;
}

std::vector<int> visible_cards(int cards) {
  std::vector<int> visible;
  const char* text = getenv("CUDA_VISIBLE_DEVICES");
  for (int i = 0; !text && i < cards; i++) visible.push_back(i);
  std::stringstream names(text ? text : "");
  for (std::string name; std::getline(names, name, ',');) {
    int card = 0;
    if (name.rfind("GPU-", 0) == 0)
      while (card < cards && uuid_text_of(card).rfind(name, 0) != 0) card++;
    else if (sscanf(name.c_str(), "%d", &card) != 1)
      break;
    if (card < 0 || card >= cards) break;  // CUDA ignores what follows a name that is no card's
    visible.push_back(card);
  }
  return visible;
}

State& state() {
  static int cards = (int)std::min<long>(number("HOLLOW_GPUS", 1), MAX_DEVICES);
  static State state{read_card(),
                     cards,
                     visible_cards(cards),
                     (size_t)number("HOLLOW_CONTEXT_MIB", 450) << 20,
                     (size_t)number("HOLLOW_COPIED_BYTES", 1 << 20),
                     number("HOLLOW_CLOCK", 1) != 0,
                     open_shared()};
  return state;
}

}  // namespace

long long start_of(int pid) {
  char path[32], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  int file = open(path, O_RDONLY);
  if (file < 0) return 0;
  ssize_t size = read(file, text, sizeof text - 1);
  close(file);
  text[std::max<ssize_t>(size, 0)] = 0;
  const char* after = strrchr(text, ')');
  char status = 0;
  long long ticks = 0;
  if (!after || sscanf(after + 1, " %c%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%lld", &status, &ticks) < 2)
    return 0;
  return status == 'Z' || status == 'X' ? 0 : ticks;
}

namespace {

bool alive(const Slot& slot) {
  int pid = slot.pid.load();
  return pid && (pid == own_pid || start_of(pid) == slot.started.load());
}

Slot& slot() {
  int pid = getpid();
  if (own_slot && own_pid == pid) return *own_slot;
  if (own_pid) {  // a fork holds nothing of its parent's
    std::fill(std::begin(contexts), std::end(contexts), false);
    blocks.clear();
  }
  own_pid = 0;
  for (Slot& each : state().shared->slots) {
    int had = each.pid.load();
    if (alive(each) || !each.pid.compare_exchange_strong(had, pid)) continue;
    for (auto& used : each.used) used = 0;
    each.started = start_of(pid);
    own_slot = &each;
    own_pid = pid;
    return each;
  }
  fprintf(stderr, "hollow GPU: more than %d processes\n", MAX_PROCESSES);
  abort();
}

size_t whole_pages(size_t bytes) { return (bytes + PAGE - 1) & ~(PAGE - 1); }

template <class Value>
auto range_of(std::map<char*, Value>& ranges, const void* address, size_t (*size)(const Value&)) {
  auto found = ranges.upper_bound((char*)address);
  if (found == ranges.begin()) return ranges.end();
  --found;
  return (char*)address < found->first + size(found->second) ? found : ranges.end();
}
size_t size_of_block(const Block& block) { return block.bytes; }
size_t size_of_range(const size_t& bytes) { return bytes; }

}  // namespace

const Card& card() { return state().card; }
int card_count() { return state().cards; }
int device_count() { return (int)state().visible.size(); }
int card_of(int device) { return state().visible[device]; }
std::string uuid_of(int device) { return std::string(15, 0x5e) + (char)card_of(device); }
std::string uuid_text_of(int card) {
  char text[64];
  snprintf(text, sizeof text, "GPU-5e5e5e5e-5e5e-5e5e-5e5e-5e5e5e5e5e%02x", card);
  return text;
}
int& current_device() { return current; }
size_t copied_bytes() { return state().copied_bytes; }
bool has_context(int device) { return contexts[device]; }

void open_context(int device) {
  Guard guard(lock);
  Slot& mine = slot();
  if (contexts[device]) return;
  contexts[device] = true;
  mine.used[card_of(device)] += state().context_bytes;
}

size_t used_bytes(int card) {
  long long sum = 0;
  for (Slot& each : state().shared->slots)
    if (each.used[card].load() && alive(each)) sum += each.used[card].load();
  return (size_t)std::max(sum, 0ll);
}

int processes(int card, int* pids, size_t* bytes, int room) {
  int found = 0;
  for (Slot& each : state().shared->slots) {
    if (!each.used[card].load() || !alive(each)) continue;
    if (found < room) {
      pids[found] = each.pid.load();
      bytes[found] = (size_t)each.used[card].load();
    }
    found++;
  }
  return found;
}

bool take(size_t bytes, int device) {
  Guard guard(lock);
  open_context(device);
  if (used_bytes(card_of(device)) + whole_pages(bytes) > card().total_bytes) return false;
  slot().used[card_of(device)] += (long long)whole_pages(bytes);
  return true;
}

void give(size_t bytes, int device) { slot().used[card_of(device)] -= (long long)whole_pages(bytes); }

char* map_pages(size_t bytes) {
  static char* next = (char*)0x600000000000;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* at = mmap(next, std::max<size_t>(bytes, 1), PROT_READ | PROT_WRITE, flags, -1, 0);  // there, if it is free
  next += whole_pages(bytes) + PAGE;
  return at == MAP_FAILED ? nullptr : (char*)at;
}

// The highest free address, from 20 MiB on a multiple of 32 MiB: so an H100's driver laid them, by what was reserved
// there. Before 2.12 PyTorch takes the lowest of free blocks of equal size.
char* place(size_t bytes) {
  size_t size = whole_pages(std::max<size_t>(bytes, 1)), step = size >= 10 * PAGE ? 16 * PAGE : PAGE;
  for (auto gap = gaps.rbegin(); gap != gaps.rend(); ++gap) {
    auto [low, high] = *gap;
    char* start = (char*)((size_t)(high - size) / step * step);
    if ((size_t)(high - low) < size || start < low) continue;
    gaps.erase(low);
    if (low < start) gaps[low] = start;
    if (start + size < high) gaps[start + size] = high;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    void* at = mmap(start, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    return at == MAP_FAILED ? nullptr : start;
  }
  return nullptr;
}

void vacate(char* low, char* high) {
  auto after = gaps.find(high);
  if (after != gaps.end()) {
    high = after->second;
    gaps.erase(after);
  }
  auto next = gaps.lower_bound(low);
  if (next != gaps.begin() && std::prev(next)->second == low)
    std::prev(next)->second = high;
  else
    gaps[low] = high;
}

void* allocate(size_t bytes, int device) {
  Guard guard(lock);
  if (!take(bytes, device)) return nullptr;
  char* at = place(bytes);
  if (at)
    blocks[at] = {bytes, device};
  else
    give(bytes, device);
  return at;
}

bool release(void* address) {
  Guard guard(lock);
  auto found = blocks.find((char*)address);
  if (found == blocks.end()) return false;
  give(found->second.bytes, found->second.device);
  size_t size = whole_pages(std::max<size_t>(found->second.bytes, 1));
  munmap(address, size);
  vacate((char*)address, (char*)address + size);
  blocks.erase(found);
  return true;
}

void* allocate_host(size_t bytes) {
  Guard guard(lock);
  char* at = map_pages(bytes);
  if (at) pinned[at] = bytes;
  return at;
}

bool release_host(void* address) {
  Guard guard(lock);
  auto found = pinned.find((char*)address);
  if (found == pinned.end()) return false;
  munmap(address, found->second);
  pinned.erase(found);
  return true;
}

void* reserve_addresses(size_t bytes) {
  Guard guard(lock);
  char* at = map_pages(bytes + PAGE);
  if (!at) return nullptr;
  at = (char*)whole_pages((size_t)at);
  reserved[at] = bytes;
  return at;
}

void release_addresses(void* address, size_t bytes) {
  Guard guard(lock);
  reserved.erase((char*)address);
  munmap(address, bytes);
}

bool is_on_device(const void* address, int* device) {
  Guard guard(lock);
  auto block = range_of(blocks, address, size_of_block);
  bool mapped = block == blocks.end() && range_of(reserved, address, size_of_range) != reserved.end();
  if (block == blocks.end() && !mapped) return false;
  if (device) *device = mapped ? current : block->second.device;
  return true;
}

bool is_pinned(const void* address) {
  Guard guard(lock);
  return range_of(pinned, address, size_of_range) != pinned.end();
}

// Large zeros give pages back to the host instead of writing them; other large values are not written.
void fill(void* address, int value, size_t bytes) {
  const size_t host_page = 4096, small = 1 << 16;
  work(2e-6 + (double)bytes / card().bytes_per_second);
  if (bytes < small) {
    memset(address, value, bytes);
  } else if (value == 0) {
    char* first = (char*)(((size_t)address + host_page - 1) & ~(host_page - 1));
    char* last = (char*)(((size_t)address + bytes) & ~(host_page - 1));
    memset(address, 0, (size_t)(first - (char*)address));
    memset(last, 0, (size_t)((char*)address + bytes - last));
    madvise(first, (size_t)(last - first), MADV_DONTNEED);
  }
}

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

void wait_until(double then) {
  for (double left; (left = then - now()) > 0;) {
    if (left < 1e-4) continue;
    timespec time{(time_t)left, (long)((left - (double)(time_t)left) * 1e9)};
    nanosleep(&time, nullptr);
  }
}

void work(double seconds) {
  if (!state().clocked || suspended) return;
  Guard guard(lock);
  if (graph_in_capture)
    graph_in_capture->seconds += seconds;
  else
    busy[current] = std::max(busy[current], now()) + seconds;
}

double busy_until() { return busy[current]; }
void synchronize() {
  if (state().clocked) wait_until(busy[current]);
}

// A kernel that is no matrix product moves some 80 bytes a thread.
void kernel(double blocks, double threads) { work(2e-6 + blocks * threads * 80 / card().bytes_per_second); }

// Matrix products reach some 65 % of the peak rate.
void product(double m, double n, double k, double batch, double flops_per_second) {
  work(3e-6 + 2 * m * n * k * batch / (flops_per_second * 0.65));
}

double rate_of(int cuda_type, bool tf32) {
  switch (cuda_type) {
    case 0:  // float
      multiplied_in_tf32 = multiplied_in_tf32 || tf32;
      return tf32 ? card().tf32 : card().fp32;
    case 2:  // half
      return card().half;
    case 14:  // bfloat16, emulated before Ampere
      return card().major >= 8 ? card().half : card().fp32 / 4;
    case 28:  // float8
    case 29:
      return card().fp8;
    default:
      return card().fp32;
  }
}

void begin_capture() { graph_in_capture = new Graph{0}; }
void* end_capture() { return std::exchange(graph_in_capture, nullptr); }
void* capturing() { return graph_in_capture; }
double graph_seconds(void* graph) { return graph ? ((Graph*)graph)->seconds : 0; }

cudaError_t set_error(cudaError_t error) {
  if (error) last_error = error;
  return error;
}
cudaError_t take_error(bool clear) {
  if (failed) return cudaErrorAssert;
  return clear ? std::exchange(last_error, cudaSuccess) : last_error;
}
void fail_device() { failed = true; }
bool device_failed() { return failed; }

// values.cpp wraps PyTorch's kernels: nothing to do before PyTorch is there.
void load_values() {
  static std::atomic<bool> loaded{false};
  if (loaded || !dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD) || loaded.exchange(true)) return;
  if (!dlopen("libhollow_values.so", RTLD_NOW | RTLD_GLOBAL)) {
    fprintf(stderr, "hollow GPU: %s\n", dlerror());
    abort();
  }
}

void* new_handle() {
  static std::atomic<size_t> last{0x1000};
  return (void*)(last += 16);
}

}  // namespace hollow

STAND_IN void hollow_fail_device() { hollow::fail_device(); }

// For laws.cpp: the clock of this thread.
STAND_IN int hollow_clocked() { return hollow::state().clocked; }
STAND_IN void hollow_suspend_clock(bool suspended) {
  hollow::suspended = suspended;
  if (suspended) hollow::multiplied_in_tf32 = false;
}
STAND_IN bool hollow_multiplied_in_tf32() { return hollow::multiplied_in_tf32; }
STAND_IN void hollow_work(double seconds) { hollow::work(seconds); }

// What no stand-in defines: it succeeds. HOLLOW_LOG names a file that gets the name of each such call, once.
STAND_IN int hollow_stub(const char* name) {
  static const char* log = getenv("HOLLOW_LOG");
  if (!log) return 0;
  static std::map<std::string, bool> seen;
  hollow::Guard guard(hollow::lock);
  if (!seen.emplace(name, true).second) return 0;
  if (FILE* file = fopen(log, "a")) {
    fprintf(file, "%s\n", name);
    fclose(file);
  }
  return 0;
}
