// Adds narrow numbers to wide ones; see ops/accumulate.py.

#include "vector.h"

extern "C" {

void accumulate(float *total, const bf16 *part, int64_t size, int num_threads) {
    const int64_t vectors = size / LANES;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && size > 32768)
    for (int64_t i = 0; i < vectors; i++) store(total + i * LANES, load(total + i * LANES) + load(part + i * LANES));
    for (int64_t i = vectors * LANES; i < size; i++) total[i] += widen(part[i]);
}
}
