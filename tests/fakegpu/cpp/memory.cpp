// Device memory is host memory, with a registry that tells device, pinned and pageable pointers apart.
#include "fakegpu.h"

#include <map>
#include <sys/mman.h>

namespace fakegpu {

namespace {

struct MemoryRegistry {
    std::mutex mutex;
    std::map<uintptr_t, Block> blocks;
    std::map<uintptr_t, size_t> registered; // host memory of the program's own
    size_t allocated[64] = {};
};

MemoryRegistry& registry() {
    static auto* instance = new MemoryRegistry;
    return *instance;
}

} // namespace

void* allocate(size_t size, MemoryKind kind, int device) {
    if (size == 0) size = 1;
    if (kind == MemoryKind::device) {
        if (is_allocation_refused(size, device)) return nullptr;
        std::lock_guard<std::mutex> lock(registry().mutex);
        if (registry().allocated[device] + size > device_memory_bytes()) return nullptr;
    }
    void* pointer = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pointer == MAP_FAILED) return nullptr;
    std::lock_guard<std::mutex> lock(registry().mutex);
    const auto begin = reinterpret_cast<uintptr_t>(pointer);
    registry().blocks[begin] = Block{begin, size, kind, device};
    if (kind == MemoryKind::device) registry().allocated[device] += size;
    return pointer;
}

bool release(void* pointer) {
    if (!pointer) return true;
    Block block;
    {
        std::lock_guard<std::mutex> lock(registry().mutex);
        auto found = registry().blocks.find(reinterpret_cast<uintptr_t>(pointer));
        if (found == registry().blocks.end()) return false;
        block = found->second;
        registry().blocks.erase(found);
        if (block.kind == MemoryKind::device) registry().allocated[block.device] -= block.size;
    }
    munmap(pointer, block.size);
    return true;
}

void register_host(void* pointer, size_t size) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    registry().registered[reinterpret_cast<uintptr_t>(pointer)] = size;
}

void unregister_host(void* pointer) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    registry().registered.erase(reinterpret_cast<uintptr_t>(pointer));
}

Block find_block(const void* pointer) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    std::lock_guard<std::mutex> lock(registry().mutex);
    auto next = registry().blocks.upper_bound(address);
    if (next != registry().blocks.begin()) {
        const Block& block = std::prev(next)->second;
        if (address < block.begin + block.size) return block;
    }
    auto pinned = registry().registered.upper_bound(address);
    if (pinned != registry().registered.begin()) {
        --pinned;
        if (address < pinned->first + pinned->second) {
            return Block{pinned->first, pinned->second, MemoryKind::host, 0};
        }
    }
    return Block{};
}

size_t allocated_bytes(int device) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    return registry().allocated[device];
}

} // namespace fakegpu
