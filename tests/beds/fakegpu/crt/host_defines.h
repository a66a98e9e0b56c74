#pragma once
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDAAPI
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __annotate__(a)
#define __location__(a)
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __no_return__
#define __forceinline__ inline
#define __noinline__
#define __inline__ inline
#define CUDA_CB
#define __grid_constant__
#define __cluster_dims__(...)
