// Element types and reductions: sum, product, minimum, maximum of integers and of floats of 2, 4 and 8 bytes.
#include "nccl.h"

#include <cmath>
#include <cstring>

namespace fakegpu::nccl {

namespace {

struct BFloat16 {
    uint16_t bits;
    explicit operator float() const {
        const uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &wide, 4);
        return value;
    }
    static BFloat16 from(float value) {
        uint32_t wide;
        std::memcpy(&wide, &value, 4);
        return {static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16)};
    }
};

struct Half {
    uint16_t bits;
    explicit operator float() const {
        const int exponent = (bits >> 10) & 31;
        const int mantissa = bits & 1023;
        float value;
        if (exponent == 31) value = mantissa ? NAN : INFINITY;
        else if (exponent == 0) value = std::ldexp(static_cast<float>(mantissa), -24);
        else value = std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
        return bits & 0x8000 ? -value : value;
    }
    static Half from(float value) {
        const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
        if (std::isnan(value)) return {static_cast<uint16_t>(sign | 0x7e00)};
        const float size = std::fabs(value);
        if (size >= 65520) return {static_cast<uint16_t>(sign | 0x7c00)};
        int exponent;
        std::frexp(size, &exponent); // size = f * 2^exponent, f in [0.5, 1)
        if (size == 0 || exponent < -13) {
            return {static_cast<uint16_t>(sign | static_cast<int>(std::nearbyint(std::ldexp(size, 24))))};
        }
        const int mantissa = static_cast<int>(std::nearbyint(std::ldexp(size, 11 - exponent))); // 1024 to 2048
        return {static_cast<uint16_t>(sign | (((exponent + 14) << 10) + mantissa - 1024))};
    }
};

template <typename T> T combine(T a, T b, int op) {
    switch (op) {
    case 1: return static_cast<T>(a * b);
    case 2: return a > b ? a : b;
    case 3: return a < b ? a : b;
    default: return static_cast<T>(a + b);
    }
}

template <typename T> void reduce_numbers(void* target, const void* source, size_t count, int op) {
    auto* to = static_cast<T*>(target);
    const auto* from = static_cast<const T*>(source);
    for (size_t i = 0; i < count; ++i) to[i] = combine<T>(to[i], from[i], op);
}

template <typename T> void reduce_short_floats(void* target, const void* source, size_t count, int op) {
    auto* to = static_cast<T*>(target);
    const auto* from = static_cast<const T*>(source);
    for (size_t i = 0; i < count; ++i) {
        to[i] = T::from(combine<float>(static_cast<float>(to[i]), static_cast<float>(from[i]), op));
    }
}

template <typename T> void scale_numbers(void* target, size_t count, double factor) {
    auto* to = static_cast<T*>(target);
    for (size_t i = 0; i < count; ++i) to[i] = static_cast<T>(static_cast<double>(to[i]) * factor);
}

template <typename T> void scale_short_floats(void* target, size_t count, double factor) {
    auto* to = static_cast<T*>(target);
    for (size_t i = 0; i < count; ++i) to[i] = T::from(static_cast<float>(static_cast<float>(to[i]) * factor));
}

} // namespace

// The numbers are those of ncclDataType_t.
size_t element_size(int dtype) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return dtype >= 0 && dtype < 12 ? sizes[dtype] : 1;
}

void reduce_into(void* target, const void* source, size_t count, int dtype, int op) {
    switch (dtype) {
    case 0: return reduce_numbers<int8_t>(target, source, count, op);
    case 1: return reduce_numbers<uint8_t>(target, source, count, op);
    case 2: return reduce_numbers<int32_t>(target, source, count, op);
    case 3: return reduce_numbers<uint32_t>(target, source, count, op);
    case 4: return reduce_numbers<int64_t>(target, source, count, op);
    case 5: return reduce_numbers<uint64_t>(target, source, count, op);
    case 6: return reduce_short_floats<Half>(target, source, count, op);
    case 7: return reduce_numbers<float>(target, source, count, op);
    case 8: return reduce_numbers<double>(target, source, count, op);
    case 9: return reduce_short_floats<BFloat16>(target, source, count, op);
    default: break; // 8-bit floats keep the first rank's value
    }
}

void scale(void* target, size_t count, int dtype, double factor) {
    switch (dtype) {
    case 0: return scale_numbers<int8_t>(target, count, factor);
    case 1: return scale_numbers<uint8_t>(target, count, factor);
    case 2: return scale_numbers<int32_t>(target, count, factor);
    case 3: return scale_numbers<uint32_t>(target, count, factor);
    case 4: return scale_numbers<int64_t>(target, count, factor);
    case 5: return scale_numbers<uint64_t>(target, count, factor);
    case 6: return scale_short_floats<Half>(target, count, factor);
    case 7: return scale_numbers<float>(target, count, factor);
    case 8: return scale_numbers<double>(target, count, factor);
    case 9: return scale_short_floats<BFloat16>(target, count, factor);
    default: break;
    }
}

} // namespace fakegpu::nccl
