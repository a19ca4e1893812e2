// Rotary embeddings of queries and keys, and their gradients; see ops/rotary.py for the contract.

// Products are rounded before they are added, as they are in torch, which a fused multiply-add would not do. Clang fuses
// within one expression only.
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include <algorithm>

#include "vector.h"

namespace {

// One head of one token. The two halves of `cos` and of `sin` are not taken to be equal.
template <class T, bool is_backward>
INLINE void turn(const T *from, const T *cos, const T *sin, T *to, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        const int count = (int)std::min<int64_t>(half - i, LANES);
        vec first = load_up_to(from + i, count), second = load_up_to(from + half + i, count);
        vec cos_first = load_up_to(cos + i, count), cos_second = load_up_to(cos + half + i, count);
        vec sin_first = load_up_to(sin + i, count), sin_second = load_up_to(sin + half + i, count);
        if (is_backward) {
            store_up_to(to + i, first * cos_first + second * sin_second, count);
            store_up_to(to + half + i, second * cos_second - first * sin_first, count);
        } else {
            store_up_to(to + i, rounded<T>(first * cos_first) - rounded<T>(second * sin_first), count);
            store_up_to(to + half + i, rounded<T>(second * cos_second) + rounded<T>(first * sin_second), count);
        }
    }
}

template <class T> struct Heads {
    const T *from; // null where nobody asks for `to`
    T *to;         // (N, count, size) contiguous
    int64_t count, row, head;
};

template <class T, bool is_backward>
void run(Heads<T> queries, Heads<T> keys, const T *cos, const T *sin, int64_t rows, int64_t size, int64_t cos_row,
         int64_t sin_row, int num_threads) {
    const bool is_large = rows * size * (queries.count + keys.count) > 32768;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && is_large)
    for (int64_t r = 0; r < rows; r++) {
        for (const Heads<T> &heads : {queries, keys}) {
            if (heads.from == nullptr) continue;
            for (int64_t h = 0; h < heads.count; h++)
                turn<T, is_backward>(heads.from + r * heads.row + h * heads.head, cos + r * cos_row, sin + r * sin_row,
                                     heads.to + (r * heads.count + h) * size, size / 2);
        }
    }
}

template <class T>
void dispatch(const void *q, const void *k, const void *cos, const void *sin, void *q_out, void *k_out,
              int is_backward, int64_t rows, int64_t size, const int64_t *q_layout, const int64_t *k_layout,
              int64_t cos_row, int64_t sin_row, int num_threads) {
    Heads<T> queries = {(const T *)q, (T *)q_out, q_layout[0], q_layout[1], q_layout[2]};
    Heads<T> keys = {(const T *)k, (T *)k_out, k_layout[0], k_layout[1], k_layout[2]};
    is_backward ? run<T, true>(queries, keys, (const T *)cos, (const T *)sin, rows, size, cos_row, sin_row, num_threads)
                : run<T, false>(queries, keys, (const T *)cos, (const T *)sin, rows, size, cos_row, sin_row,
                                num_threads);
}

} // namespace

extern "C" {

// Queries and keys (N, heads, size), or the gradients by what became of them, null where there is none, to contiguous
// ones. A layout is the number of heads, and the strides from token to token and from head to head.
void rotary(const void *q, const void *k, const void *cos, const void *sin, void *q_out, void *k_out, int is_bf16,
            int is_backward, int64_t rows, int64_t size, int64_t q_heads, int64_t q_row, int64_t q_head,
            int64_t k_heads, int64_t k_row, int64_t k_head, int64_t cos_row, int64_t sin_row, int num_threads) {
    const int64_t q_layout[] = {q_heads, q_row, q_head}, k_layout[] = {k_heads, k_row, k_head};
    is_bf16 ? dispatch<bf16>(q, k, cos, sin, q_out, k_out, is_backward, rows, size, q_layout, k_layout, cos_row,
                             sin_row, num_threads)
            : dispatch<float>(q, k, cos, sin, q_out, k_out, is_backward, rows, size, q_layout, k_layout, cos_row,
                              sin_row, num_threads);
}
}
