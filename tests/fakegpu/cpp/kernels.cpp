// Kernels: torch registers each by name. A few that programs need for correct data are computed, all others do nothing.
#include "fakegpu.h"

#include <cstring>
#include <unordered_map>
#include <vector>

namespace fakegpu {

namespace {

struct KernelRegistry {
    std::mutex mutex;
    // Registration runs 100,000 times during `import torch`, so it only appends.
    std::vector<std::pair<HostFunction, const char*>> registered;
    std::unordered_map<HostFunction, const char*> names;
};

KernelRegistry& registry() {
    static auto* instance = new KernelRegistry;
    return *instance;
}

// The size of the value in a mangled `FillFunctor<T>`, or 0.
size_t fill_value_size(const char* name) {
    const char* found = std::strstr(name, "11FillFunctorI");
    if (!found) return 0;
    const char* type = found + std::strlen("11FillFunctorI");
    switch (*type) {
    case 'b': case 'a': case 'h': case 'c': return 1;
    case 's': case 't': return 2;
    case 'i': case 'j': case 'f': return 4;
    case 'l': case 'm': case 'd': case 'x': case 'y': return 8;
    default: break;
    }
    if (std::strstr(type, "8BFloat16E") || std::strstr(type, "4HalfE")) return 2;
    return 0;
}

Task make_fill(void** arguments, size_t value_size) {
    const int count = *static_cast<int*>(arguments[0]);
    uint64_t value = 0;
    std::memcpy(&value, arguments[1], value_size);
    char* output = *static_cast<char**>(arguments[2]);
    if (find_block(output).kind == MemoryKind::unregistered) return {};
    return [count, value, value_size, output] {
        for (int i = 0; i < count; ++i) std::memcpy(output + i * value_size, &value, value_size);
    };
}

} // namespace

void register_kernel(HostFunction function, const char* mangled_name) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    registry().registered.emplace_back(function, mangled_name);
}

const char* kernel_name(HostFunction function) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    for (const auto& entry : registry().registered) registry().names.insert(entry);
    registry().registered.clear();
    auto found = registry().names.find(function);
    return found == registry().names.end() ? "" : found->second;
}

Task make_kernel(HostFunction function, void** arguments) {
    const char* name = kernel_name(function);
    // vectorized_elementwise_kernel<N, Functor, Array>(int count, Functor, Array) and its unrolled relative
    if (std::strstr(name, "elementwise_kernel")) {
        if (size_t size = fill_value_size(name)) return make_fill(arguments, size);
    }
    return {};
}

void launch(Stream* stream, HostFunction function, void** arguments) {
    if (!is_capturing(stream)) count_launch(stream); // a launch of the graph counts
    Task kernel = make_kernel(function, arguments);
    if (!kernel) kernel = [] {};
    enqueue(stream, std::move(kernel), true);
}

} // namespace fakegpu
