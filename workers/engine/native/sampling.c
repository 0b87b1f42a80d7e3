/* Drawing a token: filters, shared noise, the largest. See workers/sampling.py for the rules; this is the
 * same rule for a CPU, where it must cost little beside a step.
 */
#include "vector.h"

INLINE uvec mix32(uvec x) {
    x = (x ^ (x >> 16)) * 0x21f0aaadu;
    x = (x ^ (x >> 15)) * 0x735a2d97u;
    return x ^ (x >> 15);
}

/* Natural logarithm of positive, normal numbers, to about one unit in the last place. */
INLINE vec log_vec(vec x) {
    ivec bits;
    memcpy(&bits, &x, sizeof bits);
    ivec exponent = (bits >> 23) - 127;
    bits = (bits & 0x007fffff) | 0x3f800000;
    vec m;
    memcpy(&m, &bits, sizeof m);
    ivec high = m > splat(1.41421356f);
    m = select_vec(high, m * 0.5f, m);
    vec e = __builtin_convertvector(exponent - high, vec); /* a true lane is -1 */
    vec f = m - 1.0f, z = f * f;
    vec p = splat(7.0376836292e-2f);
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    p = p * f * z + e * -2.12194440e-4f - 0.5f * z;
    return f + p + e * 0.693359375f;
}

/* -log1p(-v) for v in (0, 1): small v keep all their digits. */
INLINE vec exponential(vec v) {
    vec u = 1.0f - v;
    vec d = 1.0f - u; /* what of v survived the subtraction */
    vec safe = select_vec(d == splat(0.0f), splat(0.5f), d);
    vec ratio = select_vec(d == splat(0.0f), splat(1.0f), v / safe);
    vec whole = select_vec(d == splat(0.0f), v, -log_vec(u));
    return whole * ratio;
}

/* Uniform numbers in (0, 1) of sixteen ids: the small ones become large noise. */
INLINE vec uniform(uvec ids, uint64_t key) {
    uvec h = mix32(mix32(ids ^ (uint32_t)key) ^ (uint32_t)(key >> 32));
    /* Convert as two halves: there is no vector conversion of large unsigned numbers. */
    vec high = __builtin_convertvector((ivec)(h >> 16), vec);
    vec low = __builtin_convertvector((ivec)(h & 0xffffu), vec);
    vec v = (high * 65536.0f + low + 0.5f) * 2.3283064365386963e-10f;
    return select_vec(v > splat(0.99999994f), splat(0.99999994f), v);
}

INLINE vec gumbel(vec v) { return -log_vec(exponential(v)); }

static int descending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* The k-th largest of n values, 0 < k < n. `heap` has room for k: a heap with the smallest on top. */
static float kth_largest(const float *values, int64_t n, int64_t k, float *heap) {
    memcpy(heap, values, sizeof(float) * k);
    for (int64_t start = k / 2; start-- > 0;)
        for (int64_t i = start;;) {
            int64_t child = 2 * i + 1;
            if (child >= k) break;
            if (child + 1 < k && heap[child + 1] < heap[child]) child++;
            if (heap[i] <= heap[child]) break;
            float swap = heap[i];
            heap[i] = heap[child];
            heap[child] = swap;
            i = child;
        }
    for (int64_t j = k; j < n; j++) {
        if (!(values[j] > heap[0])) continue;
        int64_t i = 0;
        for (;;) {
            int64_t child = 2 * i + 1;
            if (child >= k) break;
            if (child + 1 < k && heap[child + 1] < heap[child]) child++;
            if (values[j] <= heap[child]) break;
            heap[i] = heap[child];
            i = child;
        }
        heap[i] = values[j];
    }
    return heap[0];
}

#define BUCKETS 512
#define BUCKET_DEPTH 24.0f /* what is less likely than exp(-24) of the best shares the last bucket */

INLINE int bucket_of(float value, float max) {
    float place = (max - value) * (BUCKETS / BUCKET_DEPTH);
    return place < BUCKETS - 1 ? (int)place : BUCKETS - 1;
}

/* The value of the last token that is needed to reach the mass `top_p` among those >= threshold.
 * `weights` has room for n + LANES values. Only the bucket where the mass is reached is sorted. */
static float top_p_threshold(const float *values, int64_t n, float top_p, float threshold, float max,
                             float *weights) {
    float mass[BUCKETS] = {0}, total = 0;
    for (int64_t i = 0; i < n; i += LANES) {
        vec x;
        memcpy(&x, values + i, sizeof x);
        x = select_vec(x >= splat(threshold), exp_vec(x - max), splat(0));
        memcpy(weights + i, &x, sizeof x);
    }
    for (int64_t i = 0; i < n; i++)
        if (weights[i] > 0) mass[bucket_of(values[i], max)] += weights[i];
    for (int b = 0; b < BUCKETS; b++) total += mass[b];
    float above = 0, needed = top_p * total;
    int b = 0;
    while (b < BUCKETS - 1 && above + mass[b] < needed) above += mass[b++];
    int64_t count = 0;
    float *inside = weights; /* overwritten from the front, behind what is read */
    for (int64_t i = 0; i < n; i++)
        if (weights[i] > 0 && bucket_of(values[i], max) == b) inside[count++] = values[i];
    qsort(inside, count, sizeof(float), descending);
    for (int64_t i = 0; i < count; i++) {
        above += expf(inside[i] - max);
        if (above >= needed) return inside[i];
    }
    return count ? inside[count - 1] : threshold;
}

/* The least value that top-k, top-p and min-p leave of n values, padded to whole vectors, with as much room
 * behind them and a vector more. */
static float cutoff(float *values, int64_t n, int64_t top_k, float top_p, float min_p, float max) {
    int64_t padded = (n + LANES - 1) / LANES * LANES;
    float threshold = -INFINITY;
    if (top_k > 0 && top_k < n) threshold = kth_largest(values, n, top_k, values + padded);
    if (top_p < 1.0f) {
        float cut = top_p_threshold(values, padded, top_p, threshold, max, values + padded);
        threshold = cut > threshold ? cut : threshold;
    }
    if (min_p > 0.0f) {
        float cut = max + logf(min_p);
        threshold = cut > threshold ? cut : threshold;
    }
    return threshold;
}

/* The drawn token of one row of logits, or -1 if the row holds no usable numbers, -2 if memory ran out. */
int64_t draw_token(const float *logits, int64_t n, float temperature, int64_t top_k, float top_p,
                   float min_p, uint64_t key) {
    int64_t padded = (n + LANES - 1) / LANES * LANES;
    float *values = malloc(sizeof(float) * (2 * padded + LANES));
    if (values == NULL) return -2;
    for (int64_t i = n; i < padded; i++) values[i] = -INFINITY;
    vec largest = splat(-INFINITY);
    ivec broken = {0};
    for (int64_t i = 0; i < padded; i += LANES) {
        vec x = splat(-INFINITY);
        memcpy(&x, logits + i, sizeof(float) * (n - i < LANES ? n - i : LANES));
        x = x / temperature;
        memcpy(values + i, &x, sizeof x);
        largest = max_vec(x, largest);
        broken |= x != x;
    }
    float max = horizontal_max(largest);
    int64_t token = -1;
    if (!any_lane(broken) && max > -INFINITY && max < INFINITY) {
        float threshold = cutoff(values, n, top_k, top_p, min_p, max);
        ivec lane;
        for (int i = 0; i < LANES; i++) lane[i] = i;
        float best = -INFINITY;
        /* Noise is at most -log(v), so a token with v > exp(value - best) cannot win: logarithms are
         * taken for few. Beginning at the likeliest token makes `best` good from the start. */
        int64_t start = 0;
        while (start < padded) {
            vec x;
            memcpy(&x, values + start, sizeof x);
            if (any_lane(x == splat(max))) break;
            start += LANES;
        }
        for (int64_t step = -LANES; step < padded; step += LANES) {
            int64_t i = step < 0 ? start : step;
            vec x;
            memcpy(&x, values + i, sizeof x);
            ivec alive = (x >= splat(threshold)) & (x > splat(-INFINITY));
            if (!any_lane(alive)) continue;
            vec v = uniform((uvec)(lane + (int32_t)i), key);
            vec gap = x - best;
            ivec possible = (gap >= splat(0.0f)) |
                            (v <= exp_vec(select_vec(gap < splat(0.0f), gap, splat(0))) * 1.001f);
            alive &= possible;
            if (!any_lane(alive)) continue;
            vec sum = select_vec(alive, x + gumbel(v), splat(-INFINITY));
            for (int j = 0; j < LANES; j++)
                if (sum[j] > best || (sum[j] == best && i + j < token)) {
                    best = sum[j];
                    token = i + j;
                }
        }
    }
    free(values);
    return token;
}

/* The `count` largest of logits with noise, as a draft ranks its guesses: their places, largest first, and the
 * softmax over all of them at temperature `softness`. `ids` are the noise's ids, NULL for 0 .. n - 1. At
 * temperature 0 there is no noise and no filter. Returns how many were found, or -2 if memory ran out. */
int64_t top_children(const float *logits, const uint32_t *ids, int64_t n, float temperature,
                     int64_t top_k, float top_p, float min_p, uint64_t key, float softness,
                     int64_t count, int64_t *places, float *probabilities) {
    int64_t padded = (n + LANES - 1) / LANES * LANES;
    float *values = malloc(sizeof(float) * (2 * padded + LANES));
    if (values == NULL) return -2;
    for (int64_t i = n; i < padded; i++) values[i] = -INFINITY;
    memcpy(values, logits, sizeof(float) * n);
    float max = -INFINITY, threshold = -INFINITY;
    if (temperature > 0) {
        for (int64_t i = 0; i < n; i++) values[i] /= temperature;
        for (int64_t i = 0; i < n; i++) max = values[i] > max ? values[i] : max;
        threshold = cutoff(values, n, top_k, top_p, min_p, max);
    }
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    int64_t found = 0;
    vec largest = splat(-INFINITY);
    for (int64_t i = 0; i < padded; i += LANES) {
        vec x;
        memcpy(&x, values + i, sizeof x);
        ivec alive = (x >= splat(threshold)) & (x > splat(-INFINITY));
        if (temperature > 0 && any_lane(alive)) {
            uvec id = (uvec)(lane + (int32_t)i);
            if (ids != NULL) memcpy(&id, ids + i, sizeof(uint32_t) * (n - i < LANES ? n - i : LANES));
            x = x + gumbel(uniform(id, key));
        }
        x = select_vec(alive, x, splat(-INFINITY));
        memcpy(values + i, &x, sizeof x);
        largest = max_vec(x, largest);
        float smallest = found < count ? -INFINITY : values[places[found - 1]];
        if (!any_lane(x > splat(smallest))) continue;
        for (int j = 0; j < LANES; j++) {
            if (!(x[j] > (found < count ? -INFINITY : values[places[found - 1]]))) continue;
            int64_t at = found < count ? found++ : found - 1;
            for (; at > 0 && values[places[at - 1]] < x[j]; at--) places[at] = places[at - 1];
            places[at] = i + j;
        }
    }
    float top = horizontal_max(largest);
    vec sum = splat(0);
    for (int64_t i = 0; i < padded; i += LANES) {
        vec x;
        memcpy(&x, values + i, sizeof x);
        sum = sum + exp_vec((x - top) / softness);
    }
    float total = horizontal_sum(sum);
    for (int64_t i = 0; i < found; i++)
        probabilities[i] = expf((values[places[i]] - top) / softness) / total;
    free(values);
    return found;
}

/* For tests: the noise of n ids, a multiple of sixteen. */
void gumbel_noise(const uint32_t *ids, int64_t n, uint64_t key, float *out) {
    for (int64_t i = 0; i < n; i += LANES) {
        uvec x;
        memcpy(&x, ids + i, sizeof x);
        vec made = gumbel(uniform(x, key));
        memcpy(out + i, &made, sizeof made);
    }
}
