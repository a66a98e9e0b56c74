// cuBLAS and NCCL.
#include "fakegpu.h"

typedef struct {
  void *stream;
  int math, mode;
} Blas;
int cublasCreate_v2(void **h) {
  *h = calloc(1, sizeof(Blas));
  return 0;
}
int cublasDestroy_v2(void *h) { return 0; }
int cublasSetStream_v2(Blas *h, void *s) {
  h->stream = s;
  return 0;
}
int cublasSetWorkspace_v2(Blas *h, void *p, size_t n) { return 0; }
int cublasSetMathMode(Blas *h, int m) {
  h->math = m;
  return 0;
}
int cublasGetMathMode(Blas *h, int *m) {
  *m = h->math;
  return 0;
}
int cublasSetPointerMode_v2(Blas *h, int m) {
  h->mode = m;
  return 0;
}
int cublasGetPointerMode_v2(Blas *h, int *m) {
  *m = h->mode;
  return 0;
}
int cublasSetSmCountTarget(Blas *h, int n) { return 0; }
static int product(Blas *h, const char *name, int m, int n, int k) {
  note('K', name, h->stream, 0, (uint64_t)m * n * k, 0, 0);
  return 0;
}
int cublasGemmEx(Blas *h, int a, int b, int m, int n, int k) { return product(h, "gemm", m, n, k); }
int cublasSgemm_v2(Blas *h, int a, int b, int m, int n, int k) { return product(h, "gemm", m, n, k); }
int cublasDgemm_v2(Blas *h, int a, int b, int m, int n, int k) { return product(h, "gemm", m, n, k); }
static int products(Blas *h, int m, int n, int k, int batch) {
  note('K', "gemm batched", h->stream, 0, (uint64_t)m * n * k * batch, 0, 0);
  return 0;
}
int cublasGemmStridedBatchedEx(Blas *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int at,
                               int lda, long long sa, const void *b, int bt, int ldb, long long sb, const void *beta,
                               void *c, int ct, int ldc, long long sc, int batch) {
  return products(h, m, n, k, batch);
}
int cublasSgemmStridedBatched(Blas *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int lda,
                              long long sa, const void *b, int ldb, long long sb, const void *beta, void *c, int ldc,
                              long long sc, int batch) {
  return products(h, m, n, k, batch);
}
int cublasDgemmStridedBatched(Blas *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int lda,
                              long long sa, const void *b, int ldb, long long sb, const void *beta, void *c, int ldc,
                              long long sc, int batch) {
  return products(h, m, n, k, batch);
}
int cublasSgemv_v2(Blas *h, int a, int m, int n) { return product(h, "gemv", m, n, 1); }
int cublasDotEx(Blas *h, int n) { return product(h, "dot", n, 1, 1); }
size_t cublasLtGetVersion(void) { return 130400; }
static int made(void **p) {
  *p = calloc(1, 512);
  return 0;
}
int cublasLtCreate(void **h) { return made(h); }
int cublasLtMatmulDescCreate(void **p) { return made(p); }
int cublasLtMatrixLayoutCreate(void **p) { return made(p); }
int cublasLtMatmulPreferenceCreate(void **p) { return made(p); }
int cublasLtMatmulDescDestroy(void *p) {
  free(p);
  return 0;
}
int cublasLtMatrixLayoutDestroy(void *p) {
  free(p);
  return 0;
}
int cublasLtMatmulPreferenceDestroy(void *p) {
  free(p);
  return 0;
}
int cublasLtMatmulDescSetAttribute(void *p) { return 0; }
int cublasLtMatrixLayoutSetAttribute(void *p) { return 0; }
int cublasLtMatmulPreferenceSetAttribute(void *p) { return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *o, void *a, void *b, void *c, void *d, void *p, int n, void *r,
                                   int *got) {
  memset(r, 0, 96);
  *got = 1;
  return 0;
}
int cublasLtMatmul(void *h, void *o, void *al, void *A, void *Ad, void *B, void *Bd, void *be, void *C, void *Cd,
                   void *D, void *Dd, void *algo, void *w, size_t ws, void *s) {
  note('K', "gemm with epilogue", s, 0, 0, 0, 0);
  return 0;
}

typedef struct {
  int ranks, rank;
  uint64_t id, splits, calls;
} Comm;
typedef struct {
  char bytes[128];
} Id;
static const int SIZE[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
// Shared by all ranks: who has joined which split, and the collectives of each communicator in order.
enum { MOST_RANKS = 64, SPLITS = 1 << 12, CALLS = 1 << 18 };
typedef struct {
  uint64_t key;
  int color[MOST_RANKS], order[MOST_RANKS];
} Split;
typedef struct {
  uint64_t key, what;
} Call;
static struct Shared {
  uint64_t ids;
  Split splits[SPLITS];
  Call calls[CALLS];
} *shared;
__attribute__((constructor)) static void share(void) {
  const char *path = getenv("FAKEGPU_SHARED");
  int file = path ? open(path, O_RDWR | O_CREAT, 0600) : -1;
  if (file >= 0 && ftruncate(file, sizeof *shared)) abort();
  shared = mmap(0, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | (file < 0 ? MAP_ANONYMOUS : 0), file, 0);
}
static uint64_t hash(uint64_t a, uint64_t b) {
  a = (a ^ b * 0x9E3779B97F4A7C15ull) * 0xFF51AFD7ED558CCDull;
  return (a ^ a >> 32) | 1;
}
static void fail(const char *what) {
  fprintf(stderr, "fakegpu: %s\n", what);
  abort();
}
static int new_comm(Comm **c, int n, int r, uint64_t id, const char *how) {
  *c = calloc(1, sizeof **c);
  (*c)->ranks = n;
  (*c)->rank = r;
  (*c)->id = id;
  note('I', how, 0, (void *)id, 0, n, r);
  return 0;
}
static Split *split_of(uint64_t key) {
  for (uint64_t i = key;; i++) {
    Split *one = &shared->splits[i % SPLITS];
    if (__sync_bool_compare_and_swap(&one->key, 0, key) || one->key == key) return one;
  }
}
// As NCCL: every rank of the parent must take part. What they call it with says who is with whom.
int ncclCommSplit(Comm *p, int color, int key, Comm **c, void *config) {
  uint64_t number = p->splits++;
  Split *all = split_of(hash(p->id, number));
  if (p->ranks > MOST_RANKS) fail("too many ranks");
  all->order[p->rank] = key;
  __sync_synchronize();
  all->color[p->rank] = color < 0 ? -1 : color + 1;
  for (int r = 0, waits = 0; r < p->ranks;) {
    if (all->color[r]) {
      r++;
      continue;
    }
    if (waits++ > 20000) {
      fprintf(stderr, "fakegpu: rank %d of %d never called ncclCommSplit number %lu of its communicator\n", r, p->ranks,
              number);
      return 2;
    }
    usleep(1000);
  }
  if (color < 0) {
    *c = 0;
    note('I', "ncclCommSplit, no color", 0, 0, 0, 0, 0);
    return 0;
  }
  int n = 0, mine = 0;
  for (int r = 0; r < p->ranks; r++)
    if (all->color[r] == color + 1) {
      n++;
      mine += all->order[r] < key || (all->order[r] == key && r < p->rank);
    }
  return new_comm(c, n, mine, hash(hash(p->id, number), color + 1), "ncclCommSplit");
}
// The n-th collective of a communicator is the same on all its ranks.
static void check(Comm *c, const char *name, uint64_t bytes) {
  uint64_t key = hash(hash(c->id, 77), c->calls++), what = bytes * 31;
  for (const char *p = name; *p; p++) what = hash(what, *p);
  for (uint64_t i = key;; i++) {
    Call *one = &shared->calls[i % CALLS];
    if (__sync_bool_compare_and_swap(&one->key, 0, key)) {
      one->what = what;
      return;
    }
    if (one->key != key) continue;
    for (int waits = 0; !one->what && waits < 1000; waits++) usleep(100);
    if (one->what != what) {
      fprintf(stderr,
              "fakegpu: rank %d calls %s of %lu bytes where another rank of the communicator calls something else\n",
              c->rank, name, bytes);
      abort();
    }
    return;
  }
}
static uint64_t id_of(Id id) {
  uint64_t n;
  memcpy(&n, id.bytes, sizeof n);
  return n;
}
int ncclGetUniqueId(Id *id) {
  uint64_t n = hash(__sync_add_and_fetch(&shared->ids, 1), 3);
  memset(id, 0, sizeof *id);
  memcpy(id->bytes, &n, sizeof n);
  return 0;
}
int ncclCommGetUniqueId(Comm *c, Id *id) { return ncclGetUniqueId(id); }
int ncclCommInitRank(Comm **c, int n, Id id, int r) { return new_comm(c, n, r, id_of(id), "ncclCommInitRank"); }
int ncclCommInitRankConfig(Comm **c, int n, Id id, int r, void *config) {
  return new_comm(c, n, r, id_of(id), "ncclCommInitRankConfig");
}
int ncclCommInitRankScalable(Comm **c, int n, int r, int many, Id *ids, void *config) {
  return new_comm(c, n, r, id_of(*ids), "ncclCommInitRankScalable");
}
int ncclGetVersion(int *v) {
  *v = 23007;
  return 0;
}
int ncclCommDestroy(Comm *c) { return 0; }
int ncclCommAbort(Comm *c) { return 0; }
int ncclCommFinalize(Comm *c) { return 0; }
int ncclCommCount(Comm *c, int *n) {
  *n = c->ranks;
  return 0;
}
int ncclCommUserRank(Comm *c, int *r) {
  *r = c->rank;
  return 0;
}
int ncclCommGetAsyncError(Comm *c, int *e) {
  *e = 0;
  return 0;
}
int ncclCommRegister(Comm *c, void *b, size_t n, void **h) {
  *h = b;
  return 0;
}
int ncclCommDeregister(Comm *c, void *h) { return 0; }
int ncclCommWindowRegister(Comm *c, void *b, size_t n, void **w, int f) {
  *w = b;
  return 0;
}
int ncclCommWindowDeregister(Comm *c, void *w) { return 0; }
int ncclMemAlloc(void **p, size_t n) { return take(p, n, 2, "ncclMemAlloc"); }
int ncclMemFree(void *p) { return release(p, "ncclMemFree"); }
const char *ncclGetErrorString(int e) { return "fakegpu NCCL error"; }
const char *ncclGetLastError(Comm *c) { return ""; }
int ncclGroupStart(void) {
  note('N', "group start", 0, 0, 0, 0, 0);
  return 0;
}
int ncclGroupEnd(void) {
  note('N', "group end", 0, 0, 0, 0, 0);
  return 0;
}
static int send(const char *name, Comm *c, size_t n, int type, void *s, uint64_t peer) {
  note('N', name, s, (void *)c->id, n * SIZE[type], c->ranks, peer);
  check(c, name, n * SIZE[type]);
  return 0;
}
// An uneven all-to-all sends a rank's own part to itself, which leaves no bytes on any link.
static int move(const char *name, Comm *c, size_t n, int type, void *s, int peer) {
  note('N', name, s, (void *)c->id, peer == c->rank ? 0 : n * SIZE[type], c->ranks, peer);
  return 0;
}
int ncclAllReduce(const void *a, void *b, size_t n, int t, int op, Comm *c, void *s) {
  return send("ncclAllReduce", c, n, t, s, op);
}
int ncclReduce(const void *a, void *b, size_t n, int t, int op, int root, Comm *c, void *s) {
  return send("ncclReduce", c, n, t, s, root);
}
int ncclBroadcast(const void *a, void *b, size_t n, int t, int root, Comm *c, void *s) {
  return send("ncclBroadcast", c, n, t, s, root);
}
int ncclBcast(void *b, size_t n, int t, int root, Comm *c, void *s) { return send("ncclBroadcast", c, n, t, s, root); }
int ncclReduceScatter(const void *a, void *b, size_t n, int t, int op, Comm *c, void *s) {
  return send("ncclReduceScatter", c, n, t, s, op);
}
int ncclAllGather(const void *a, void *b, size_t n, int t, Comm *c, void *s) {
  return send("ncclAllGather", c, n, t, s, 0);
}
int ncclAlltoAll(const void *a, void *b, size_t n, int t, Comm *c, void *s) {
  return send("ncclAlltoAll", c, n, t, s, 0);
}
int ncclSend(const void *a, size_t n, int t, int peer, Comm *c, void *s) { return move("ncclSend", c, n, t, s, peer); }
int ncclRecv(void *a, size_t n, int t, int peer, Comm *c, void *s) { return move("ncclRecv", c, n, t, s, peer); }
