// What the kernels for CPUs share: vectors of floats, and a job whose chunks are taken by the calling thread and by tasks in
// XLA's own pool. They are XLA FFI handlers (c_api.h comes with jaxlib); build.py compiles them.

#pragma once

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

enum { kLanes = 8 };

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

static inline Lanes load(const float* p) {
  Lanes v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline float sum(Lanes v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// The first member of what a kernel allocates. Threads that come late find no chunk left and touch nothing else; the last
// one frees it.
typedef struct Job {
  atomic_int users;
  atomic_int_fast64_t next, done;
  int64_t chunks;
  void (*run)(const struct Job*, int64_t chunk);
} Job;

static void take_chunks(Job* job) {
  for (int64_t chunk; (chunk = atomic_fetch_add(&job->next, 1)) < job->chunks;) {
    job->run(job, chunk);
    atomic_fetch_add(&job->done, 1);
  }
}

static void leave(Job* job) {
  if (atomic_fetch_sub(&job->users, 1) == 1) free(job);
}

static void help(void* data) {
  take_chunks(data);
  leave(data);
}

static XLA_FFI_Error* failed(const XLA_FFI_CallFrame* frame, XLA_FFI_Error_Code code, const char* message) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message, code};
  return frame->api->XLA_FFI_Error_Create(&args);
}

// Whether the XLA call that returned `error` worked; frees the error.
static int worked(const XLA_FFI_CallFrame* frame, XLA_FFI_Error* error) {
  XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  if (error) frame->api->XLA_FFI_Error_Destroy(&args);
  return !error;
}

static int64_t count_threads(const XLA_FFI_CallFrame* frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL, frame->ctx,
                                             &threads};
  return worked(frame, frame->api->XLA_FFI_ThreadPool_NumThreads(&args)) ? threads : 1;
}

// Runs all chunks of a job, and frees it.
static void run_job(const XLA_FFI_CallFrame* frame, Job* job, int64_t threads) {
  atomic_init(&job->next, 0), atomic_init(&job->done, 0), atomic_init(&job->users, 1);
  for (int64_t helper = 1; helper < threads && helper < job->chunks; ++helper) {
    atomic_fetch_add(&job->users, 1);
    XLA_FFI_ThreadPool_Schedule_Args task = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, frame->ctx, help, job};
    if (!worked(frame, frame->api->XLA_FFI_ThreadPool_Schedule(&task))) {  // this thread does it all
      leave(job);
      break;
    }
  }
  take_chunks(job);
  while (atomic_load(&job->done) < job->chunks) sched_yield();  // for the chunks that others are busy with
  leave(job);
}

// Whether XLA asks which version of its API this is; then it has the answer.
static int asked_for_version(const XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Metadata_Extension* asked = (const void*)frame->extension_start;
  if (!asked || asked->extension_base.type != XLA_FFI_Extension_Metadata) return 0;
  asked->metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  asked->metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  return 1;
}
