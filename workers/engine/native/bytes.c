/* Linear layers whose weights are bytes: half of what bfloat16 reads, for drafts, which may be inexact.
 *
 * A weight is a signed byte times its output's scale; a row's inputs become bytes 1 ... 255 around 128, by the
 * row's largest. Sums of products are exact integers; what the 128 adds is taken off by each output's sum of
 * weights.
 *
 * Packed weights: [out / 16][in / 4][16][4], so that one vector load feeds four inputs of sixteen outputs.
 */
#include "bytes.h"

#ifdef __AVX512VNNI__
#include <immintrin.h>
#endif

#define ROWS 6   /* rows of a tile */
#define PANELS 4 /* blocks of sixteen outputs of a tile */
#define MIDDLE 128

typedef int8_t bytes __attribute__((vector_size(4 * LANES), aligned(1)));

INLINE ivec multiply_add(ivec sum, bytes weights, uint32_t four) {
#ifdef __AVX512VNNI__
    __m512i s, w;
    memcpy(&s, &sum, sizeof s);
    memcpy(&w, &weights, sizeof w);
    s = _mm512_dpbusd_epi32(s, _mm512_set1_epi32((int32_t)four), w);
    memcpy(&sum, &s, sizeof s);
    return sum;
#else
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 4; i++)
            sum[lane] += (int32_t)weights[4 * lane + i] * (int32_t)((four >> (8 * i)) & 0xff);
    return sum;
#endif
}

INLINE void tile(const uint8_t *x, int64_t stride, const float *x_scales, const int8_t *packed,
                 int64_t fours, const float *scales, const int32_t *sums, float *out,
                 int64_t out_stride, int64_t width, int rows, int panels) {
    ivec sum[ROWS][PANELS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) sum[r][p] = (ivec){0};
    for (int64_t k = 0; k < fours; k++) {
        bytes weights[PANELS];
        for (int p = 0; p < panels; p++) {
            const int8_t *at = packed + (p * fours + k) * 4 * LANES;
            memcpy(&weights[p], at, sizeof(bytes));
            if (rows <= 2) __builtin_prefetch(at + 12 * 4 * LANES);
        }
        for (int r = 0; r < rows; r++) {
            uint32_t four;
            memcpy(&four, x + r * stride + 4 * k, 4);
            for (int p = 0; p < panels; p++) sum[r][p] = multiply_add(sum[r][p], weights[p], four);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) {
            int64_t left = width - p * LANES;
            int64_t n = left < LANES ? left : LANES;
            for (int64_t i = 0; i < n; i++) {
                int64_t o = p * LANES + i;
                int32_t exact = sum[r][p][i] - MIDDLE * sums[o];
                out[r * out_stride + o] = (float)exact * x_scales[r] * scales[o];
            }
        }
}

INLINE void tile_any(const uint8_t *x, int64_t stride, const float *x_scales, const int8_t *packed,
                     int64_t fours, const float *scales, const int32_t *sums, float *out,
                     int64_t out_stride, int64_t width, int rows, int panels) {
    if (panels == PANELS) {
#define CALL(n)                                                                                    \
    tile(x, stride, x_scales, packed, fours, scales, sums, out, out_stride, width, n, PANELS)
        UP_TO_SIX(rows, CALL)
#undef CALL
    } else {
        for (int p = 0; p < panels; p++) {
            int64_t o = p * LANES;
            const int8_t *block = packed + p * fours * 4 * LANES;
#define CALL(n)                                                                                    \
    tile(x, stride, x_scales, block, fours, scales + o, sums + o, out + o, out_stride, width - o,  \
         n, 1)
            UP_TO_SIX(rows, CALL)
#undef CALL
        }
    }
}

/* out[row][o] = sum over i of x[row][i] * weight[o][i], float32; x in bfloat16, `inputs` a multiple of 4. In two
 * parts. `room` has inputs + 4 bytes for every row. */
void bytes_part(team *t, const bytes_linear *l) {
    int64_t rows = l->rows, inputs = l->inputs, outputs = l->outputs;
    float *x_scales = (float *)l->room;
    uint8_t *small = (uint8_t *)(x_scales + rows);
    EACH(t, r, rows) {
        const uint16_t *x = l->x + r * inputs;
        float largest = 1e-30f;
        for (int64_t i = 0; i < inputs; i++) {
            float size = fabsf(widen_bfloat16(x[i]));
            largest = size > largest ? size : largest;
        }
        x_scales[r] = largest / 127.0f;
        float inverse = 127.0f / largest;
        for (int64_t i = 0; i < inputs; i++)
            small[r * inputs + i] =
                (uint8_t)(MIDDLE + (int32_t)rintf(widen_bfloat16(x[i]) * inverse));
    }
    int64_t fours = inputs / 4, blocks = (outputs + LANES - 1) / LANES;
    EACH(t, group, (blocks + PANELS - 1) / PANELS) {
        int64_t first = group * PANELS, o = first * LANES;
        int panels = (int)(blocks - first < PANELS ? blocks - first : PANELS);
        for (int64_t r = 0; r < rows; r += ROWS) {
            int count = (int)(rows - r < ROWS ? rows - r : ROWS);
            tile_any(small + r * inputs, inputs, x_scales + r,
                     l->packed + first * fours * 4 * LANES, fours, l->scales + o, l->sums + o,
                     l->out + r * outputs + o, outputs, outputs - o, count, panels);
        }
    }
}
