/* Linear layers over packed bfloat16 weights, on CPU.
 *
 * An output is one sum over the inputs in ascending order, two at a time, so a row's bits do not depend on
 * how many rows share the call; tiles below only decide what is computed side by side.
 *
 * Packed weights: [out / 16][in / 2][16][2], sixteen outputs side by side, two inputs in one 32-bit lane, so
 * that one vector load feeds one multiply-add for sixteen outputs. `in` is even; `out` is rounded up to 16.
 */
#include "linear.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define ROWS 6   /* rows of a tile */
#define PANELS 4 /* blocks of sixteen outputs of a tile */
#define AHEAD 12 /* pairs of inputs that weights are fetched ahead */
#define BLOCK 96 /* rows that stay in the second cache beside a tile's weights */

/* sum + w[even] * x[even] + w[odd] * x[odd], in each of sixteen lanes. */
INLINE vec multiply_add(vec sum, uvec weights, uint32_t pair) {
#ifdef __AVX512BF16__
    __m512 s;
    __m512i w;
    memcpy(&s, &sum, sizeof s);
    memcpy(&w, &weights, sizeof w);
    s = _mm512_dpbf16_ps(s, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int32_t)pair));
    memcpy(&sum, &s, sizeof s);
    return sum;
#else
    uint32_t low = pair << 16, high = pair & 0xffff0000u;
    float even, odd;
    memcpy(&even, &low, 4);
    memcpy(&odd, &high, 4);
    uvec shifted = weights << 16, masked = weights & 0xffff0000u;
    vec w0, w1;
    memcpy(&w0, &shifted, sizeof w0);
    memcpy(&w1, &masked, sizeof w1);
    sum = sum + w0 * even;
    return sum + w1 * odd;
#endif
}

/* One tile: `rows` rows times `panels` blocks of outputs. */
INLINE void tile(const uint16_t *x, int64_t x_stride, const uint16_t *packed, int64_t pairs,
                 const float *bias, uint16_t *out, int64_t out_stride, int64_t width, int rows,
                 int panels) {
    vec sum[ROWS][PANELS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) sum[r][p] = splat(0);
    for (int64_t k = 0; k < pairs; k++) {
        uvec weights[PANELS];
        for (int p = 0; p < panels; p++) {
            const uint16_t *at = packed + (p * pairs + k) * 2 * LANES;
            memcpy(&weights[p], at, sizeof(uvec));
            if (rows <= 2) __builtin_prefetch(at + AHEAD * 2 * LANES);
        }
        for (int r = 0; r < rows; r++) {
            uint32_t pair;
            memcpy(&pair, x + r * x_stride + 2 * k, 4);
            for (int p = 0; p < panels; p++) sum[r][p] = multiply_add(sum[r][p], weights[p], pair);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) {
            int64_t left = width - p * LANES;
            int64_t n = left < LANES ? left : LANES;
            uint16_t *to = out + r * out_stride + p * LANES;
            for (int64_t i = 0; i < n; i++)
                to[i] = to_bfloat16(sum[r][p][i] + (bias != NULL ? bias[p * LANES + i] : 0.0f));
        }
}

INLINE void tile_any(const uint16_t *x, int64_t x_stride, const uint16_t *packed, int64_t pairs,
                     const float *bias, uint16_t *out, int64_t out_stride, int64_t width, int rows,
                     int panels) {
    if (panels == PANELS) {
#define CALL(n) tile(x, x_stride, packed, pairs, bias, out, out_stride, width, n, PANELS)
        UP_TO_SIX(rows, CALL)
#undef CALL
    } else {
        for (int p = 0; p < panels; p++) {
            const uint16_t *block = packed + p * pairs * 2 * LANES;
            const float *b = bias == NULL ? NULL : bias + p * LANES;
#define CALL(n)                                                                                    \
    tile(x, x_stride, block, pairs, b, out + p * LANES, out_stride, width - p * LANES, n, 1)
            UP_TO_SIX(rows, CALL)
#undef CALL
        }
    }
}

/* out[row][o] = sum over i of x[row][i] * weight[o][i] + bias[o], rounded once to bfloat16. Rows are dense. */
void linear_bfloat16(const uint16_t *x, int64_t rows, int64_t inputs, const uint16_t *packed,
                     const float *bias, int64_t outputs, uint16_t *out, int32_t threads) {
    int64_t pairs = inputs / 2, blocks = (outputs + LANES - 1) / LANES;
    int64_t groups = (blocks + PANELS - 1) / PANELS;
    (void)threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t start = 0; start < rows; start += BLOCK) {
        int64_t end = start + BLOCK < rows ? start + BLOCK : rows;
#pragma omp for schedule(static) nowait
        for (int64_t g = 0; g < groups; g++) {
            int64_t first = g * PANELS;
            int panels = (int)(blocks - first < PANELS ? blocks - first : PANELS);
            const uint16_t *panel = packed + first * pairs * 2 * LANES;
            const float *b = bias == NULL ? NULL : bias + first * LANES;
            for (int64_t r = start; r < end; r += ROWS) {
                int count = (int)(end - r < ROWS ? end - r : ROWS);
                tile_any(x + r * inputs, inputs, panel, pairs, b, out + r * outputs + first * LANES,
                         outputs, outputs - first * LANES, count, panels);
            }
        }
    }
}

/* Packs weight [out][in], bfloat16, dense. `packed` has room for out rounded up to 16. */
void pack_bfloat16(const uint16_t *weight, int64_t outputs, int64_t inputs, uint16_t *packed) {
    int64_t pairs = inputs / 2, blocks = (outputs + LANES - 1) / LANES;
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t k = 0; k < pairs; k++)
            for (int64_t lane = 0; lane < LANES; lane++) {
                int64_t o = b * LANES + lane;
                uint16_t *to = packed + ((b * pairs + k) * LANES + lane) * 2;
                to[0] = o < outputs ? weight[o * inputs + 2 * k] : 0;
                to[1] = o < outputs ? weight[o * inputs + 2 * k + 1] : 0;
            }
}
