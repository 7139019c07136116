// NCCL between processes of this machine: the ranks of a communicator meet in shared memory. A collective waits for all
// of its ranks, begins on the device's clock when the last of them is ready, and carries what a copy would carry
// (copied_bytes). A rank that has ended is an error for the others, as NCCL's watchdog makes it. Sending to one rank
// (ncclSend, ncclAlltoAll) is not among it.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <deque>
#include <vector>

#include "device.hpp"

using namespace hollow;

namespace {

const int SYSTEM_ERROR = 2, REMOTE_ERROR = 6;  // ncclResult_t
const double LINK = 3e11;                      // bytes a second between cards
const size_t HEADER = 1 << 16;

struct UniqueId {
  char bytes[128];  // where the shared memory is: /proc/PID/fd/N of the process that made it
};

struct Rank {
  std::atomic<int> pid;
  std::atomic<long long> started, arrived;
  std::atomic<double> ready;  // on the device's clock
};

struct Comm {
  int ranks, rank, device;
  Rank* all;     // of every rank; behind them, two halves of a slot for each rank
  long long at;  // how many times this rank has met the others
  std::atomic<bool> aborted;
  std::atomic<int> error;

  char* slot(int rank) { return (char*)all + HEADER + (size_t)((at & 1) * ranks + rank) * copied_bytes(); }
};

int make_room(char* name, size_t room) {
  memset(name, 0, room);
  int file = memfd_create("hollow-nccl", MFD_CLOEXEC);
  if (file < 0) return SYSTEM_ERROR;
  snprintf(name, room, "/proc/%d/fd/%d", getpid(), file);
  return 0;
}

// Waits until every rank has come as often as this one.
int wait_for_all(Comm& comm) {
  for (int rank = 0; rank < comm.ranks; rank++) {
    Rank& other = comm.all[rank];
    for (long turn = 0; other.arrived.load() < comm.at; turn++) {
      if (comm.aborted) return SYSTEM_ERROR;
      bool ended = turn % 256 == 255 && other.pid.load() && start_of(other.pid.load()) != other.started.load();
      if (ended && other.arrived.load() < comm.at) return comm.error = REMOTE_ERROR;
      if (turn < 64) {
        sched_yield();
      } else {
        timespec nap{0, 50000};
        nanosleep(&nap, nullptr);
      }
    }
  }
  return 0;
}

// Every rank says what it brings, and waits for the others; then their slots can be read until this rank comes again.
// What it wrote the time before may still be read by others, so there are two halves.
int meet(Comm& comm, const void* brought, size_t bytes, double seconds) {
  if (comm.error) return comm.error;
  comm.at++;
  if (bytes && bytes <= copied_bytes()) memcpy(comm.slot(comm.rank), brought, bytes);
  double ready = std::max(now(), busy_until());
  comm.all[comm.rank].ready = ready;
  comm.all[comm.rank].arrived = comm.at;
  if (int error = wait_for_all(comm)) return error;
  double latest = ready;
  for (int rank = 0; rank < comm.ranks; rank++) latest = std::max(latest, comm.all[rank].ready.load());
  work(seconds + latest - ready);
  return 0;
}

int join(void** out, int ranks, int rank, const char* name) {
  if ((size_t)ranks * sizeof(Rank) > HEADER) return SYSTEM_ERROR;
  size_t bytes = HEADER + 2 * ranks * copied_bytes();
  int file = open(name, O_RDWR | O_CLOEXEC);
  if (file < 0) return SYSTEM_ERROR;
  bool sized = ftruncate(file, (off_t)bytes) == 0;
  void* at = sized ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
  close(file);
  if (at == MAP_FAILED) return SYSTEM_ERROR;
  auto* comm = new Comm{ranks, rank, current_device(), (Rank*)at, 0, {false}, {0}};
  comm->all[rank].started = start_of(getpid());
  comm->all[rank].pid = getpid();
  *out = comm;
  return meet(*comm, nullptr, 0, 0);
}

// ---- numbers of NCCL's types

size_t size_of(int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < 12 ? sizes[type] : 4;
}

template <class T>
long double read_as(const char* from, size_t i) {
  T value;
  memcpy(&value, from + i * sizeof value, sizeof value);
  return (long double)value;
}

template <class T>
void write_as(char* to, size_t i, long double given) {
  T value = (T)given;
  memcpy(to + i * sizeof value, &value, sizeof value);
}

long double number(int type, const char* from, size_t i) {
  switch (type) {
    case 0: return read_as<int8_t>(from, i);
    case 1: return read_as<uint8_t>(from, i);
    case 2: return read_as<int32_t>(from, i);
    case 3: return read_as<uint32_t>(from, i);
    case 4: return read_as<int64_t>(from, i);
    case 5: return read_as<uint64_t>(from, i);
    case 6: return read_as<_Float16>(from, i);
    case 7: return read_as<float>(from, i);
    case 8: return read_as<double>(from, i);
  }
  uint32_t bits = (uint32_t)read_as<uint16_t>(from, i) << 16;  // bfloat16
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

void set_number(int type, char* to, size_t i, long double value) {
  switch (type) {
    case 0: return write_as<int8_t>(to, i, value);
    case 1: return write_as<uint8_t>(to, i, value);
    case 2: return write_as<int32_t>(to, i, value);
    case 3: return write_as<uint32_t>(to, i, value);
    case 4: return write_as<int64_t>(to, i, value);
    case 5: return write_as<uint64_t>(to, i, value);
    case 6: return write_as<_Float16>(to, i, value);
    case 7: return write_as<float>(to, i, value);
    case 8: return write_as<double>(to, i, value);
  }
  float wide = (float)value;
  uint32_t bits;
  memcpy(&bits, &wide, sizeof bits);
  if (wide == wide) bits += 0x7fff + (bits >> 16 & 1);  // to the nearest, ties to even
  write_as<uint16_t>(to, i, bits >> 16);
}

enum { SUM, PROD, MAX, MIN, AVG, OWN };  // ncclRedOp_t; from OWN on, sums of what was multiplied before
std::deque<long double> factors;

// The numbers begin .. begin + count of all slots, brought together.
void reduce(Comm& comm, char* to, size_t begin, size_t count, int type, int op) {
  for (size_t i = 0; i < count; i++) {
    long double sum = number(type, comm.slot(0), begin + i);
    for (int rank = 1; rank < comm.ranks; rank++) {
      long double next = number(type, comm.slot(rank), begin + i);
      sum = op == PROD ? sum * next : op == MAX ? std::max(sum, next) : op == MIN ? std::min(sum, next) : sum + next;
    }
    if (op == AVG) sum /= comm.ranks;
    if (op >= OWN) sum *= factors[op - OWN];
    set_number(type, to, i, sum);
  }
}

bool is_carried(size_t bytes, int type) { return bytes <= copied_bytes() && type < 10; }

}  // namespace

STAND_IN int hollow_ncclGetVersion(int* v) {
  *v = 23007;
  return 0;
}
STAND_IN int hollow_ncclGetUniqueId(char* id) { return make_room(id, sizeof(UniqueId)); }
STAND_IN int hollow_ncclCommInitRank(void** c, int n, UniqueId id, int r) { return join(c, n, r, id.bytes); }
STAND_IN int hollow_ncclCommInitRankConfig(void** c, int n, UniqueId id, int r, void*) {
  return join(c, n, r, id.bytes);
}
STAND_IN int hollow_ncclCommInitRankScalable(void** c, int n, int r, int, UniqueId* ids, void*) {
  return join(c, n, r, ids[0].bytes);
}
STAND_IN int hollow_ncclCommSplit(void* c, int color, int key, void** out, void*) {
  struct Wish {
    int color, key;
    char name[sizeof(UniqueId)];
  };
  Comm& comm = *(Comm*)c;
  *out = nullptr;
  Wish mine{color, key, {}};
  if (int error = make_room(mine.name, sizeof mine.name)) return error;
  if (int error = meet(comm, &mine, sizeof mine, 0)) return error;
  std::vector<std::pair<int, int>> members;  // by key, then by rank
  for (int rank = 0; rank < comm.ranks; rank++) {
    const Wish& each = *(const Wish*)comm.slot(rank);
    if (each.color == color) members.push_back({each.key, rank});
  }
  std::sort(members.begin(), members.end());
  auto place = std::find(members.begin(), members.end(), std::make_pair(key, comm.rank));
  if (color < 0) return 0;
  return join(out, (int)members.size(), (int)(place - members.begin()),
              ((const Wish*)comm.slot(members[0].second))->name);
}
STAND_IN int hollow_ncclCommAbort(void* c) {
  ((Comm*)c)->aborted = true;  // a thread may wait in it
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
STAND_IN int hollow_ncclCommGetAsyncError(void* c, int* e) {
  *e = ((Comm*)c)->error;
  return 0;
}
STAND_IN const char* hollow_ncclGetErrorString(int error) {
  return error == REMOTE_ERROR ? "a rank has ended" : error ? "no shared memory, or aborted" : "no error";
}
STAND_IN const char* hollow_ncclGetLastError(void*) { return ""; }
STAND_IN int hollow_ncclRedOpCreatePreMulSum(int* op, const void* factor, int type, int, void*) {
  *op = OWN + (int)factors.size();
  factors.push_back(number(type, (const char*)factor, 0));
  return 0;
}

STAND_IN int hollow_ncclAllReduce(const void* s, void* d, size_t n, int t, int op, void* c, void*) {
  Comm& comm = *(Comm*)c;
  size_t bytes = n * size_of(t);
  if (int error = meet(comm, s, bytes, 1e-5 + 2.0 * (double)bytes / LINK)) return error;
  if (is_carried(bytes, t)) reduce(comm, (char*)d, 0, n, t, op);
  return 0;
}
STAND_IN int hollow_ncclReduce(const void* s, void* d, size_t n, int t, int op, int root, void* c, void*) {
  Comm& comm = *(Comm*)c;
  size_t bytes = n * size_of(t);
  if (int error = meet(comm, s, bytes, 1e-5 + (double)bytes / LINK)) return error;
  if (comm.rank == root && is_carried(bytes, t)) reduce(comm, (char*)d, 0, n, t, op);
  return 0;
}
STAND_IN int hollow_ncclReduceScatter(const void* s, void* d, size_t n, int t, int op, void* c, void*) {
  Comm& comm = *(Comm*)c;
  size_t bytes = n * size_of(t) * comm.ranks;
  if (int error = meet(comm, s, bytes, 1e-5 + (double)bytes / LINK)) return error;
  if (is_carried(bytes, t)) reduce(comm, (char*)d, comm.rank * n, n, t, op);
  return 0;
}
STAND_IN int hollow_ncclAllGather(const void* s, void* d, size_t n, int t, void* c, void*) {
  Comm& comm = *(Comm*)c;
  size_t bytes = n * size_of(t);
  if (int error = meet(comm, s, bytes, 1e-5 + (double)bytes * comm.ranks / LINK)) return error;
  if (bytes <= copied_bytes())
    for (int rank = 0; rank < comm.ranks; rank++) memcpy((char*)d + rank * bytes, comm.slot(rank), bytes);
  return 0;
}
STAND_IN int hollow_ncclBroadcast(const void* s, void* d, size_t n, int t, int root, void* c, void*) {
  Comm& comm = *(Comm*)c;
  size_t bytes = n * size_of(t);
  size_t brought = comm.rank == root ? bytes : 0;
  if (int error = meet(comm, s, brought, 1e-5 + (double)bytes / LINK)) return error;
  if (bytes && bytes <= copied_bytes()) memcpy(d, comm.slot(root), bytes);
  return 0;
}
STAND_IN int hollow_ncclBcast(void* d, size_t n, int t, int root, void* c, void* stream) {
  return hollow_ncclBroadcast(d, d, n, t, root, c, stream);
}
