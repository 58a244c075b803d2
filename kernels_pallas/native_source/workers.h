// Sharing work among the threads of XLA's own pool, and what each of them needs.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "vectors.h"

namespace xla::ffi {
class ThreadPool;
}

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
  static void set(uint64_t control) {
    __asm__ volatile("msr fpcr, %0" : : "r"(control) : "memory");
  }
  uint64_t previous_;
#else
  NoSubnormals() = default;
#endif
};

// Whose memory of a thread: the call's that it runs, or its own part of the work.
enum class Owner { CALL, WORKER };

// Memory of a thread that lives as long as the thread, so that no call waits for fresh pages; null
// if there is none.
template <Owner>
char* thread_memory(size_t bytes) {
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

// Adds up what is needed of a piece of memory, each part from a cache line on.
class Parts {
 public:
  // Where the part of so many T begins.
  template <class T>
  size_t add(int64_t count) {
    const size_t at = bytes_;
    bytes_ += (count * sizeof(T) + 63) / 64 * 64;
    return at;
  }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
};

// Work in phases. The tasks of a phase are shared by all threads that are there, and begin when
// those of the phase before are done.
//
// The calling thread works too and waits only for what others have begun: a pool that is busy
// elsewhere costs time, never a deadlock.
class Phases {
 public:
  // Tasks 0 .. total - 1: each thread that gets one calls make_worker() once, and the result with
  // each of its tasks.
  template <class MakeWorker>
  void add(int64_t total, MakeWorker make_worker) {
    if (total <= 0) return;
    auto& phase = *job_->phases.emplace_back(std::make_unique<Phase>());
    phase.total = total;
    phase.work = [make_worker = std::move(make_worker)](Phase& phase, int64_t index) {
      int64_t done = 0;
      auto worker = make_worker();
      for (; index < phase.total; index = phase.next.fetch_add(1), ++done) worker(index);
      return done;
    };
    most_tasks_ = std::max(most_tasks_, total);
  }

  // Runs all of them, in up to `workers` threads.
  void run(xla::ffi::ThreadPool& pool, int64_t workers);

 private:
  struct alignas(64) Phase {
    std::atomic<int64_t> next{0}, done{0};
    int64_t total = 0;
    // Does a task, and others while there are some; returns how many.
    std::function<int64_t(Phase&, int64_t)> work;
  };

  struct Job {
    std::vector<std::unique_ptr<Phase>> phases;
    std::mutex mutex;
    std::condition_variable finished;

    // Who comes late finds nothing left of the first phases, and touches only the job there.
    void take_part() {
      for (const auto& phase : phases) {
        const int64_t index = phase->next.fetch_add(1);
        if (index < phase->total) {
          const int64_t done = phase->work(*phase, index);
          if (phase->done.fetch_add(done) + done == phase->total) {
            const std::lock_guard<std::mutex> lock(mutex);
            finished.notify_all();
          }
        }
        wait_for(*phase);
      }
    }

    void wait_for(const Phase& phase) {
      for (int spin = 0; spin < 4000; ++spin) {
        if (phase.done.load(std::memory_order_acquire) == phase.total) return;
#if defined(__x86_64__)
        _mm_pause();
#endif
      }
      std::unique_lock<std::mutex> lock(mutex);
      finished.wait(lock, [&] { return phase.done.load() == phase.total; });
    }
  };

  const std::shared_ptr<Job> job_ = std::make_shared<Job>();
  int64_t most_tasks_ = 0;
};

}  // namespace headrace
