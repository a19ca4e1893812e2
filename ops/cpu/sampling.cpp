// Row maxima and block sums of exponentials over a vocabulary; see ops/sampling.py for the contract.

#include <algorithm>
#include <functional>
#include <vector>

#include "vector.h"

namespace {

// Passes over a NaN, which the sums then show.
template <class T> float row_maximum(const T *row, int64_t size) {
    const vec never = splat(-std::numeric_limits<float>::infinity());
    vec peak[4] = {never, never, never, never};
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int j = 0; j < 4; j++) peak[j] = maximum(load(row + i + j * LANES), peak[j]);
    float best = largest(maximum(maximum(peak[0], peak[1]), maximum(peak[2], peak[3])));
    for (; i < size; i++) best = std::max(best, widen(row[i]));
    return best;
}

template <class T>
void row_sums(const T *row, int64_t size, int64_t block, float maximum, float inverse, float *sums) {
    for (int64_t start = 0; start < size; start += block) {
        const int64_t stop = std::min(size, start + block);
        vec total = {};
        int64_t i = start;
        for (; i + LANES <= stop; i += LANES) total += exp_nonpositive((load(row + i) - maximum) * inverse);
        float rest = 0;
        for (; i < stop; i++) rest += exp_nonpositive(splat((widen(row[i]) - maximum) * inverse))[0];
        *sums++ = sum(total) + rest;
    }
}

// Finds the k-th largest logit, or where a share of the probability is reached, without sorting a row: tokens are counted
// and weighed by how far they are under the maximum, in bins of 1/32 of that distance, and one bin is looked into.
class Ranking {
    static constexpr int SHIFT = 18, BINS = 1 << (31 - SHIFT); // of a distance's bits, which rise with it

    const float *row;
    int64_t size;
    float maximum, inverse, floor;
    std::vector<uint32_t> counts = std::vector<uint32_t>(BINS);
    std::vector<double> masses = std::vector<double>(BINS);
    std::vector<float> found;

    static uint32_t bin(float distance) {
        uint32_t bits;
        memcpy(&bits, &distance, sizeof bits);
        return bits >> SHIFT;
    }

    double weight(float x) const { return exp_nonpositive(splat((x - maximum) * inverse))[0]; }

    // The logits of a bin that are not under the floor, falling.
    void look_into(uint32_t wanted) {
        found.clear();
        for (int64_t i = 0; i < size; i++)
            if (row[i] >= floor && bin(maximum - row[i]) == wanted) found.push_back(row[i]);
        std::sort(found.begin(), found.end(), std::greater<float>());
    }

  public:
    void count(const float *logits, int64_t width, float largest, float divisor, float lowest) {
        row = logits, size = width, maximum = largest, inverse = 1.0f / divisor, floor = lowest;
        std::fill(counts.begin(), counts.end(), 0);
        std::fill(masses.begin(), masses.end(), 0.0);
        for (int64_t i = 0; i < size; i += LANES) {
            const int stop = (int)std::min<int64_t>(LANES, size - i);
            vec x = stop == LANES ? load(row + i) : load_some(row + i, stop);
            vec weights = exp_nonpositive((x - maximum) * inverse);
            for (int l = 0; l < stop; l++) {
                if (!(row[i + l] >= floor)) continue;
                const uint32_t at = bin(maximum - row[i + l]);
                counts[at]++;
                masses[at] += weights[l];
            }
        }
    }

    // Leaves the `k` largest, and those equal to the last of them.
    float keep_largest(int64_t k) {
        int64_t seen = 0;
        for (uint32_t b = 0; b < BINS; b++) {
            if (seen + counts[b] < k) {
                seen += counts[b];
                continue;
            }
            look_into(b);
            floor = found[k - seen - 1];
            counts[b] = 0, masses[b] = 0;
            for (float x : found)
                if (x >= floor) counts[b]++, masses[b] += weight(x);
            std::fill(counts.begin() + b + 1, counts.end(), 0);
            std::fill(masses.begin() + b + 1, masses.end(), 0.0);
            break;
        }
        return floor;
    }

    // Leaves the fewest whose weights reach this share of what there is, and those equal to the last of them.
    float keep_mass(double share) {
        double target = 0, seen = 0;
        for (double mass : masses) target += mass;
        target *= share;
        for (uint32_t b = 0; b < BINS; b++) {
            if (seen + masses[b] < target) {
                seen += masses[b];
                continue;
            }
            if (!counts[b]) continue;
            look_into(b);
            for (float x : found) {
                floor = x;
                seen += weight(x);
                if (seen >= target) break;
            }
            break;
        }
        return floor;
    }
};

} // namespace

extern "C" {

// (R,) the smallest logit that a row's min_p, top_k and top_p leave, in this order; 0, 0 and 1 leave all.
void row_floors(const float *logits, int64_t rows, int64_t size, int64_t stride, const float *divisors,
                const float *min_ps, const int64_t *top_ks, const double *top_ps, float *floors, int num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && rows > 1)
    {
        Ranking ranking;
#pragma omp for schedule(dynamic, 1)
        for (int64_t r = 0; r < rows; r++) {
            const float *row = logits + r * stride, maximum = row_maximum(row, size);
            float floor = -std::numeric_limits<float>::infinity();
            if (maximum > floor && min_ps[r] > 0) floor = maximum + divisors[r] * std::log(min_ps[r]);
            const bool ranks = (top_ks[r] > 0 && top_ks[r] < size) || top_ps[r] < 1;
            if (ranks && maximum > -std::numeric_limits<float>::infinity()) {
                ranking.count(row, size, maximum, divisors[r], floor);
                if (top_ks[r] > 0 && top_ks[r] < size) floor = ranking.keep_largest(top_ks[r]);
                if (top_ps[r] < 1) floor = ranking.keep_mass(top_ps[r]);
            }
            floors[r] = floor;
        }
    }
}

// (R,) largest of each row.
void row_maxima(const void *logits, int is_bf16, int64_t rows, int64_t size, int64_t stride, float *maxima,
                int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && rows > 1)
    for (int64_t r = 0; r < rows; r++)
        maxima[r] = is_bf16 ? row_maximum((const bf16 *)logits + r * stride, size)
                            : row_maximum((const float *)logits + r * stride, size);
}

// (R, blocks) sums over `block` neighbours of exp((x - maximum) / divisor).
void block_sums(const void *logits, int is_bf16, int64_t rows, int64_t size, int64_t stride, int64_t block,
                const float *maxima, const float *divisors, float *sums, int num_threads) {
    const int64_t blocks = (size + block - 1) / block;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && rows > 1)
    for (int64_t r = 0; r < rows; r++) {
        float inverse = 1.0f / divisors[r];
        is_bf16 ? row_sums((const bf16 *)logits + r * stride, size, block, maxima[r], inverse, sums + r * blocks)
                : row_sums((const float *)logits + r * stride, size, block, maxima[r], inverse, sums + r * blocks);
    }
}
}
