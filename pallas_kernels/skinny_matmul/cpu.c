// y[out, n] = weight[out, in] x[in, n] for few columns n, in float32: the product of a decoding step on a CPU.
//
// Such a product is bound by reading the weights. Each row of them is read once, in order, and multiplied by all columns
// while it is in registers; nothing is packed first. What is summed, and in which order, does not depend on n: a token's
// activations come out bit for bit the same, however many tokens are carried beside it.
//
// An XLA FFI handler (c_api.h comes with jaxlib). The rows are cut into chunks; the calling thread and threads of XLA's
// own pool take one after the other. Compiled by cpu.py.

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

enum {
  kLanes = 8,
  kMostColumns = 8,
  kAhead = 384,         // floats of a row that are fetched before they are needed; the hardware alone is too late
  kLine = 16,           // floats of a cache line
  kChunk = 1 << 14,     // weights that one thread takes at a time, at least
  kChunksPerThread = 8  // so that a thread which others slow down leaves work to them
};

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

static inline Lanes load(const float* p) {
  Lanes v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline float sum(Lanes v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// Where column c of x at feature i lies: [in / lanes, n, lanes], so that a row of weights goes over x once, in order.
static inline int64_t place(int64_t i, int64_t c, int64_t n) { return (i - i % kLanes) * n + c * kLanes + i % kLanes; }

// Rows begin..end of the product. `n` is a constant wherever this is called.
static inline __attribute__((always_inline)) void multiply_rows(const float* weight, const float* x, float* y,
                                                                int64_t begin, int64_t end, int64_t in, int n) {
  for (int64_t row = begin; row < end; ++row) {
    const float* w = weight + row * in;
    Lanes total[kMostColumns];
    for (int c = 0; c < n; ++c) total[c] = (Lanes){0};
    int64_t i = 0;
    for (; i + kLine <= in; i += kLine) {
      __builtin_prefetch(w + i + kAhead);
      for (int half = 0; half < kLine; half += kLanes) {
        const Lanes part = load(w + i + half);
        for (int c = 0; c < n; ++c) total[c] += part * load(x + place(i + half, c, n));
      }
    }
    for (; i < in; i += kLanes) {  // padded with zeros, as x is
      Lanes part = {0};
      memcpy(&part, w + i, sizeof(float) * (size_t)(in - i < kLanes ? in - i : kLanes));
      for (int c = 0; c < n; ++c) total[c] += part * load(x + place(i, c, n));
    }
    for (int c = 0; c < n; ++c) y[row * n + c] = sum(total[c]);
  }
}

// One product. Threads that come late find no chunk left and touch nothing but this record, which the last one frees.
typedef struct {
  atomic_int users;
  atomic_int_fast64_t next, done;
  int64_t chunks, rows_per_chunk, out, in;
  int n;
  const float* weight;
  float* y;
  float x[];
} Product;

static void take_chunks(Product* p) {
  for (int64_t chunk; (chunk = atomic_fetch_add(&p->next, 1)) < p->chunks;) {
    const int64_t begin = chunk * p->rows_per_chunk;
    const int64_t end = begin + p->rows_per_chunk < p->out ? begin + p->rows_per_chunk : p->out;
    switch (p->n) {
#define CASE(N) \
  case N:       \
    multiply_rows(p->weight, p->x, p->y, begin, end, p->in, N); \
    break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
    }
    atomic_fetch_add(&p->done, 1);
  }
}

static void leave(Product* p) {
  if (atomic_fetch_sub(&p->users, 1) == 1) free(p);
}

static void help(void* data) {
  take_chunks(data);
  leave(data);
}

static XLA_FFI_Error* failed(const XLA_FFI_Api* api, XLA_FFI_Error_Code code, const char* message) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message, code};
  return api->XLA_FFI_Error_Create(&args);
}

// Whether the XLA call that returned `error` worked; frees the error.
static int worked(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  if (error) api->XLA_FFI_Error_Destroy(&args);
  return !error;
}

static XLA_FFI_Error* multiply(const XLA_FFI_CallFrame* frame, const XLA_FFI_Buffer* weight, const XLA_FFI_Buffer* x,
                               const XLA_FFI_Buffer* y) {
  const int64_t out = weight->dims[0], in = weight->dims[1], n = x->dims[1];
  const XLA_FFI_Api* api = frame->api;
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args pool = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL, frame->ctx,
                                             &threads};
  if (!worked(api, api->XLA_FFI_ThreadPool_NumThreads(&pool))) threads = 1;

  const int64_t padded = (in + kLanes - 1) / kLanes * kLanes;
  Product* p = malloc(sizeof(Product) + sizeof(float) * (size_t)(n * padded));
  if (!p) return failed(api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "skinny_matmul: out of memory");
  const int64_t most = out * in / kChunk + 1, wanted = threads * kChunksPerThread;
  const int64_t chunks = most < wanted ? most : wanted;
  p->rows_per_chunk = (out + chunks - 1) / chunks;
  p->chunks = (out + p->rows_per_chunk - 1) / p->rows_per_chunk;
  p->out = out, p->in = in, p->n = (int)n, p->weight = weight->data, p->y = y->data;
  const float* columns = x->data;
  for (int64_t i = 0; i < padded; ++i)
    for (int64_t c = 0; c < n; ++c) p->x[place(i, c, n)] = i < in ? columns[i * n + c] : 0;
  atomic_init(&p->next, 0), atomic_init(&p->done, 0), atomic_init(&p->users, 1);

  for (int64_t helper = 1; helper < threads && helper < p->chunks; ++helper) {
    atomic_fetch_add(&p->users, 1);
    XLA_FFI_ThreadPool_Schedule_Args task = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, frame->ctx, help, p};
    if (!worked(api, api->XLA_FFI_ThreadPool_Schedule(&task))) {  // this thread does it all
      leave(p);
      break;
    }
  }
  take_chunks(p);
  while (atomic_load(&p->done) < p->chunks) sched_yield();  // for the chunks that others are busy with
  leave(p);
  return NULL;
}

XLA_FFI_Error* skinny_matmul(XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Metadata_Extension* asked = (const void*)frame->extension_start;
  if (asked && asked->extension_base.type == XLA_FFI_Extension_Metadata) {  // which version of its API is this?
    asked->metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    asked->metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return NULL;
  }
  if (frame->args.size != 2 || frame->rets.size != 1)
    return failed(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT, "skinny_matmul: takes weight and x, returns y");
  const XLA_FFI_Buffer *weight = frame->args.args[0], *x = frame->args.args[1], *y = frame->rets.rets[0];
  if (weight->dtype != XLA_FFI_DataType_F32 || x->dtype != XLA_FFI_DataType_F32 || weight->rank != 2 || x->rank != 2 ||
      x->dims[0] != weight->dims[1] || x->dims[1] < 1 || x->dims[1] > kMostColumns)
    return failed(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                  "skinny_matmul: weight [out, in] and x [in, 1..8] in float32");
  return multiply(frame, weight, x, y);
}
