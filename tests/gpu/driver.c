/* In place of libcuda.so.1, the driver: what torch and Triton ask of it. build.py generates the rest. */

#include <stddef.h>
#include <stdlib.h>

static int done(void) { return 0; }
static void *handle(void) { return calloc(1, 64); }

int cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return 0; }
int cuDeviceGetCount(int *number) { *number = 1; return 0; }
int cuDeviceGet(int *device, int number) { *device = 0; return 0; }
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *result) {
  *function = done;
  if (result) *result = 0;
  return 0;
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = handle(); return 0; }
int cuCtxGetCurrent(void **context) { static int current; *context = &current; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "an error of tests/gpu"; return 0; }
int cuModuleLoad(void **module, const char *name) { *module = handle(); return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = handle(); return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = handle(); return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0;              /* threads of a block, registers */
  return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 1: *value = 1024; break;                                        /* threads of a block */
    case 8: *value = 49152; break;                                       /* shared memory */
    case 10: *value = 32; break;                                         /* threads of a warp */
    case 12: case 82: *value = 65536; break;                             /* registers */
    case 16: *value = 132; break;                                        /* multiprocessors */
    case 39: *value = 2048; break;                                       /* threads of a multiprocessor */
    case 75: *value = 9; break;                                          /* capability 9.0 */
    case 76: *value = 0; break;
    case 81: case 97: *value = 232448; break;                            /* shared memory, by choice */
    default: *value = 1;
  }
  return 0;
}
