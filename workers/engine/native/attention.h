#ifndef SLIPSTREAM_ATTENTION_H
#define SLIPSTREAM_ATTENTION_H

#include "vector.h"

/* One sequence of a step. Its rows r, from first_row of the flat batch on, go to slots first_slot + r. */
typedef struct {
    void *keys, *values;
    int64_t capacity;
    int32_t first_row, num_rows, base, first_slot;
    /* Row r attends to slots 0 .. contiguous[r] - 1, then to base + tail[j] for
     * tail_start[r] <= j < tail_start[r + 1], in this order: it is the order of positions. */
    const int32_t *contiguous, *tail_start, *tail;
} sequence;

typedef struct {
    int32_t layer, query_heads, kv_heads, head_dim, bfloat16, window;
    float scale, softcap;
} shape;

/* See attention.c. */
int attend(const sequence *sequences, int32_t num_sequences, const shape *s, const void *query,
           int64_t query_row, int64_t query_head, const void *keys, int64_t key_row,
           int64_t key_head, const void *values, int64_t value_row, int64_t value_head, void *out,
           int32_t threads);

#endif
