/* libcuda.so.1 and libcudart.so.12 of a machine with one H200 that computes nothing: enough of both for cuDNN to
   plan graphs without a GPU (`cudnn.create_device_properties`). Launches fail with CUDA_ERROR_NO_DEVICE. The attributes
   are numbered as in cuda.h and driver_types.h of CUDA 12. */
#include <string.h>

#define SUCCEED(name) int name() { return 0; }
#define FAIL(name) int name() { return 100; }
#define MAKE(name) int name(void **made) { *made = (void *)(last += 64); return 0; }

static long last = 64;

static int attribute(int number) {
    switch (number) {
        case 8: return 49152;    /* shared memory of a block */
        case 16: return 132;     /* multiprocessors */
        case 75: return 9;       /* compute capability 9.0 */
        case 97: return 232448;  /* shared memory of a block that asks for more */
        default: return 0;
    }
}

int cuDeviceGetAttribute(int *value, int number, int device) { *value = attribute(number); return 0; }
int cudaDeviceGetAttribute(int *value, int number, int device) { *value = attribute(number); return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 0; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuCtxGetLimit(unsigned long *value, int limit) { *value = 0; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "no device"; return 0; }
int cuGetErrorName(int error, const char **text) { *text = "CUDA_ERROR_NO_DEVICE"; return 0; }
const char *cudaGetErrorString(int error) { return "no device"; }
int cuKernelGetAttribute(int *value) { *value = 0; return 0; }
int cuOccupancyMaxPotentialClusterSize(int *value) { *value = 8; return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *value) { *value = 1; return 0; }

/* struct cudaDeviceProp: name at 0, major and minor at 360, multiProcessorCount at 388. */
int cudaGetDeviceProperties(char *properties, int device) {
    memset(properties, 0, 400);
    strcpy(properties, "NVIDIA H200");
    *(int *)(properties + 360) = 9;
    *(int *)(properties + 388) = 132;
    return 0;
}

/* A table of functions that nobody documents: its first word is its size. */
static int nothing(void) { return 0; }
static void *table[512];
int cuGetExportTable(void **found, void *id) {
    for (int i = 1; i < 512; i++) table[i] = (void *)nothing;
    table[0] = (void *)0x28L;
    *found = table;
    return 0;
}

MAKE(cuLibraryLoadData) MAKE(cuLibraryLoadFromFile) MAKE(cuLibraryGetKernel) MAKE(cuKernelGetFunction)
MAKE(cuModuleGetFunction) MAKE(cuModuleLoadData)
SUCCEED(cuInit) SUCCEED(cuCtxPopCurrent) SUCCEED(cuCtxPushCurrent) SUCCEED(cuKernelSetAttribute)
SUCCEED(cuLibraryUnload) SUCCEED(cuModuleUnload) SUCCEED(cuLinkDestroy) SUCCEED(cuStreamGetCtx)
SUCCEED(cuTensorMapEncodeIm2col) SUCCEED(cuTensorMapEncodeTiled)
SUCCEED(cudaDeviceSynchronize) SUCCEED(cudaGetLastError) SUCCEED(cudaStreamIsCapturing)
FAIL(cuLaunchCooperativeKernel) FAIL(cuLaunchKernel) FAIL(cuLaunchKernelEx)
FAIL(cuLinkAddData) FAIL(cuLinkComplete) FAIL(cuLinkCreate)
