// Sixteen floats at a time, in the compiler's own vector types: it maps them to what the machine has.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#define INLINE static inline __attribute__((always_inline))

constexpr int LANES = 16;

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint16_t hvec __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};

INLINE vec splat(float x) { return x - (vec){}; }

INLINE vec lanes() { return (vec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

INLINE vec load(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE vec load(const bf16 *p) {
    hvec h;
    memcpy(&h, p, sizeof h);
    return (vec)(__builtin_convertvector(h, uvec) << 16);
}

INLINE void store(float *p, vec v) { memcpy(p, &v, sizeof v); }

INLINE void store(bf16 *p, vec v) {
    uvec u = (uvec)v;
    u += 0x7fff + ((u >> 16) & 1); // to nearest, ties to even
    hvec h = __builtin_convertvector(u >> 16, hvec);
    memcpy(p, &h, sizeof h);
}

// The first `count` elements, zeros behind them.
template <class T> INLINE vec load_some(const T *p, int count) {
    T buffer[LANES] = {};
    memcpy(buffer, p, count * sizeof(T));
    return load(buffer);
}

template <class T> INLINE void store_some(T *p, vec v, int count) {
    T buffer[LANES];
    store(buffer, v);
    memcpy(p, buffer, count * sizeof(T));
}

template <class T> INLINE vec load_up_to(const T *p, int count) { return count == LANES ? load(p) : load_some(p, count); }

template <class T> INLINE void store_up_to(T *p, vec v, int count) {
    count == LANES ? store(p, v) : store_some(p, v, count);
}

// What is left of `x` once it has been stored as a T; in its register, since packing costs as much as the product does.
template <class T> INLINE vec rounded(vec x) {
    if (sizeof(T) == sizeof(float)) return x;
    uvec u = (uvec)x;
    u += 0x7fff + ((u >> 16) & 1);
    return (vec)(u & 0xffff0000);
}

INLINE float widen(float x) { return x; }

INLINE float widen(bf16 x) {
    uint32_t u = (uint32_t)x.bits << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

INLINE vec maximum(vec a, vec b) { return a > b ? a : b; }

// Every lane with the one `width` lanes on, going round.
template <int width> INLINE vec rotate(vec v) {
    ivec order = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return __builtin_shuffle(v, (order + width) & (LANES - 1));
}

INLINE float sum(vec v) {
    v += rotate<8>(v);
    v += rotate<4>(v);
    v += rotate<2>(v);
    v += rotate<1>(v);
    return v[0];
}

INLINE float largest(vec v) {
    v = maximum(v, rotate<8>(v));
    v = maximum(v, rotate<4>(v));
    v = maximum(v, rotate<2>(v));
    v = maximum(v, rotate<1>(v));
    return v[0];
}

// exp of what is not positive, to 1 ulp or so; exactly 1 at 0, exactly 0 under -87 (so at -inf too); NaN stays NaN.
INLINE vec exp_nonpositive(vec x) {
    const float log2e = 1.44269504088896341f, magic = 12582912.0f; // 1.5 * 2**23 rounds to an integer
    vec n = x * log2e + magic - magic;
    vec r = x - n * 0.693359375f; // ln 2 in two parts
    r = r - n * -2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    ivec exponent = __builtin_convertvector(x < -87.0f ? (vec){} : n, ivec);
    vec scale = (vec)((exponent + 127) << 23);
    return x < -87.0f ? (vec){} : p * scale;
}

// cap * tanh(x / cap)
INLINE vec soft_cap(vec x, float cap) {
    vec y = x / cap;
    vec e = exp_nonpositive((y > 0 ? -y : y) * 2.0f);
    vec t = (1.0f - e) / (1.0f + e);
    return (y > 0 ? t : -t) * cap;
}
