// A CUDA driver without a GPU, for tests/tools/direct.py: it logs what every launch would get.
#include "cuda.h"
#include <string.h>

#define MAX_FUNCTIONS 256
#define MAX_PARAMETERS 128
typedef struct { int count, sizes[MAX_PARAMETERS]; } Parameters;
static Parameters known[MAX_FUNCTIONS], next;
static unsigned long functions;
static unsigned char log_[1 << 16];
static long logged;

static void put(const void *what, int size) {
  if (logged + size <= (long)sizeof log_) memcpy(log_ + logged, what, size);
  logged += size;
}

// Sizes of the parameters of the kernel that is loaded next.
void stub_expect(int count, const int *sizes) {
  next.count = count;
  memcpy(next.sizes, sizes, count * sizeof(int));
}
// Bytes logged since the last call.
long stub_take(unsigned char *into) {
  long size = logged;
  memcpy(into, log_, size < (long)sizeof log_ ? size : (long)sizeof log_);
  logged = 0;
  return size;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  Parameters *these = &known[(unsigned long)function];
  put(&function, sizeof function);
  put(&config->gridDimX, 12);
  put(&config->blockDimX, 12);
  put(&config->sharedMemBytes, 4);
  put(&config->hStream, 8);
  put(&config->numAttrs, 4);
  for (int i = 0; i < these->count; i++) put(parameters[i], these->sizes[i]);
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  known[++functions] = next;
  *module = (CUmodule)functions;
  return functions < MAX_FUNCTIONS - 1 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)module;
  return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base, const cuuint64_t *shape,
    const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *element, CUtensorMapInterleave interleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  unsigned long long *to = (unsigned long long *)map;
  memset(map, 0, sizeof *map);
  *to++ = (unsigned long long)base;
  *to++ = type | rank << 8 | swizzle << 16 | fill << 24;
  for (unsigned i = 0; i < rank; i++) *to++ = shape[i] | (unsigned long long)box[i] << 48;
  for (unsigned i = 0; i + 1 < rank; i++) *to++ = strides[i];
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  *value = which == CU_DEVICE_ATTRIBUTE_WARP_SIZE ? 32 : 232448;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "the stub has no more room";
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return cuCtxGetCurrent(context); }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) { *count = 1; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit which) { *value = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit which, size_t value) { return CUDA_SUCCESS; }
// Asked for by Triton 3.7 and later.
CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { *status = CU_STREAM_CAPTURE_STATUS_NONE; return CUDA_SUCCESS; }
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *which, void **values, CUdeviceptr pointer) {
  for (unsigned i = 0; i < count; i++)
    if (which[i] == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)values[i] = pointer;
    else *(int *)values[i] = 0;
  return CUDA_SUCCESS;
}
