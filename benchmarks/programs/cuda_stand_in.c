/* CUDA's runtime for `ort_cuda_nodes.py`: one GPU of SM 90 whose memory is the host's and whose kernels do nothing.

   It has only the functions whose results the provider reads; all other functions of CUDA's libraries that it imports are
   generated and return 0, success. `stand_in_counts` returns the counts. */

#include <stdlib.h>
#include <string.h>

typedef int Status;
typedef void *Pointer;

enum { MAJOR = 9, MINOR = 0, PROCESSORS = 132, VERSION = 13000 };
enum { ATTRIBUTE_WARP = 10, ATTRIBUTE_PROCESSORS = 16, ATTRIBUTE_MAJOR = 75, ATTRIBUTE_MINOR = 76 };
enum { WITHIN = 3 }; /* cudaMemcpyDeviceToDevice */

/* Offsets in cudaDeviceProp of CUDA 13. */
enum { TOTAL = 288, SHARED = 296, REGISTERS = 304, WARP = 308, THREADS = 320, BLOCK = 324, GRID = 336, SM_MAJOR = 360 };
enum { SM_MINOR = 364, MULTI_PROCESSORS = 384, ALL = 1008 };

static long launches, synchronizations, streams, copies;

void stand_in_counts(long *counts) {
    counts[0] = launches, counts[1] = synchronizations, counts[2] = streams, counts[3] = copies;
    launches = synchronizations = streams = copies = 0;
}

static void put(char *properties, int offset, int value) { memcpy(properties + offset, &value, sizeof value); }
static void put_size(char *properties, int offset, size_t value) { memcpy(properties + offset, &value, sizeof value); }

Status cudaGetDeviceProperties(char *properties, int device) {
    memset(properties, 0, ALL);
    strcpy(properties, "a stand-in");
    put_size(properties, TOTAL, (size_t)80 << 30), put_size(properties, SHARED, 48 << 10);
    put(properties, REGISTERS, 65536), put(properties, WARP, 32), put(properties, THREADS, 1024);
    for (int axis = 0; axis < 3; axis++) put(properties, BLOCK + 4 * axis, 64), put(properties, GRID + 4 * axis, 65535);
    put(properties, SM_MAJOR, MAJOR), put(properties, SM_MINOR, MINOR), put(properties, MULTI_PROCESSORS, PROCESSORS);
    return 0;
}

Status cudaDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == ATTRIBUTE_MAJOR        ? MAJOR
             : attribute == ATTRIBUTE_MINOR      ? MINOR
             : attribute == ATTRIBUTE_PROCESSORS ? PROCESSORS
             : attribute == ATTRIBUTE_WARP       ? 32
                                                 : 1;
    return 0;
}

Status cudaGetDeviceCount(int *count) { return *count = 1, 0; }
Status cudaGetDevice(int *device) { return *device = 0; }
Status cudaDriverGetVersion(int *version) { return *version = VERSION, 0; }
Status cudaRuntimeGetVersion(int *version) { return *version = VERSION, 0; }
Status cudaMemGetInfo(size_t *free, size_t *total) { return *free = *total = (size_t)80 << 30, 0; }

Status cudaMalloc(Pointer *memory, size_t size) { return *memory = aligned_alloc(256, (size + 255) / 256 * 256), 0; }
Status cudaHostAlloc(Pointer *memory, size_t size, unsigned flags) { return cudaMalloc(memory, size); }
Status cudaMallocHost(Pointer *memory, size_t size) { return cudaMalloc(memory, size); }
Status cudaMallocFromPoolAsync(Pointer *memory, size_t size, Pointer pool, Pointer stream) {
    return cudaMalloc(memory, size);
}
Status cudaFree(Pointer memory) { return free(memory), 0; }
Status cudaFreeHost(Pointer memory) { return free(memory), 0; }
Status cudaFreeAsync(Pointer memory, Pointer stream) { return free(memory), 0; }
Status cudaMemcpy(Pointer to, Pointer from, size_t size, int kind) {
    copies += kind != WITHIN;
    return memcpy(to, from, size), 0;
}
Status cudaMemcpyAsync(Pointer to, Pointer from, size_t size, int kind, Pointer stream) {
    return cudaMemcpy(to, from, size, kind);
}
Status cudaMemset(Pointer memory, int value, size_t size) { return memset(memory, value, size), 0; }
Status cudaMemsetAsync(Pointer memory, int value, size_t size, Pointer stream) { return memset(memory, value, size), 0; }

Status cudaStreamCreate(Pointer *stream) { return streams++, *stream = malloc(8), 0; }
Status cudaStreamCreateWithFlags(Pointer *stream, unsigned flags) { return cudaStreamCreate(stream); }
Status cudaStreamSynchronize(Pointer stream) { return synchronizations++, 0; }
Status cudaDeviceSynchronize(void) { return synchronizations++, 0; }
Status cudaEventSynchronize(Pointer event) { return synchronizations++, 0; }
Status cudaStreamIsCapturing(Pointer stream, int *status) { return *status = 0; }
Status cudaEventCreate(Pointer *event) { return *event = malloc(8), 0; }
Status cudaEventCreateWithFlags(Pointer *event, unsigned flags) { return cudaEventCreate(event); }
Status cudaLaunchHostFunc(Pointer stream, void (*function)(Pointer), Pointer data) { return function(data), 0; }

Status cudaLaunchKernel(Pointer kernel) { return launches++, 0; }
Status __cudaLaunchKernel(Pointer kernel) { return launches++, 0; }
Status cudaLaunchKernelExC(Pointer config) { return launches++, 0; }
Status cudaLaunchCooperativeKernel(Pointer kernel) { return launches++, 0; }
Status __cudaGetKernel(Pointer *kernel, Pointer function) { return *kernel = function, 0; }
Status __cudaPopCallConfiguration(Pointer grid, Pointer block, size_t *shared, Pointer *stream) {
    memset(grid, 0, 12), memset(block, 0, 12);
    return *shared = 0, *stream = 0, 0;
}
Pointer *__cudaRegisterFatBinary(Pointer image) {
    static Pointer handle;
    return &handle;
}
Status cudaPointerGetAttributes(int *attributes, Pointer memory) {
    memset(attributes, 0, 32);
    return attributes[0] = 2, 0; /* device memory */
}
Status cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, Pointer kernel, int size) {
    return *blocks = 2, 0;
}
const char *cudaGetErrorString(Status status) { return "an error of the stand-in"; }
const char *cudaGetErrorName(Status status) { return "standInError"; }
