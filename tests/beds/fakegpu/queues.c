// Streams, events, kernels and the few functions of the driver that torch looks up.
#include "fakegpu.h"

static uint64_t next_handle = 0x10000;
static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}
typedef struct {
  double at;
  uint64_t number;
} Event;
static cudaError_t stream_(cudaStream_t *s, int priority) {
  *s = (cudaStream_t)__sync_add_and_fetch(&next_handle, 64);
  note('T', "stream", *s, 0, 0, (uint64_t)(int64_t)priority, 0);
  return 0;
}
cudaError_t cudaStreamCreate(cudaStream_t *s) { return stream_(s, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { return stream_(s, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { return stream_(s, p); }
cudaError_t cudaStreamDestroy(cudaStream_t s) { return 0; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) {
  *p = 0;
  return 0;
}
cudaError_t cudaStreamQuery(cudaStream_t s) { return not_ready ? cudaErrorNotReady : 0; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  synchronised("cudaStreamSynchronize", s, 0);
  return 0;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) {
  note('W', "wait", s, e, 0, 0, 0);
  return 0;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) {
  *c = cudaStreamCaptureStatusNone;
  return 0;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *i,
                                     cudaGraph_t *g, const cudaGraphNode_t **d, const cudaGraphEdgeData **e,
                                     size_t *n) {
  *c = 0;
  if (i) *i = 0;
  if (n) *n = 0;
  return 0;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) { return 0; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) {
  Event *one = calloc(1, sizeof *one);
  *e = (cudaEvent_t)one;
  note('E', "event", 0, one, 0, f, 0);
  return 0;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { return 0; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  ((Event *)e)->at = seconds();
  note('R', "record", s, e, 0, 0, 0);
  return 0;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) { return cudaEventRecord(e, s); }
cudaError_t cudaEventQuery(cudaEvent_t e) { return not_ready ? cudaErrorNotReady : 0; }
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  synchronised("cudaEventSynchronize", 0, e);
  return 0;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
  *ms = (((Event *)b)->at - ((Event *)a)->at) * 1e3;
  return 0;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *u) {
  note('H', "host function", s, 0, 0, 0, 0);
  f(u);
  return 0;
}
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *u, unsigned g) {
  f(s, 0, u);
  return 0;
}

typedef struct {
  const void *host;
  const char *name;
} Kernel;
static Kernel *kernels;
static size_t kernels_n, kernels_room;
static size_t slot(const Kernel *t, size_t room, const void *p) {
  size_t i = ((uintptr_t)p * 0x9E3779B97F4A7C15ull) >> 20 & (room - 1);
  while (t[i].host && t[i].host != p) i = (i + 1) & (room - 1);
  return i;
}
void **__cudaRegisterFatBinary(void *b) {
  static void *handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void **h) {}
void __cudaUnregisterFatBinary(void **h) {}
void __cudaRegisterVar(void **h, char *v, char *a, const char *n, int e, size_t s, int c, int g) {}
void __cudaRegisterFunction(void **h, const char *host, char *device, const char *name, int limit, void *a, void *b,
                            void *c, void *d, int *e) {
  if (2 * kernels_n >= kernels_room) {
    size_t room = kernels_room ? 2 * kernels_room : 1 << 16;
    Kernel *more = calloc(room, sizeof *more);
    for (size_t i = 0; i < kernels_room; i++)
      if (kernels[i].host) more[slot(more, room, kernels[i].host)] = kernels[i];
    free(kernels);
    kernels = more;
    kernels_room = room;
  }
  kernels[slot(kernels, kernels_room, host)] = (Kernel){host, name};
  kernels_n++;
}
static const char *name_of(const void *f) {
  const char *n = kernels_room ? kernels[slot(kernels, kernels_room, f)].name : 0;
  return n ? n : "?";
}
static __thread struct {
  dim3 grid, block;
  size_t shared;
  void *stream;
} call;
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t s, void *t) {
  call.grid = g;
  call.block = b;
  call.shared = s;
  call.stream = t;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *s, void *t) {
  *g = call.grid;
  *b = call.block;
  *s = call.shared;
  *(void **)t = call.stream;
  return 0;
}
cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) {
  *k = (cudaKernel_t)f;
  return 0;
}
static cudaError_t launch(const void *f, dim3 g, dim3 b, void *s) {
  note('K', name_of(f), s, 0, 0, (uint64_t)g.x * g.y * g.z, b.x * b.y * b.z);
  return 0;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **args, size_t sh, cudaStream_t s) {
  return launch((void *)k, g, b, s);
}
cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **args, size_t sh, cudaStream_t s) {
  return launch(f, g, b, s);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **args) {
  return launch(f, c->gridDim, c->blockDim, c->stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **args, size_t sh, cudaStream_t s) {
  return launch(f, g, b, s);
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->binaryVersion = 90;
  a->ptxVersion = 90;
  return 0;
}
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) { return 0; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t s) {
  *n = 2;
  return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned g) {
  *n = 2;
  return 0;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *p, int d) {
  *p = (cudaMemPool_t)1;
  return 0;
}

static int driver_none(void) { return 0; }
static int driver_state(int d, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return 0;
}
static int driver_reserve(void **p, size_t n) {
  *p = map(n);
  remember(*p, n, 2);
  return 0;
}
static int driver_create(uint64_t *h, size_t n) {
  *h = n;
  note('M', "cuMemCreate", 0, 0, n, 0, 0);
  return 0;
}
static int driver_granularity(size_t *n) {
  *n = 2 << 20;
  return 0;
}
static int driver_device(int *d, int n) {
  *d = n;
  return 0;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *s, void **f, unsigned v, unsigned long long g,
                                             enum cudaDriverEntryPointQueryResult *r) {
  *f = driver_none;
  if (r) *r = 0;
  if (!strcmp(s, "cuDevicePrimaryCtxGetState")) *f = driver_state;
  if (!strcmp(s, "cuMemAddressReserve")) *f = driver_reserve;
  if (!strcmp(s, "cuMemCreate")) *f = driver_create;
  if (!strcmp(s, "cuMemGetAllocationGranularity")) *f = driver_granularity;
  if (!strcmp(s, "cuDeviceGet")) *f = driver_device;
  return 0;
}

int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { return driver_state(d, f, a); }
int cuCtxGetCurrent(void **c) {
  *c = (void *)1;
  return 0;
}
int cuDevicePrimaryCtxRetain(void **c, int d) {
  *c = (void *)1;
  return 0;
}
int cuGetErrorString(int e, const char **s) {
  *s = "fakegpu";
  return 0;
}
int cuPointerGetAttribute(int *v, int a, void *p) {
  *v = 0;
  return 0;
}

// Kernels that torch's compiler makes: a function is its name.
int cuDriverGetVersion(int *v) { return cudaDriverGetVersion(v); }
int cuDeviceGet(int *d, int n) { return driver_device(d, n); }
int cuDeviceGetAttribute(int *v, int a, int d) { return cudaDeviceGetAttribute(v, a, d); }
int cuCtxGetDevice(int *d) { return cudaGetDevice(d); }
int cuCtxGetLimit(size_t *v, int limit) {
  *v = 0;
  return 0;
}
int cuStreamIsCapturing(void *s, int *c) {
  *c = 0;
  return 0;
}
int cuFuncGetAttribute(int *v, int a, void *f) {
  *v = a == 0 ? 1024 : a == 4 ? 32 : 0; // threads of a block, registers
  return 0;
}
int cuModuleGetFunction(void **f, void *module, const char *name) {
  *f = strdup(name);
  return 0;
}
int cuModuleLoad(void **module, const char *path) {
  *module = (void *)1;
  return 0;
}
int cuModuleLoadData(void **module, const void *image) { return cuModuleLoad(module, 0); }
int cuModuleLoadDataEx(void **module, const void *image) { return cuModuleLoad(module, 0); }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned sh,
                   void *s, void **args, void **more) {
  note('K', f, s, 0, 0, (uint64_t)gx * gy * gz, bx * by * bz);
  return 0;
}
typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream;
} Launch; // as CUlaunchConfig begins
int cuLaunchKernelEx(const Launch *c, void *f, void **args, void **more) {
  return cuLaunchKernel(f, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], 0, c->stream, 0,
                        0);
}

#define NOTHING(name)                                                                                                  \
  int name(void) { return 0; }
// clang-format off
NOTHING(cuModuleUnload) NOTHING(cuModuleGetGlobal) NOTHING(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NOTHING(cuLaunchCooperativeKernel) NOTHING(cuCtxSetCurrent) NOTHING(cuCtxSetLimit) NOTHING(cuFuncSetCacheConfig)
NOTHING(cuOccupancyMaxActiveClusters) NOTHING(cuTensorMapEncodeIm2col)
NOTHING(cuLinkCreate) NOTHING(cuLinkAddData) NOTHING(cuLinkComplete) NOTHING(cuLinkDestroy) NOTHING(cuFuncSetAttribute)
NOTHING(cuTensorMapEncodeTiled) NOTHING(cuInit) NOTHING(cuCtxFromGreenCtx)
NOTHING(cuStreamWriteValue32) NOTHING(cuCtxPushCurrent) NOTHING(cuCtxPopCurrent)
NOTHING(cuDeviceGetDevResource) NOTHING(cuDevResourceGenerateDesc) NOTHING(cuDevSmResourceSplitByCount)
NOTHING(cuGreenCtxCreate) NOTHING(cuGreenCtxDestroy) NOTHING(cuGreenCtxStreamCreate) NOTHING(cuMemcpyHtoDAsync)
NOTHING(cuMemcpyDtoHAsync) NOTHING(cuKernelGetParamInfo) NOTHING(cuFuncGetParamInfo) NOTHING(cuFuncGetModule)
NOTHING(cuStreamBatchMemOp)
    // clang-format on
