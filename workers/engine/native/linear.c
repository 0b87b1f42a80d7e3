/* Linear layers over packed bfloat16 weights, on CPU.
 *
 * An output is one sum over the inputs in ascending order, two at a time, so a row's bits do not depend on
 * how many rows share the call; tiles below only decide what is computed side by side.
 *
 * Packed weights: [out / 16][in / 2][16][2], sixteen outputs side by side, two inputs in one 32-bit lane, so
 * that one vector load feeds one multiply-add for sixteen outputs. `in` is even; `out` is rounded up to 16.
 */
#include "linear.h"

#define ROWS 6   /* rows of a tile */
#define PANELS 4 /* blocks of sixteen outputs of a tile */
#define AHEAD 12 /* pairs of inputs that weights are fetched ahead */
#define BLOCK 96 /* rows that stay in the second cache beside a tile's weights */

/* One tile: `rows` rows times `panels` blocks of outputs. Meanwhile `fetched` blocks of weights are fetched that
 * are read `next`. */
INLINE void tile(const uint16_t *x, int64_t x_stride, const uint16_t *packed, int64_t pairs,
                 const float *bias, uint16_t *out, int64_t out_stride, int64_t width, int rows,
                 int panels, const uint16_t *next, int fetched) {
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
        for (int p = 0; p < fetched; p++)
            __builtin_prefetch(next + (p * pairs + k) * 2 * LANES, 0, 2);
        for (int r = 0; r < rows; r++) {
            uint32_t pair;
            memcpy(&pair, x + r * x_stride + 2 * k, 4);
            for (int p = 0; p < panels; p++) sum[r][p] = add_pairs(sum[r][p], weights[p], pair);
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
                     int panels, const uint16_t *next, int fetched) {
#define FETCHING(n) tile(x, x_stride, packed, pairs, bias, out, out_stride, width, ROWS, PANELS, next, n)
    if (fetched == 1) {
        FETCHING(1);
    } else if (fetched == 2) {
        FETCHING(2);
    } else if (fetched == PANELS) {
        FETCHING(PANELS);
#undef FETCHING
    } else if (panels == PANELS) {
#define CALL(n) tile(x, x_stride, packed, pairs, bias, out, out_stride, width, n, PANELS, NULL, 0)
        UP_TO_SIX(rows, CALL)
#undef CALL
    } else {
        for (int p = 0; p < panels; p++) {
            const uint16_t *block = packed + p * pairs * 2 * LANES;
            const float *b = bias == NULL ? NULL : bias + p * LANES;
#define CALL(n)                                                                                    \
    tile(x, x_stride, block, pairs, b, out + p * LANES, out_stride, width - p * LANES, n, 1, NULL, 0)
            UP_TO_SIX(rows, CALL)
#undef CALL
        }
    }
}

/* out[row][o] = sum over i of x[row][i] * weight[o][i] + bias[o], rounded once to bfloat16. Rows are dense. */
void linear_part(team *t, const linear *l) {
    int64_t rows = l->rows, inputs = l->inputs, outputs = l->outputs;
    int64_t pairs = inputs / 2, blocks = (outputs + LANES - 1) / LANES;
    int64_t groups = (blocks + PANELS - 1) / PANELS, pieces = (rows + BLOCK - 1) / BLOCK * groups;
    EACH_AHEAD(t, piece, after, pieces) {
        int64_t start = piece / groups * BLOCK, first = piece % groups * PANELS;
        int64_t end = start + BLOCK < rows ? start + BLOCK : rows;
        int panels = (int)(blocks - first < PANELS ? blocks - first : PANELS);
        const uint16_t *panel = l->packed + first * pairs * 2 * LANES;
        const float *b = l->bias == NULL ? NULL : l->bias + first * LANES;
        /* One tile waits for memory anyway. Several would keep it waiting: the full ones share what is next. */
        int64_t full = (end - start) / ROWS;
        int left = 0;
        const uint16_t *next = l->packed;
        if (panels == PANELS && end - start > ROWS && after < pieces &&
            after % groups + PANELS <= blocks) {
            next += after % groups * PANELS * pairs * 2 * LANES;
            left = PANELS;
        }
        for (int64_t r = start; r < end; r += ROWS, full--) {
            int count = (int)(end - r < ROWS ? end - r : ROWS);
            int fetched = full > 0 ? (int)((left + full - 1) / full) : 0;
            tile_any(l->x + r * inputs, inputs, panel, pairs, b,
                     l->out + r * outputs + first * LANES, outputs, outputs - first * LANES, count,
                     panels, next, fetched);
            next += fetched * pairs * 2 * LANES;
            left -= fetched;
        }
    }
}

static void alone_or_helped(team *t, void *arguments) { linear_part(t, arguments); }

/* The same for a layer by itself. Returns 0, or 1 if memory ran out. */
int linear_bfloat16(const uint16_t *x, int64_t rows, int64_t inputs, const uint16_t *packed,
                    const float *bias, int64_t outputs, uint16_t *out, int32_t threads) {
    linear l = {x, rows, inputs, packed, bias, outputs, out};
    return team_run(threads, 1, alone_or_helped, &l);
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
