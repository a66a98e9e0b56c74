// The record, devices and memory.
#include "fakegpu.h"

static Note *notes;
static long count, room;
static int on;
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void (*on_sync)(const char *);
int not_ready; // what events answer when they are asked
void fakegpu_record(int state) {
  on = state;
  if (state) count = 0;
}
void fakegpu_on_sync(void (*f)(const char *)) { on_sync = f; }
void fakegpu_pending(int state) { not_ready = state; }
long fakegpu_count(void) { return count; }
Note *fakegpu_notes(void) { return notes; }
void note(char kind, const char *name, const void *stream, const void *event, uint64_t bytes, uint64_t a, uint64_t b) {
  if (!on) return;
  pthread_mutex_lock(&lock);
  if (count == room) {
    room = room ? 2 * room : 4096;
    notes = realloc(notes, room * sizeof *notes);
  }
  notes[count++] = (Note){kind, name, (uint64_t)stream, (uint64_t)event, bytes, a, b};
  pthread_mutex_unlock(&lock);
}
void synchronised(const char *name, const void *stream, const void *event) {
  note('S', name, stream, event, 0, 0, 0);
  if (on && on_sync) on_sync(name);
}

static int devices(void) {
  const char *n = getenv("FAKEGPU_DEVICES");
  return n ? atoi(n) : 8;
}
static __thread int current;
static const size_t CAPACITY = 80ull << 30;
cudaError_t cudaGetDeviceCount(int *n) {
  *n = devices();
  return 0;
}
cudaError_t cudaGetDevice(int *d) {
  *d = current;
  return 0;
}
cudaError_t cudaSetDevice(int d) {
  current = d;
  return 0;
}
cudaError_t cudaDriverGetVersion(int *v) {
  *v = 13020;
  return 0;
}
cudaError_t cudaRuntimeGetVersion(int *v) {
  *v = 13020;
  return 0;
}
cudaError_t cudaGetLastError(void) { return 0; }
cudaError_t cudaPeekAtLastError(void) { return 0; }
const char *cudaGetErrorString(cudaError_t e) { return "fakegpu error"; }
const char *cudaGetErrorName(cudaError_t e) { return "fakegpu"; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Fake H100");
  p->major = 9;
  p->minor = 0;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->regsPerBlock = 65536;
  p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerMultiprocessor = 233472;
  p->sharedMemPerBlockOptin = 232448;
  p->totalGlobalMem = CAPACITY;
  p->totalConstMem = 65536;
  p->l2CacheSize = 50 << 20;
  p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->memPitch = 2147483647;
  p->textureAlignment = 512;
  p->concurrentKernels = 1;
  p->asyncEngineCount = 3;
  p->unifiedAddressing = 1;
  p->managedMemory = 1;
  p->cooperativeLaunch = 1;
  p->streamPrioritiesSupported = 1;
  return 0;
}
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
  switch (a) {
  case 75:
    *v = 9;
    break;
  case 76:
    *v = 0;
    break;
  case 16:
    *v = 132;
    break;
  case 97:
    *v = 232448;
    break;
  case 10:
    *v = 32;
    break;
  case 1:
    *v = 1024;
    break;
  default:
    *v = 1;
  }
  return 0;
}
cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) {
  snprintf(s, n, "0000:%02x:00.0", d);
  return 0;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return 0;
}
cudaError_t cudaDeviceCanAccessPeer(int *c, int a, int b) {
  *c = 1;
  return 0;
}
cudaError_t cudaDeviceEnablePeerAccess(int a, unsigned f) { return 0; }
cudaError_t cudaDeviceSynchronize(void) {
  synchronised("cudaDeviceSynchronize", 0, 0);
  return 0;
}
cudaError_t cudaMemGetInfo(size_t *f, size_t *t) {
  *f = CAPACITY - (1ull << 30);
  *t = CAPACITY;
  return 0;
}
cudaError_t cudaProfilerStart(void) { return 0; }
cudaError_t cudaProfilerStop(void) { return 0; }

// NVML: how many devices there are, and that they are in no fabric across nodes.
int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) {
  *n = devices();
  return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
  *device = (void *)1;
  return 0;
}
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return 3; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, void *type) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) { return 3; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { return cudaDriverGetVersion(v); }
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *n, void *infos) {
  *n = 0;
  return 0;
}

static Range *ranges;
static int ranges_n, ranges_room;
void remember(void *p, size_t n, int type) {
  pthread_mutex_lock(&lock);
  if (ranges_n == ranges_room) {
    ranges_room = ranges_room ? 2 * ranges_room : 256;
    ranges = realloc(ranges, ranges_room * sizeof *ranges);
  }
  ranges[ranges_n++] = (Range){(uintptr_t)p, n, type, current};
  pthread_mutex_unlock(&lock);
}
Range find(const void *p) {
  Range found = {0};
  pthread_mutex_lock(&lock);
  for (int i = 0; i < ranges_n; i++)
    if ((uintptr_t)p - ranges[i].at < ranges[i].size) found = ranges[i];
  pthread_mutex_unlock(&lock);
  return found;
}
static size_t forget(const void *p) {
  size_t size = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < ranges_n; i++)
    if (ranges[i].at == (uintptr_t)p) {
      size = ranges[i].size;
      ranges[i] = ranges[--ranges_n];
      break;
    }
  pthread_mutex_unlock(&lock);
  return size;
}
void *map(size_t n) {
  void *p = mmap(0, n ? n : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? 0 : p;
}
cudaError_t take(void **p, size_t n, int type, const char *name) {
  note('M', name, 0, 0, n, 0, 0);
  *p = map(n);
  if (!*p) return cudaErrorMemoryAllocation;
  remember(*p, n, type);
  return 0;
}
cudaError_t cudaMalloc(void **p, size_t n) { return take(p, n, 2, "cudaMalloc"); }
cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return take(p, n, 2, "cudaMallocAsync"); }
cudaError_t cudaMallocHost(void **p, size_t n) { return take(p, n, 1, "cudaMallocHost"); }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned f) { return take(p, n, 1, "cudaHostAlloc"); }
cudaError_t cudaHostRegister(void *p, size_t n, unsigned f) {
  remember(p, n, 1);
  return 0;
}
cudaError_t cudaHostUnregister(void *p) {
  forget(p);
  return 0;
}
cudaError_t release(void *p, const char *name) {
  note('F', name, 0, 0, 0, 0, 0);
  size_t n = forget(p);
  if (n) munmap(p, n);
  return 0;
}
cudaError_t cudaFree(void *p) { return release(p, "cudaFree"); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return release(p, "cudaFreeAsync"); }
cudaError_t cudaFreeHost(void *p) { return release(p, "cudaFreeHost"); }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  Range r = find(p);
  memset(a, 0, sizeof *a);
  a->type = r.type;
  a->device = r.type ? r.device : -2;
  a->hostPointer = r.type == 1 ? (void *)p : 0;
  a->devicePointer = r.type ? (void *)p : 0;
  return 0;
}
static void copy(const char *name, void *d, const void *s, size_t n, int kind, cudaStream_t stream, int blocking) {
  int from = find(s).type, to = find(d).type;
  const char *what = from == 2 ? (to == 2 ? "DtoD" : "DtoH") : (to == 2 ? "HtoD" : "HtoH");
  note('C', what, stream, 0, n, from, to);
  if (blocking || from == 0 || to == 0)
    synchronised(from == 2 && to == 0   ? "DtoH into pageable memory"
                 : to == 2 && from == 0 ? "HtoD from pageable memory"
                                        : name,
                 stream, 0);
  if ((from != 2 || to != 2) && n <= (64 << 20)) memcpy(d, s, n);
}
cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) {
  copy("cudaMemcpy", d, s, n, k, 0, 1);
  return 0;
}
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t t) {
  copy("cudaMemcpyAsync", d, s, n, k, t, 0);
  return 0;
}
cudaError_t cudaMemcpyPeerAsync(void *d, int dd, const void *s, int sd, size_t n, cudaStream_t t) {
  note('C', "DtoD", t, 0, n, 2, 2);
  return 0;
}
cudaError_t cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, enum cudaMemcpyKind k,
                              cudaStream_t t) {
  int from = find(s).type, to = find(d).type;
  note('C', from == 2 ? (to == 2 ? "DtoD" : "DtoH") : "HtoD", t, 0, w * h, from, to);
  if (from == 0 || to == 0) synchronised("cudaMemcpy2DAsync with pageable memory", t, 0);
  return 0;
}
cudaError_t cudaMemset(void *p, int v, size_t n) {
  note('K', "memset", 0, 0, n, 0, 0);
  return 0;
}
cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s) {
  note('K', "memset", s, 0, n, 0, 0);
  if (find(p).type != 2) memset(p, v, n);
  return 0;
}
cudaError_t cudaMemcpyToSymbol(const void *s, const void *p, size_t n, size_t o, enum cudaMemcpyKind k) { return 0; }
cudaError_t cudaGetSymbolAddress(void **p, const void *s) {
  *p = (void *)s;
  return 0;
}
