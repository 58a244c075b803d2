// Sharing work among the threads of XLA's own pool, and what each of them needs.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>

#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace headrace {

// Subnormal numbers count as zero: threads of XLA differ in that, results must not.
class NoSubnormals {
 public:
  NoSubnormals(const NoSubnormals&) = delete;
  NoSubnormals& operator=(const NoSubnormals&) = delete;
#if defined(__x86_64__)
  NoSubnormals() : previous_(_mm_getcsr()) { _mm_setcsr(previous_ | 0x8040); }
  ~NoSubnormals() { _mm_setcsr(previous_); }

 private:
  unsigned previous_;
#elif defined(__aarch64__)
  NoSubnormals() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(previous_));
    set(previous_ | 1 << 24);  // FZ
  }
  ~NoSubnormals() { set(previous_); }

 private:
  static void set(uint64_t control) { __asm__ volatile("msr fpcr, %0" : : "r"(control) : "memory"); }
  uint64_t previous_;
#else
  NoSubnormals() = default;
#endif
};

// Memory of a thread that lives as long as the thread, so that no call waits for fresh pages; null
// if there is none.
inline char* thread_memory(size_t bytes) {
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<char, Free> memory;
  thread_local size_t size = 0;
  if (size < bytes) {
    size = (bytes + 4095) / 4096 * 4096;
    memory.reset((char*)std::aligned_alloc(4096, size));
    if (memory) std::memset(memory.get(), 0, size);
    else size = 0;
  }
  return memory.get();
}

// Calls make_worker() once in each of up to `workers` threads, and its result with 0 .. total - 1,
// each once. The calling thread works too and waits only for what others have begun: a pool that
// is busy elsewhere costs time, never a deadlock.
template <class MakeWorker>
void share(xla::ffi::ThreadPool& pool, int64_t total, int64_t workers,
           const MakeWorker& make_worker) {
  struct Job {
    std::atomic<int64_t> next{0}, done{0};
    int64_t total;
    std::mutex mutex;
    std::condition_variable finished;
  };
  const auto job = std::make_shared<Job>();
  job->total = total;
  // A task that comes too late finds nothing left and touches only the job.
  const auto work = [&make_worker](Job& job) {
    int64_t index = job.next.fetch_add(1);
    if (index >= job.total) return;
    int64_t done = 0;
    {
      auto worker = make_worker();
      for (; index < job.total; index = job.next.fetch_add(1), ++done) worker(index);
    }
    if (job.done.fetch_add(done) + done == job.total) {
      const std::lock_guard<std::mutex> lock(job.mutex);
      job.finished.notify_one();
    }
  };
  const int64_t helpers = std::min(std::min(workers, pool.num_threads()), total) - 1;
  for (int64_t helper = 0; helper < helpers; ++helper) pool.Schedule([job, work] { work(*job); });
  work(*job);
  for (int spin = 0; spin < 4000 && job->done.load() < total; ++spin) {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }
  std::unique_lock<std::mutex> lock(job->mutex);
  job->finished.wait(lock, [&] { return job->done.load() == total; });
}

}  // namespace headrace
