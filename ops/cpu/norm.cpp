// Root-mean-square norms of rows; see ops/norm.py for the contract.

#include <algorithm>

#include "vector.h"

namespace {

INLINE int count_at(int64_t i, int64_t size) { return (int)(size - i < LANES ? size - i : LANES); }

template <class T> INLINE float factor_of(const T *row, int64_t size, float epsilon) {
    vec squares = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vec x = load(row + i);
        squares += x * x;
    }
    if (i < size) {
        vec x = load_some(row + i, (int)(size - i));
        squares += x * x;
    }
    return 1.0f / std::sqrt(sum(squares) / (float)size + epsilon);
}

template <class T>
void norm_row(const T *row, const T *weight, T *out, int64_t size, float epsilon, float offset, bool rounds_first) {
    const float factor = factor_of(row, size, epsilon);
    for (int64_t i = 0; i < size; i += LANES) {
        const int count = count_at(i, size);
        vec x = load_up_to(row + i, count);
        vec w = load_up_to(weight + i, count) + offset;
        x *= factor;
        if (rounds_first) x = rounded<T>(x);
        x *= w;
        store_up_to(out + i, x, count);
    }
}

// The gradient by a row, and what the row adds to that by the weight (`weight_sums`; null where nobody asks).
template <class T>
void gradient_row(const T *row, const T *weight, const T *grad, T *out, float *weight_sums, int64_t size,
                  float epsilon, float offset, bool rounds_first) {
    const float factor = factor_of(row, size, epsilon);
    vec products = {};
    for (int64_t i = 0; i < size; i += LANES) {
        const int count = count_at(i, size);
        products += load_up_to(grad + i, count) * (load_up_to(weight + i, count) + offset) * load_up_to(row + i, count);
    }
    const float slope = factor * factor * (sum(products) / (float)size);
    for (int64_t i = 0; i < size; i += LANES) {
        const int count = count_at(i, size);
        vec x = load_up_to(row + i, count), g = load_up_to(grad + i, count);
        vec w = load_up_to(weight + i, count) + offset;
        store_up_to(out + i, (g * w - x * slope) * factor, count);
        if (weight_sums == nullptr) continue;
        vec normed = x * factor;
        if (rounds_first) normed = rounded<T>(normed);
        store_up_to(weight_sums + i, load_up_to(weight_sums + i, count) + g * normed, count);
    }
}

template <class T>
void run(const T *rows, const T *weight, T *out, int64_t count, int64_t size, int64_t stride, float epsilon,
         float offset, bool rounds_first, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && count * size > 32768)
    for (int64_t r = 0; r < count; r++)
        norm_row(rows + r * stride, weight, out + r * size, size, epsilon, offset, rounds_first);
}

// The weight's gradient is summed over blocks of rows, and then over the blocks, in the same order on any number of
// threads; `block_sums` (blocks, size) and `grad_weight` (size,) are null where nobody asks for it.
template <class T>
void backward(const T *rows, const T *weight, const T *grads, T *out, float *block_sums, T *grad_weight,
              int64_t count, int64_t size, int64_t stride, int64_t grad_stride, int64_t block, float epsilon,
              float offset, bool rounds_first, int num_threads) {
    const int64_t num_blocks = (count + block - 1) / block;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && count * size > 32768)
    for (int64_t b = 0; b < num_blocks; b++) {
        float *sums = block_sums == nullptr ? nullptr : block_sums + b * size;
        if (sums != nullptr) std::fill(sums, sums + size, 0.0f);
        for (int64_t r = b * block; r < std::min(count, (b + 1) * block); r++)
            gradient_row(rows + r * stride, weight, grads + r * grad_stride, out + r * size, sums, size, epsilon,
                         offset, rounds_first);
    }
    if (grad_weight == nullptr) return;
    for (int64_t i = 0; i < size; i += LANES) {
        const int lanes_here = count_at(i, size);
        vec total = {};
        for (int64_t b = 0; b < num_blocks; b++) total += load_up_to(block_sums + b * size + i, lanes_here);
        store_up_to(grad_weight + i, total, lanes_here);
    }
}

} // namespace

extern "C" {

// (R, size) rows `stride` apart -> (R, size) contiguous: x / sqrt(mean(x^2) + epsilon) * (offset + weight).
void rms_norm(const void *rows, const void *weight, void *out, int is_bf16, int64_t count, int64_t size,
              int64_t stride, float epsilon, float offset, int rounds_first, int num_threads) {
    is_bf16 ? run((const bf16 *)rows, (const bf16 *)weight, (bf16 *)out, count, size, stride, epsilon, offset,
                  rounds_first, num_threads)
            : run((const float *)rows, (const float *)weight, (float *)out, count, size, stride, epsilon, offset,
                  rounds_first, num_threads);
}

// Gradients (R, size) by the rows and (size,) by the weight, from those by what `rms_norm` makes of them.
void rms_norm_backward(const void *rows, const void *weight, const void *grads, void *out, float *block_sums,
                       void *grad_weight, int is_bf16, int64_t count, int64_t size, int64_t stride,
                       int64_t grad_stride, int64_t block, float epsilon, float offset, int rounds_first,
                       int num_threads) {
    is_bf16 ? backward((const bf16 *)rows, (const bf16 *)weight, (const bf16 *)grads, (bf16 *)out, block_sums,
                       (bf16 *)grad_weight, count, size, stride, grad_stride, block, epsilon, offset, rounds_first,
                       num_threads)
            : backward((const float *)rows, (const float *)weight, (const float *)grads, (float *)out, block_sums,
                       (float *)grad_weight, count, size, stride, grad_stride, block, epsilon, offset, rounds_first,
                       num_threads);
}
}
