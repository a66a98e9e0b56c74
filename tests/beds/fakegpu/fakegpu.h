// A CUDA runtime, cuBLAS and NCCL that compute nothing and note everything. Loaded ahead of the real ones (LD_PRELOAD),
// they let torch's own host code run where no GPU is: its checks of shapes and dtypes, its allocator, streams and
// process groups. Kernels do nothing, so device memory holds what copies from the host have put there, else zeros.
#pragma once
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <fcntl.h>

typedef struct {
  char kind; // see KINDS in __init__.py
  const char *name;
  uint64_t stream, event, bytes, a, b;
} Note;
typedef struct {
  uintptr_t at;
  size_t size;
  int type, device; // type: 1 page-locked memory of the host, 2 of a device
} Range;

#pragma GCC visibility push(hidden)
void note(char kind, const char *name, const void *stream, const void *event, uint64_t bytes, uint64_t a, uint64_t b);
void synchronised(const char *name, const void *stream, const void *event); // the host waits for the device
void *map(size_t n);
void remember(void *p, size_t n, int type);
Range find(const void *p);
cudaError_t take(void **p, size_t n, int type, const char *name);
cudaError_t release(void *p, const char *name);
extern pthread_mutex_t lock;
extern int not_ready; // what events answer when they are asked
#pragma GCC visibility pop
