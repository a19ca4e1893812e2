// Root-mean-square norms of rows; see ops/norm.py for the contract.

#include "vector.h"

namespace {

template <class T>
void norm_row(const T *row, const T *weight, T *out, int64_t size, float epsilon, float offset, bool rounds_first) {
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
    const float factor = 1.0f / std::sqrt(sum(squares) / (float)size + epsilon);
    for (i = 0; i < size; i += LANES) {
        const int count = (int)(size - i < LANES ? size - i : LANES);
        vec x = count == LANES ? load(row + i) : load_some(row + i, count);
        vec w = (count == LANES ? load(weight + i) : load_some(weight + i, count)) + offset;
        x *= factor;
        if (rounds_first) {
            T rounded[LANES];
            store(rounded, x);
            x = load(rounded);
        }
        x *= w;
        count == LANES ? store(out + i, x) : store_some(out + i, x, count);
    }
}

template <class T>
void run(const T *rows, const T *weight, T *out, int64_t count, int64_t size, int64_t stride, float epsilon,
         float offset, bool rounds_first, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && count * size > 32768)
    for (int64_t r = 0; r < count; r++)
        norm_row(rows + r * stride, weight, out + r * size, size, epsilon, offset, rounds_first);
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
}
