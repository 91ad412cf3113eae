// The devices of this process: how many there are, which is current, how much memory each has.
#include "fakegpu.h"

#include <cstdlib>

namespace fakegpu {

namespace {

constexpr int kMaxDevices = 64;
thread_local int tls_device = 0;
std::atomic<int> g_last_device{0};
std::atomic<bool> g_used[kMaxDevices];

long environment_number(const char* name, long fallback) {
    const char* text = std::getenv(name);
    return text && *text ? std::strtol(text, nullptr, 10) : fallback;
}

} // namespace

int device_count() {
    static const int count = [] {
        long number = environment_number("FAKEGPU_DEVICES", 8);
        // The usual way to hide devices; only the count matters here.
        if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) {
            long listed = *visible ? 1 : 0;
            for (const char* c = visible; *c; ++c) listed += *c == ',';
            if (*visible == '-') listed = 0;
            if (listed < number) number = listed;
        }
        return static_cast<int>(number < kMaxDevices ? number : kMaxDevices);
    }();
    return count;
}

int current_device() { return tls_device; }

int last_device() { return g_last_device; }

void set_current_device(int device) {
    tls_device = device;
    g_last_device = device;
    g_used[device] = true;
}

bool is_device_used(int device) { return device >= 0 && device < kMaxDevices && g_used[device]; }

size_t device_memory_bytes() {
    static const size_t bytes = static_cast<size_t>(environment_number("FAKEGPU_MEMORY_MB", 16384)) << 20;
    return bytes;
}

} // namespace fakegpu
