// Sharing work among the threads of XLA's own pool, and what each of them needs.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

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

// Any number, if the system does not tell.
inline int64_t current_processor() {
#if defined(__linux__)
  return std::max(sched_getcpu(), 0);
#else
  return 0;
#endif
}

// Memory that is kept, so that nobody waits for fresh pages.
class Memory {
 public:
  // Null if there is not that much.
  char* at_least(size_t bytes) {
    if (size_ < bytes) {
      size_ = (bytes + 4095) / 4096 * 4096;
      data_.reset();
      data_.reset((char*)std::aligned_alloc(4096, size_));
      if (data_) std::memset(data_.get(), 0, size_);
      else size_ = 0;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> data_;
  size_t size_ = 0;
};

// That of a thread for its part of the work, which lives as long as the thread.
inline char* worker_memory(size_t bytes) {
  thread_local Memory memory;
  return memory.at_least(bytes);
}

// That of a call, which the next one gets: any of XLA's threads may run one. There are as many as
// calls have run at once.
class CallMemory {
 public:
  explicit CallMemory(size_t bytes) {
    {
      const std::lock_guard<std::mutex> lock(kept().mutex);
      if (!kept().free.empty()) {
        memory_ = std::move(kept().free.back());
        kept().free.pop_back();
      }
    }
    data_ = memory_.at_least(bytes);
  }
  ~CallMemory() {
    const std::lock_guard<std::mutex> lock(kept().mutex);
    kept().free.push_back(std::move(memory_));
  }
  CallMemory(const CallMemory&) = delete;
  CallMemory& operator=(const CallMemory&) = delete;

  // Null if there is none.
  char* data() const { return data_; }

 private:
  struct Kept {
    std::mutex mutex;
    std::vector<Memory> free;
  };
  // Never destroyed: calls may still run while the process ends.
  static Kept& kept() {
    static Kept& kept = *new Kept;
    return kept;
  }

  Memory memory_;
  char* data_;
};

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
// Tasks lie in as many ranges as there may be threads. A processor begins with a range of its own,
// the same in each phase, and then helps with the others: tokens that follow each other, computed
// by tasks that follow each other, stay in its caches from phase to phase.
//
// The calling thread works too and waits only for what others have begun: a pool that is busy
// elsewhere costs time, never a deadlock.
class Phases {
 public:
  static constexpr int64_t NO_TASK = -1;

  // Tasks 0 .. total - 1: each thread that gets one calls make_worker() once, and the result with
  // each of its tasks.
  template <class MakeWorker>
  void add(int64_t total, MakeWorker make_worker) {
    add_work(total, [make_worker = std::move(make_worker)](Tasks& tasks, int64_t task) {
      int64_t done = 0;
      auto worker = make_worker();
      for (; task != NO_TASK; task = tasks.take(), ++done) worker(task);
      return done;
    });
  }

  // Where a thread begins in each phase, as far as it can: with that of so many equal parts.
  struct Home {
    int64_t range, ranges;
  };

  // The same, and a worker is told the task that it will get then, as far as that is known, or
  // NO_TASK, and its home: so it can ask for what that needs. The last tasks of a range are left to
  // whoever comes first.
  template <class MakeWorker>
  void add_foreseen(int64_t total, MakeWorker make_worker) {
    add_work(total, [make_worker = std::move(make_worker)](Tasks& tasks, int64_t task) {
      constexpr int64_t LAST = 2;
      int64_t done = 0;
      auto worker = make_worker();
      for (int64_t then; task != NO_TASK; task = then, ++done) {
        const bool ahead = tasks.left_after(task) > LAST;
        then = ahead ? tasks.take() : tasks.left_after(task) > 0 ? task + 1 : NO_TASK;
        worker(task, then, tasks.home());
        if (!ahead) then = tasks.take();
      }
      return done;
    });
  }

  // Lets the run end behind the last phase that was added, if `wanted` says so by then. Such a place
  // is called by its number.
  void may_end(int64_t place, std::function<bool()> wanted) {
    job_->phases.back()->place = place;
    job_->phases.back()->ends = std::move(wanted);
  }

  // Where the run has ended, if not behind the last phase.
  std::optional<int64_t> ended_at() const {
    const int64_t place = job_->ended_at;
    return place == NO_PLACE ? std::nullopt : std::optional(place);
  }

  // Runs all of them, in up to `workers` threads. What is thrown meanwhile ends the process: others
  // would go on with what the caller takes away.
  void run(xla::ffi::ThreadPool& pool, int64_t workers) noexcept;

 private:
  static constexpr int64_t MOST_RANGES = 64;
  static constexpr int64_t NO_PLACE = -1;

  struct alignas(64) Range {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  // What a thread sees of the tasks of a phase.
  class Tasks {
   public:
    Tasks(std::vector<Range>& ranges, int64_t first)
        : ranges_(ranges), home_(first), at_(first) {}

    Home home() const { return {home_, (int64_t)ranges_.size()}; }

    int64_t take() {
      for (; passed_ < (int64_t)ranges_.size(); ++passed_, at_ = (at_ + 1) % ranges_.size()) {
        const int64_t task = ranges_[at_].next.fetch_add(1);
        if (task < ranges_[at_].end) return task;
      }
      return NO_TASK;
    }
    // Of the range that it was taken from last.
    int64_t left_after(int64_t task) const { return ranges_[at_].end - task - 1; }

   private:
    std::vector<Range>& ranges_;
    const int64_t home_;
    int64_t at_, passed_ = 0;
  };

  // Does a task, and others while there are some; returns how many.
  using Work = std::function<int64_t(Tasks&, int64_t)>;

  struct Phase {
    const int64_t total;
    const Work work;
    std::vector<Range> ranges;
    int64_t place = NO_PLACE;
    std::function<bool()> ends;
    alignas(64) std::atomic<int64_t> done{0};

    Phase(int64_t total, Work work) : total(total), work(std::move(work)) {}
  };

  struct Job {
    std::vector<std::unique_ptr<Phase>> phases;
    std::mutex mutex;
    std::condition_variable finished;
    std::atomic<int64_t> ended_at{NO_PLACE};

    // Who comes late finds nothing left of the first phases, and touches only the job there.
    void take_part() {
      const int64_t processor = current_processor();
      for (const auto& phase : phases) {
        Tasks tasks(phase->ranges, processor % phase->ranges.size());
        const int64_t task = tasks.take();
        if (task != NO_TASK) {
          const int64_t done = phase->work(tasks, task);
          // Before the phase counts as done, so that all threads see the same.
          if (phase->ends && phase->ends()) ended_at = phase->place;
          if (phase->done.fetch_add(done) + done == phase->total) {
            const std::lock_guard<std::mutex> lock(mutex);
            finished.notify_all();
          }
        }
        wait_for(*phase);
        if (phase->ends && ended_at != NO_PLACE) return;
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

  void add_work(int64_t total, Work work) {
    if (total <= 0) return;
    job_->phases.push_back(std::make_unique<Phase>(total, std::move(work)));
    most_tasks_ = std::max(most_tasks_, total);
  }

  const std::shared_ptr<Job> job_ = std::make_shared<Job>();
  int64_t most_tasks_ = 0;
};

}  // namespace headrace
