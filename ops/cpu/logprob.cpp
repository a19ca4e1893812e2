// Entropies of rows of logits, and the gradients by them; see ops/logprob_cpu.py for the contract.

#include <algorithm>

#include "vector.h"

namespace {

constexpr float LOWEST = -88.0f; // exp is exactly 0 here, and what it is multiplied by stays finite
constexpr int64_t BLOCK = 4096;  // as many as are added up in fp32

template <class T> float weighted_sum(const T *row, int64_t size, float maximum_logit, float inverse) {
    double total = 0;
    for (int64_t start = 0; start < size; start += BLOCK) {
        const int64_t stop = std::min(size, start + BLOCK);
        vec part = {};
        int64_t i = start;
        for (; i + LANES <= stop; i += LANES) {
            vec x = maximum((load(row + i) - maximum_logit) * inverse, splat(LOWEST));
            part += exp_nonpositive(x) * x;
        }
        for (; i < stop; i++) {
            vec x = splat(std::max((widen(row[i]) - maximum_logit) * inverse, LOWEST));
            total += (exp_nonpositive(x) * x)[0];
        }
        total += sum(part);
    }
    return (float)total;
}

struct Row {
    float inverse, log_normaliser, entropy, grad_logprob, grad_entropy, slope;

    INLINE vec gradient(const Row &r, vec logits) {
        vec logprob = maximum(logits * r.inverse - r.log_normaliser, splat(LOWEST));
        vec prob = exp_nonpositive(logprob > 0.0f ? (vec){} : logprob);
        return -(r.grad_logprob + r.grad_entropy * (logprob + r.entropy)) * prob * r.slope;
    }
};

template <class T> void gradient_row(T *row, int64_t size, int64_t target, const Row &r) {
    const vec at_target = Row::gradient(r, splat(widen(row[target]))) + r.grad_logprob * r.slope;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(row + i, Row::gradient(r, load(row + i)));
    if (i < size) store_some(row + i, Row::gradient(r, load_some(row + i, (int)(size - i))), (int)(size - i));
    store_some(row + target, at_target, 1);
}

template <class T>
void sums(const T *rows, int64_t count, int64_t size, int64_t stride, const float *maxima, float inverse, float *out,
          int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
    for (int64_t r = 0; r < count; r++) out[r] = weighted_sum(rows + r * stride, size, maxima[r], inverse);
}

template <class T>
void gradients(T *rows, int64_t count, int64_t size, int64_t stride, const int64_t *targets,
               const float *log_normalisers, const float *entropies, const float *grad_logprobs,
               const float *grad_entropies, float inverse, float slope, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
    for (int64_t r = 0; r < count; r++) {
        const Row row = {inverse, log_normalisers[r], entropies[r], grad_logprobs[r], grad_entropies[r], slope};
        gradient_row(rows + r * stride, size, targets[r], row);
    }
}

} // namespace

extern "C" {

// (R,) sums over a row (R, V) of exp(x) * x with x = (logit - maximum) * inverse.
void entropy_sums(const void *rows, int is_bf16, int64_t count, int64_t size, int64_t stride, const float *maxima,
                  float inverse, float *out, int num_threads) {
    is_bf16 ? sums((const bf16 *)rows, count, size, stride, maxima, inverse, out, num_threads)
            : sums((const float *)rows, count, size, stride, maxima, inverse, out, num_threads);
}

// Logits (R, V) become their gradients: slope * (grad_logprob * (one-hot - p) - grad_entropy * p * (log p + entropy)).
void logit_gradients(void *rows, int is_bf16, int64_t count, int64_t size, int64_t stride, const int64_t *targets,
                     const float *log_normalisers, const float *entropies, const float *grad_logprobs,
                     const float *grad_entropies, float inverse, float slope, int num_threads) {
    is_bf16 ? gradients((bf16 *)rows, count, size, stride, targets, log_normalisers, entropies, grad_logprobs,
                        grad_entropies, inverse, slope, num_threads)
            : gradients((float *)rows, count, size, stride, targets, log_normalisers, entropies, grad_logprobs,
                        grad_entropies, inverse, slope, num_threads);
}
}
