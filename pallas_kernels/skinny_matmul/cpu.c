// y[out, n] = weight[out, in] x[in, n] for few columns n, in float32: the product of a decoding step on a CPU.
//
// Such a product is bound by reading the weights. Each row of them is read once, in order, and multiplied by all columns
// while it is in registers; nothing is packed first. What is summed, and in which order, does not depend on n: a token's
// activations come out bit for bit the same, however many tokens are carried beside it.

#include "../native/job.h"

enum {
  kMostColumns = 8,
  kAhead = 384,         // floats of a row that are fetched before they are needed; the hardware alone is too late
  kLine = 16,           // floats of a cache line
  kChunk = 1 << 14,     // weights that one thread takes at a time, at least
  kChunksPerThread = 8  // so that a thread which others slow down leaves work to them
};

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

typedef struct {
  Job job;
  int64_t rows_per_chunk, out, in;
  int n;
  const float* weight;
  float* y;
  float x[];
} Product;

static void multiply_chunk(const Job* job, int64_t chunk) {
  const Product* p = (const Product*)job;
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
}

XLA_FFI_Error* skinny_matmul(XLA_FFI_CallFrame* frame) {
  if (asked_for_version(frame)) return NULL;
  if (frame->args.size != 2 || frame->rets.size != 1)
    return failed(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, "skinny_matmul: takes weight and x, returns y");
  const XLA_FFI_Buffer *weight = frame->args.args[0], *x = frame->args.args[1], *y = frame->rets.rets[0];
  if (weight->dtype != XLA_FFI_DataType_F32 || x->dtype != XLA_FFI_DataType_F32 || weight->rank != 2 || x->rank != 2 ||
      weight->dims[0] < 1 || x->dims[0] != weight->dims[1] || x->dims[1] < 1 || x->dims[1] > kMostColumns)
    return failed(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                  "skinny_matmul: weight [out, in] and x [in, 1..8] in float32");
  const int64_t out = weight->dims[0], in = weight->dims[1], n = x->dims[1];
  const int64_t padded = (in + kLanes - 1) / kLanes * kLanes;
  Product* p = malloc(sizeof(Product) + sizeof(float) * (size_t)(n * padded));
  if (!p) return failed(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "skinny_matmul: out of memory");

  const int64_t threads = count_threads(frame), wanted = threads * kChunksPerThread, most = out * in / kChunk + 1;
  const int64_t chunks = most < wanted ? most : wanted;
  p->rows_per_chunk = (out + chunks - 1) / chunks;
  p->job.chunks = (out + p->rows_per_chunk - 1) / p->rows_per_chunk;
  p->job.run = multiply_chunk;
  p->out = out, p->in = in, p->n = (int)n, p->weight = weight->data, p->y = y->data;
  const float* columns = x->data;
  for (int64_t i = 0; i < padded; ++i)
    for (int64_t c = 0; c < n; ++c) p->x[place(i, c, n)] = i < in ? columns[i * n + c] : 0;
  run_job(frame, &p->job, threads);
  return NULL;
}
