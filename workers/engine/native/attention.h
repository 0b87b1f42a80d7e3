#ifndef SLIPSTREAM_ATTENTION_H
#define SLIPSTREAM_ATTENTION_H

#include "team.h"

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

/* One layer's work. Strides count elements; the head dimension is dense, and so is `out`, [rows][query heads]
 * [head dim]; rows that belong to no sequence are left alone. `room` is `room_each` floats for every thread. */
typedef struct {
    const sequence *sequences;
    int32_t num_sequences;
    shape s;
    const void *query;
    int64_t query_row, query_head;
    const void *keys;
    int64_t key_row, key_head;
    const void *values;
    int64_t value_row, value_head;
    void *out;
    float *room;
    int64_t room_each;
} attention;

/* See attention.c. */
int64_t attention_room(const sequence *sequences, int32_t num_sequences, int32_t head_dim);
void attention_part(team *t, const attention *a);

#endif
