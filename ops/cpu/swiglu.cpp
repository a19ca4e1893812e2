// silu(gate) * up of two arrays of one shape, and its gradients; see ops/swiglu.py for the contract.

#include <algorithm>

#include "vector.h"

namespace {

constexpr int64_t BLOCK = 4096; // elements that a thread takes at a time

INLINE vec sigmoid(vec x) {
    vec e = exp_nonpositive(x < 0.0f ? x : -x);
    return (x < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

template <class T> INLINE vec product(vec gate, vec up) { return rounded<T>(gate * sigmoid(gate)) * up; }

template <class T> INLINE void gradients(vec gate, vec up, vec grad, vec &grad_gate, vec &grad_up) {
    vec s = sigmoid(gate);
    vec silu = gate * s;
    grad_up = grad * rounded<T>(silu);
    grad_gate = grad * up * (s + silu * (1.0f - s));
}

template <class T> void forward_block(const T *gate, const T *up, T *out, int64_t start, int64_t stop) {
    int64_t i = start;
    for (; i + LANES <= stop; i += LANES) store(out + i, product<T>(load(gate + i), load(up + i)));
    const int rest = (int)(stop - i);
    if (rest) store_some(out + i, product<T>(load_some(gate + i, rest), load_some(up + i, rest)), rest);
}

template <class T>
void backward_block(const T *gate, const T *up, const T *grad, T *grad_gate, T *grad_up, int64_t start,
                    int64_t stop) {
    vec by_gate, by_up;
    int64_t i = start;
    for (; i + LANES <= stop; i += LANES) {
        gradients<T>(load(gate + i), load(up + i), load(grad + i), by_gate, by_up);
        store(grad_gate + i, by_gate);
        store(grad_up + i, by_up);
    }
    const int rest = (int)(stop - i);
    if (rest == 0) return;
    gradients<T>(load_some(gate + i, rest), load_some(up + i, rest), load_some(grad + i, rest), by_gate, by_up);
    store_some(grad_gate + i, by_gate, rest);
    store_some(grad_up + i, by_up, rest);
}

template <class T> void forward(const T *gate, const T *up, T *out, int64_t size, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && size > 32768)
    for (int64_t start = 0; start < size; start += BLOCK)
        forward_block(gate, up, out, start, std::min(size, start + BLOCK));
}

template <class T>
void backward(const T *gate, const T *up, const T *grad, T *grad_gate, T *grad_up, int64_t size, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && size > 32768)
    for (int64_t start = 0; start < size; start += BLOCK)
        backward_block(gate, up, grad, grad_gate, grad_up, start, std::min(size, start + BLOCK));
}

} // namespace

extern "C" {

void swiglu(const void *gate, const void *up, void *out, int is_bf16, int64_t size, int num_threads) {
    is_bf16 ? forward((const bf16 *)gate, (const bf16 *)up, (bf16 *)out, size, num_threads)
            : forward((const float *)gate, (const float *)up, (float *)out, size, num_threads);
}

void swiglu_backward(const void *gate, const void *up, const void *grad, void *grad_gate, void *grad_up, int is_bf16,
                     int64_t size, int num_threads) {
    is_bf16 ? backward((const bf16 *)gate, (const bf16 *)up, (const bf16 *)grad, (bf16 *)grad_gate, (bf16 *)grad_up,
                       size, num_threads)
            : backward((const float *)gate, (const float *)up, (const float *)grad, (float *)grad_gate,
                       (float *)grad_up, size, num_threads);
}
}
