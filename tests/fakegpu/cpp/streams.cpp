// Streams and events: each stream is a FIFO of tasks that one thread executes in order.
//
// A task that cannot block (a copy, an event's record) runs in the caller when the stream is idle: the device is then
// infinitely fast, and a job of several ranks needs few context switches. A full queue blocks the host, as on a GPU.
#include "graphs.h"

#include <cstdlib>
#include <ctime>
#include <thread>
#include <vector>

namespace fakegpu {

namespace {

// One pair for all waits on events and faults of this process: waits are few, and wake-ups are cheap here.
std::mutex& wait_mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
}
std::condition_variable& wait_condition() {
    static auto* condition = new std::condition_variable;
    return *condition;
}

size_t queue_depth() {
    static const size_t depth = [] {
        const char* text = std::getenv("FAKEGPU_QUEUE_DEPTH");
        return text && *text ? std::strtoul(text, nullptr, 10) : 1024UL;
    }();
    return depth;
}

} // namespace

class Stream {
  public:
    Stream(int device, int priority) : device_(device), priority_(priority) {}

    void enqueue(std::function<void()> task, bool inline_ok) {
        std::unique_lock<std::mutex> lock(mutex_);
        if (inline_ok && tasks_.empty() && !is_busy_) {
            is_busy_ = true;
            ++enqueued_;
            lock.unlock();
            task();
            finish_one();
            return;
        }
        changed_.wait(lock, [this] { return tasks_.size() < queue_depth(); });
        tasks_.push_back(std::move(task));
        ++enqueued_;
        if (!has_thread_) {
            has_thread_ = true;
            std::thread([this] { run(); }).detach();
        }
        changed_.notify_all();
    }

    void synchronize() {
        std::unique_lock<std::mutex> lock(mutex_);
        const uint64_t target = enqueued_;
        while (spins_in_synchronize() && completed_ < target) {
            lock.unlock();
            lock.lock();
        }
        changed_.wait(lock, [this, target] { return completed_ >= target; });
    }

    bool is_idle() {
        std::lock_guard<std::mutex> lock(mutex_);
        return completed_ == enqueued_;
    }

    int device() const { return device_; }
    int priority() const { return priority_; }

  private:
    void finish_one() {
        std::lock_guard<std::mutex> lock(mutex_);
        is_busy_ = false;
        ++completed_;
        changed_.notify_all();
    }

    void run() {
        set_current_device(device_);
        for (;;) {
            std::function<void()> task;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                changed_.wait(lock, [this] { return !tasks_.empty() && !is_busy_; });
                task = std::move(tasks_.front());
                tasks_.pop_front();
                is_busy_ = true;
                changed_.notify_all();
            }
            task();
            finish_one();
        }
    }

    const int device_;
    const int priority_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> tasks_;
    bool is_busy_ = false;
    bool has_thread_ = false;
    uint64_t enqueued_ = 0;
    uint64_t completed_ = 0;
};

namespace {

struct StreamRegistry {
    std::mutex mutex;
    std::vector<Stream*> defaults = std::vector<Stream*>(64, nullptr);
    std::vector<Stream*> all;
};

// Never destroyed: stream threads outlive static destruction.
StreamRegistry& registry() {
    static auto* instance = new StreamRegistry;
    return *instance;
}

} // namespace

Stream* create_stream(int device, int priority) {
    auto* stream = new Stream(device, priority);
    std::lock_guard<std::mutex> lock(registry().mutex);
    registry().all.push_back(stream);
    return stream;
}

Stream* resolve_stream(void* handle) {
    if (reinterpret_cast<uintptr_t>(handle) > 2) return static_cast<Stream*>(handle);
    const int device = current_device();
    {
        std::lock_guard<std::mutex> lock(registry().mutex);
        if (Stream* stream = registry().defaults[device]) return stream;
    }
    Stream* created = create_stream(device, 0);
    std::lock_guard<std::mutex> lock(registry().mutex);
    if (!registry().defaults[device]) registry().defaults[device] = created;
    return registry().defaults[device];
}

// The object stays: its thread may still run, and programs destroy few streams.
void destroy_stream(Stream*) {}

int stream_priority(Stream* stream) { return stream->priority(); }
int stream_device(Stream* stream) { return stream->device(); }
bool is_stream_idle(Stream* stream) { return stream->is_idle(); }
void synchronize_stream(Stream* stream) { stream->synchronize(); }

void synchronize_device(int device) {
    std::vector<Stream*> streams;
    {
        std::lock_guard<std::mutex> lock(registry().mutex);
        streams = registry().all;
    }
    for (Stream* stream : streams) {
        if (stream->device() == device) stream->synchronize();
    }
}

void enqueue(Stream* stream, Task task, bool inline_ok) {
    if (is_capturing(stream)) {
        capture_node(stream, [task] { return task; }, !inline_ok);
        return;
    }
    stream->enqueue(std::move(task), inline_ok);
}

EventStatePtr record_event(Stream* stream) {
    auto event = std::make_shared<EventState>();
    if (!capture_event(stream, *event)) stream->enqueue([event] { complete_event(*event); }, true);
    return event;
}

void complete_event(EventState& event) {
    {
        std::lock_guard<std::mutex> lock(wait_mutex());
        event.completed_at_ms = now_ms();
        event.is_done = true;
    }
    wait_condition().notify_all();
}

void wait_event(Stream* stream, EventStatePtr event) {
    if (!event || event->is_done) return;
    enqueue(stream, [event] { synchronize_event(event); }, false);
}

void synchronize_event(const EventStatePtr& event) {
    if (!event) return;
    std::unique_lock<std::mutex> lock(wait_mutex());
    wait_condition().wait(lock, [&event] { return event->is_done.load(); });
}

void block_until(const std::function<bool()>& is_released) {
    while (!is_released()) {
        std::unique_lock<std::mutex> lock(wait_mutex());
        wait_condition().wait_for(lock, std::chrono::milliseconds(20));
    }
}

void wake_waiters() { wait_condition().notify_all(); }

double now_ms() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e3 + time.tv_nsec * 1e-6;
}

} // namespace fakegpu
