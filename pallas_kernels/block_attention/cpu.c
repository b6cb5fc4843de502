// Attention of a block of queries to a cache and to their block, in float32, on a CPU: keys and values that a row sees are
// read once per few queries, straight from the cache; a step's dozen small operations are one call.
//
// A query's result depends neither on the queries beside it nor on what it does not see.

#include "../native/job.h"

enum { kQueries = 4, kAhead = 512 };

typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(int32_t))));

typedef struct {
  Job job;
  int causal;
  int64_t batch, size, heads, dim, groups, slots, own;  // B, K, N, H, G, S, J
  const float *queries, *context_keys, *context_values, *block_keys, *block_values;
  const int32_t* visible;
  float* mixed;
  float scores[];  // of every chunk, kQueries rows of `row` floats
} Attention;

static inline int64_t score_row(int64_t slots, int64_t own) { return (slots + own + kLanes - 1) / kLanes * kLanes; }

static inline Lanes all(float x) { return (Lanes){x, x, x, x, x, x, x, x}; }

// exp(x) for x <= 0: 2^n exp(r), |r| <= ln(2) / 2, by its series. Below -87: exp(-87). NaN stays NaN.
static inline Lanes exponential(Lanes x) {
  const Lanes least = all(-87.0f), shift = all(12582912.0f);  // adding 1.5 * 2^23 rounds to a whole number
  const Ints low = x < least;
  x = (Lanes)(((Ints)least & low) | ((Ints)x & ~low));
  const Lanes shifted = x * 1.44269504f + shift, n = shifted - shift;
  const Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln(2) in two parts
  Lanes series = r * (1.0f / 5040) + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  return series * (Lanes)(((Ints)shifted - (Ints)shift + 127) << 23);
}

// Scores of one key with all queries of a chunk.
static inline void score(const float* key, const float* const* q, int64_t dim, float* scores, int64_t row) {
  Lanes total[kQueries] = {0};
  for (int64_t h = 0; h < dim; h += kLanes) {
    const Lanes part = load(key + h);
    for (int i = 0; i < kQueries; ++i) total[i] += part * load(q[i] + h);
  }
  for (int i = 0; i < kQueries; ++i) scores[i * row] = sum(total[i]);
}

// Scores become weights; what follows the first `count` of them becomes 0. Returns their sum.
static float softmax(float* scores, int64_t count) {
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int64_t s = count; s < padded; ++s) scores[s] = scores[0];
  Lanes top = load(scores);
  for (int64_t s = kLanes; s < padded; s += kLanes) {
    const Lanes part = load(scores + s);
    const Ints more = part > top;
    top = (Lanes)(((Ints)part & more) | ((Ints)top & ~more));
  }
  float most = top[0];
  for (int i = 1; i < kLanes; ++i) most = top[i] > most ? top[i] : most;
  Lanes total = {0};
  for (int64_t s = 0; s < padded; s += kLanes) {
    Lanes weight = exponential(load(scores + s) - most);
    for (int64_t i = count - s; i < kLanes; ++i) weight[i] = 0;
    memcpy(scores + s, &weight, sizeof weight);
    total += weight;
  }
  return sum(total);
}

static void attend_chunk(const Job* job, int64_t chunk) {
  const Attention* p = (const Attention*)job;
  const int64_t dim = p->dim, ratio = p->heads / p->groups, rows = p->size * ratio;
  const int64_t per_group = (rows + kQueries - 1) / kQueries, row = score_row(p->slots, p->own);
  const int64_t first = chunk % per_group * kQueries, g = chunk / per_group % p->groups;
  const int64_t b = chunk / per_group / p->groups;
  const int64_t seen = p->visible[b] < 0 ? 0 : p->visible[b] < p->slots ? p->visible[b] : p->slots;
  const int64_t many = rows - first < kQueries ? rows - first : kQueries;
  float* scores = (float*)p->scores + chunk * kQueries * row;

  const float* q[kQueries];
  int64_t at[kQueries], token[kQueries];
  for (int64_t i = 0; i < kQueries; ++i) {
    const int64_t r = first + (i < many ? i : 0);  // too few: the first again, its result is not kept
    token[i] = r / ratio;
    at[i] = ((b * p->size + token[i]) * p->heads + g * ratio + r % ratio) * dim;
    q[i] = p->queries + at[i];
  }
  const float* keys = p->context_keys + (b * p->groups + g) * p->slots * dim;
  const float* values = p->context_values + (b * p->groups + g) * p->slots * dim;
  for (int64_t s = 0; s < seen; ++s) {
    __builtin_prefetch(keys + s * dim + kAhead);
    score(keys + s * dim, q, dim, scores + s, row);
  }
  const int64_t own = p->causal ? token[many - 1] + 1 : p->own;
  for (int64_t t = 0; t < own; ++t)
    score(p->block_keys + ((b * p->own + t) * p->groups + g) * dim, q, dim, scores + seen + t, row);

  for (int64_t i = 0; i < many; ++i) {
    const int64_t count = seen + (p->causal ? token[i] + 1 : p->own);
    float* weights = scores + i * row;
    const float total = softmax(weights, count);
    for (int64_t h = 0; h < dim; h += 8 * kLanes) {
      const int wide = dim - h < 8 * kLanes ? (int)((dim - h) / kLanes) : 8;
      Lanes mixed[8] = {0};
      if (wide == 8) {
        for (int64_t s = 0; s < seen; ++s)
          for (int l = 0; l < 8; ++l) mixed[l] += load(values + s * dim + h + l * kLanes) * weights[s];
      } else {
        for (int64_t s = 0; s < seen; ++s)
          for (int l = 0; l < wide; ++l) mixed[l] += load(values + s * dim + h + l * kLanes) * weights[s];
      }
      for (int64_t s = seen; s < count; ++s) {
        const float* value = p->block_values + ((b * p->own + s - seen) * p->groups + g) * dim + h;
        for (int l = 0; l < wide; ++l) mixed[l] += load(value + l * kLanes) * weights[s];
      }
      for (int l = 0; l < wide; ++l) {
        const Lanes result = mixed[l] / total;
        memcpy(p->mixed + at[i] + h + l * kLanes, &result, sizeof result);
      }
    }
  }
}

static XLA_FFI_Error* attend(const XLA_FFI_CallFrame* frame, int causal) {
  if (asked_for_version(frame)) return NULL;
  if (frame->args.size != 6 || frame->rets.size != 1)
    return failed(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, "block_attention: six arguments, one result");
  const XLA_FFI_Buffer* const* a = (const XLA_FFI_Buffer* const*)frame->args.args;
  const XLA_FFI_Buffer *queries = a[0], *keys = a[1], *visible = a[3], *own = a[4], *mixed = frame->rets.rets[0];
  for (int i = 0; i < 6; ++i)
    if (a[i]->dtype != (i == 3 ? XLA_FFI_DataType_S32 : XLA_FFI_DataType_F32) || a[i]->rank != (i == 3 ? 1 : 4))
      return failed(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, "block_attention: float32, visible int32");
  const int64_t batch = queries->dims[0], size = queries->dims[1], heads = queries->dims[2], dim = queries->dims[3];
  const int64_t groups = keys->dims[1], slots = keys->dims[2], block = own->dims[1];
  if (groups < 1 || heads % groups || dim % kLanes || keys->dims[3] != dim || keys->dims[0] != batch ||
      visible->dims[0] != batch || own->dims[0] != batch || own->dims[2] != groups || own->dims[3] != dim ||
      block < 1 || (causal && block != size))
    return failed(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, "block_attention: shapes that don't fit");

  const int64_t rows = size * (heads / groups), chunks = batch * groups * ((rows + kQueries - 1) / kQueries);
  Attention* p = malloc(sizeof(Attention) + sizeof(float) * (size_t)(chunks * kQueries * score_row(slots, block)));
  if (!p) return failed(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "block_attention: out of memory");
  p->job.chunks = chunks, p->job.run = attend_chunk;
  p->causal = causal, p->batch = batch, p->size = size, p->heads = heads, p->dim = dim;
  p->groups = groups, p->slots = slots, p->own = block;
  p->queries = queries->data, p->context_keys = keys->data, p->context_values = a[2]->data, p->visible = visible->data;
  p->block_keys = own->data, p->block_values = a[5]->data, p->mixed = mixed->data;
  run_job(frame, &p->job, count_threads(frame));
  return NULL;
}

XLA_FFI_Error* block_attention(XLA_FFI_CallFrame* frame) { return attend(frame, 0); }

XLA_FFI_Error* block_attention_causal(XLA_FFI_CallFrame* frame) { return attend(frame, 1); }
