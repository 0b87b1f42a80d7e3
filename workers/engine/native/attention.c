/* Attention over a slot-contiguous KV cache, on CPU.
 *
 * A row's result does not depend, bit for bit, on which rows share the call, on how a prompt was cut
 * into chunks, or on whether its ancestors lie in a chain or scattered in a tree: every score is one
 * sum over the head dimension in ascending order, scores are ordered by position before the softmax,
 * and values are added in ascending position. Blocking below only decides what is computed side by
 * side, never the order of one sum.
 *
 * Layout of one sequence's cache, C slots (a multiple of 16), D head dimension, P = D rounded up to 16:
 *   keys   [layer][kv head][C / 16][D][16]   sixteen keys side by side, so that a score needs no
 *                                            horizontal sum; [C / 16][D / 2][16][2] in bfloat16
 *   values [layer][kv head][C][P]
 * Elements are float32, or bfloat16, which are multiplied in pairs: two elements of a head, or the values of two
 * neighbouring positions, the first of which is even. Sums are float32.
 */
#include "attention.h"

#define TILE 6   /* (row, head) pairs computed side by side */
#define UNROLL 4 /* key blocks in flight when there are few pairs */

INLINE vec load(const float *base, int64_t index) {
    vec out;
    memcpy(&out, base + index, sizeof out);
    return out;
}

/* Sixteen values of two positions, side by side. */
INLINE uvec load_pairs(const uint16_t *even, const uint16_t *odd) {
    hvec low, high;
    memcpy(&low, even, sizeof low);
    memcpy(&high, odd, sizeof high);
    return __builtin_convertvector(low, uvec) | __builtin_convertvector(high, uvec) << 16;
}

/* Scores of `pairs` queries against `blocks` blocks of sixteen keys. */
INLINE void score_blocks(const void *keys, int64_t block, int blocks, const void *const *query,
                         float *const *scores, int pairs, int head_dim, int bfloat16) {
    vec sum[UNROLL][TILE];
    for (int b = 0; b < blocks; b++)
        for (int p = 0; p < pairs; p++) sum[b][p] = splat(0);
    if (bfloat16)
        for (int d = 0; d < head_dim / 2; d++) {
            uvec key[UNROLL];
            for (int b = 0; b < blocks; b++)
                memcpy(&key[b],
                       (const uint32_t *)keys + ((block + b) * (head_dim / 2) + d) * LANES,
                       sizeof(uvec));
            for (int p = 0; p < pairs; p++) {
                uint32_t pair;
                memcpy(&pair, (const uint32_t *)query[p] + d, 4);
                for (int b = 0; b < blocks; b++) sum[b][p] = add_pairs(sum[b][p], key[b], pair);
            }
        }
    else
        for (int d = 0; d < head_dim; d++)
            for (int b = 0; b < blocks; b++) {
                vec key = load(keys, ((block + b) * head_dim + d) * LANES);
                for (int p = 0; p < pairs; p++) sum[b][p] = sum[b][p] + key * ((const float *)query[p])[d];
            }
    for (int b = 0; b < blocks; b++)
        for (int p = 0; p < pairs; p++)
            memcpy(scores[p] + (block + b) * LANES, &sum[b][p], sizeof(vec));
}

INLINE void score(const void *keys, int64_t from, int64_t to, const void *const *query,
                  float *const *scores, int pairs, int head_dim, int bfloat16) {
    int64_t block = from;
    if (pairs <= 3 || bfloat16)
        for (; block + UNROLL <= to; block += UNROLL)
            score_blocks(keys, block, UNROLL, query, scores, pairs, head_dim, bfloat16);
    for (; block < to; block++)
        score_blocks(keys, block, 1, query, scores, pairs, head_dim, bfloat16);
}

/* out[p] += sum of weights[p][j] * values[j], for positions from <= j < to, `width` vectors wide. */
INLINE void add_values(const float *values, int64_t stride, int64_t from, int64_t to,
                       const void *const *weights, float *const *out, int pairs, int width) {
    vec sum[TILE][4];
    for (int p = 0; p < pairs; p++)
        for (int w = 0; w < width; w++) sum[p][w] = load(out[p], w * LANES);
    for (int64_t j = from; j < to; j++) {
        vec value[4];
        for (int w = 0; w < width; w++) value[w] = load(values, j * stride + w * LANES);
        for (int p = 0; p < pairs; p++)
            for (int w = 0; w < width; w++)
                sum[p][w] = sum[p][w] + value[w] * ((const float *)weights[p])[j];
    }
    for (int p = 0; p < pairs; p++)
        for (int w = 0; w < width; w++) memcpy(out[p] + w * LANES, &sum[p][w], sizeof(vec));
}

/* The same in bfloat16, for even `from` and `to`. Values of odd positions stand `odd` elements behind. */
INLINE void add_value_pairs(const uint16_t *values, int64_t stride, int64_t odd, int64_t from,
                            int64_t to, const void *const *weights, float *const *out, int pairs,
                            int width) {
    vec sum[TILE][4];
    for (int p = 0; p < pairs; p++)
        for (int w = 0; w < width; w++) sum[p][w] = load(out[p], w * LANES);
    for (int64_t j = from; j < to; j += 2) {
        const uint16_t *even = values + j * stride;
        uvec value[4];
        for (int w = 0; w < width; w++)
            value[w] = load_pairs(even + w * LANES, even + odd + w * LANES);
        for (int p = 0; p < pairs; p++) {
            uint32_t pair;
            memcpy(&pair, (const uint16_t *)weights[p] + j, 4);
            for (int w = 0; w < width; w++) sum[p][w] = add_pairs(sum[p][w], value[w], pair);
        }
    }
    for (int p = 0; p < pairs; p++)
        for (int w = 0; w < width; w++) memcpy(out[p] + w * LANES, &sum[p][w], sizeof(vec));
}

INLINE void score_any(const void *keys, int64_t from, int64_t to, const void *const *query,
                      float *const *scores, int pairs, int head_dim, int bfloat16) {
#define CALL(n) score(keys, from, to, query, scores, n, head_dim, bfloat16)
    UP_TO_SIX(pairs, CALL)
#undef CALL
}

/* Adds the values of positions from <= j < to; in bfloat16 pairs, whose odd ones stand `odd` elements behind. */
INLINE void add_any(const void *values, int64_t stride, int64_t odd, int64_t from, int64_t to,
                    const void *const *weights, float *const *out, int pairs, int head_width,
                    int bfloat16) {
    if (from >= to) return;
    int step = 1;
    for (int done = 0; done < head_width; done += step) {
        float *part[TILE] = {0};
        for (int p = 0; p < pairs; p++) part[p] = out[p] + done * LANES;
        const float *full = (const float *)values + done * LANES;
        const uint16_t *half = (const uint16_t *)values + done * LANES;
        step = done + 4 <= head_width ? 4 : 1;
#define CALL(n)                                                                                    \
    if (bfloat16 && step == 4)                                                                     \
        add_value_pairs(half, stride, odd, from, to, weights, part, n, 4);                         \
    else if (bfloat16)                                                                             \
        add_value_pairs(half, stride, odd, from, to, weights, part, n, 1);                         \
    else if (step == 4)                                                                            \
        add_values(full, stride, from, to, weights, part, n, 4);                                   \
    else                                                                                           \
        add_values(full, stride, from, to, weights, part, n, 1);
        UP_TO_SIX(pairs, CALL)
#undef CALL
    }
}

/* Scores to weights, in place: scale, cap, mask outside low <= j < count, exponentiate; in bfloat16 they end up
 * half as wide. Returns the sum of the weights before that. Lanes belong to absolute positions, so the order of
 * the sum is theirs. */
INLINE float softmax(float *scores, int64_t low, int64_t count, const shape *s, int bfloat16) {
    int64_t first = low / LANES * LANES, end = (count + LANES - 1) / LANES * LANES;
    for (int64_t j = first; j < low; j++) scores[j] = -INFINITY;
    for (int64_t j = count; j < end; j++) scores[j] = -INFINITY;
    vec max = splat(-INFINITY);
    for (int64_t j = first; j < end; j += LANES) {
        vec x = load(scores, j) * s->scale;
        if (s->softcap > 0)
            for (int lane = 0; lane < LANES; lane++)
                x[lane] = x[lane] == -INFINITY ? x[lane] : s->softcap * tanhf(x[lane] / s->softcap);
        memcpy(scores + j, &x, sizeof x);
        max = max_vec(x, max);
    }
    float top = horizontal_max(max);
    vec sum = splat(0);
    for (int64_t j = first; j < end; j += LANES) {
        vec weight = exp_vec(load(scores, j) - top);
        sum = sum + weight;
        if (bfloat16) {
            /* Whatever becomes of NaN here, the sum keeps it. */
            hvec half = to_bfloat16s(weight);
            memcpy((uint16_t *)scores + j, &half, sizeof half);
        } else {
            memcpy(scores + j, &weight, sizeof weight);
        }
    }
    return horizontal_sum(sum);
}

typedef struct {
    float *scores, *out;
    int64_t positions;
} scratch;

/* One tile: `pairs` (row, head) pairs of one sequence and one kv head. */
INLINE void attend_tile(const sequence *seq, const shape *s, int kv_head, int first_pair, int pairs,
                        const void *query, int64_t row_stride, int64_t head_stride, void *out,
                        scratch *work, int bfloat16) {
    int group = s->query_heads / s->kv_heads, head_dim = s->head_dim;
    int head_width = (head_dim + LANES - 1) / LANES, padded = head_width * LANES;
    int64_t plane = (int64_t)s->layer * s->kv_heads + kv_head;
    const char *keys = (const char *)seq->keys;
    const char *values = (const char *)seq->values;
    int64_t size = bfloat16 ? 2 : 4;
    keys += plane * seq->capacity * head_dim * size;
    values += plane * seq->capacity * padded * size;

    const void *q[TILE];
    float *scores[TILE], *sums[TILE];
    const void *weights[TILE];
    int64_t low[TILE] = {0}, count[TILE], same_low = 0, same_high = INT64_MAX, slots = 0;
    float total[TILE];
    for (int p = 0; p < pairs; p++) {
        int row = (first_pair + p) / group, head = kv_head * group + (first_pair + p) % group;
        int64_t at = (seq->first_row + row) * row_stride + head * head_stride;
        q[p] = (const char *)query + at * size;
        scores[p] = work->scores + p * work->positions;
        weights[p] = scores[p];
        sums[p] = work->out + p * padded;
        memset(sums[p], 0, sizeof(float) * padded);
        int32_t tail_from = seq->tail_start[row], tail_to = seq->tail_start[row + 1];
        count[p] = seq->contiguous[row] + tail_to - tail_from;
        low[p] = s->window > 0 && count[p] > s->window ? count[p] - s->window : 0;
        int64_t needed = tail_to > tail_from ? seq->base + seq->tail[tail_to - 1] + 1 : count[p];
        slots = needed > slots ? needed : slots;
        same_low = low[p] > same_low ? low[p] : same_low;
        same_high = seq->contiguous[row] < same_high ? seq->contiguous[row] : same_high;
    }
    int64_t first_block = low[0];
    for (int p = 1; p < pairs; p++) first_block = low[p] < first_block ? low[p] : first_block;
    score_any(keys, first_block / LANES, (slots + LANES - 1) / LANES, q, scores, pairs, head_dim,
              bfloat16);
    for (int p = 0; p < pairs; p++) {
        int row = (first_pair + p) / group;
        int64_t position = seq->contiguous[row];
        for (int32_t j = seq->tail_start[row]; j < seq->tail_start[row + 1]; j++)
            scores[p][position++] = scores[p][seq->base + seq->tail[j]];
        total[p] = softmax(scores[p], low[p], count[p], s, bfloat16);
        if (bfloat16) low[p] &= ~(int64_t)1; /* The position before weighs nothing. */
    }
    if (bfloat16) {
        same_low = (same_low + 1) & ~(int64_t)1;
        same_high &= ~(int64_t)1;
    }
    if (same_high < same_low) same_high = same_low;
    for (int p = 0; p < pairs; p++) {
        int row = (first_pair + p) / group;
        int64_t until = seq->contiguous[row] < same_low ? seq->contiguous[row] : same_low;
        if (bfloat16) until &= ~(int64_t)1;
        add_any(values, padded, padded, low[p], until, &weights[p], &sums[p], 1, head_width,
                bfloat16);
    }
    add_any(values, padded, padded, same_low, same_high, weights, sums, pairs, head_width, bfloat16);
    for (int p = 0; p < pairs; p++) {
        int row = (first_pair + p) / group, head = kv_head * group + (first_pair + p) % group;
        int64_t contiguous = seq->contiguous[row], step = bfloat16 ? 2 : 1;
        int64_t rest = low[p] > same_high ? low[p] : same_high;
        int64_t until = bfloat16 ? contiguous & ~(int64_t)1 : contiguous;
        add_any(values, padded, padded, rest, until, &weights[p], &sums[p], 1, head_width, bfloat16);
        const int32_t *tail = seq->tail + seq->tail_start[row];
        for (int64_t j = until > low[p] ? until : low[p]; j < count[p]; j += step) {
            int64_t slot = j < contiguous ? j : seq->base + tail[j - contiguous], odd = 0;
            /* Behind the last position nothing weighs anything, but it must be a number. */
            if (bfloat16 && j + 1 < count[p])
                odd = (j + 1 < contiguous ? j + 1 : seq->base + tail[j + 1 - contiguous]) - slot;
            const char *shifted = values + (slot - j) * padded * size;
            add_any(shifted, padded, odd * padded, j, j + step, &weights[p], &sums[p], 1,
                    head_width, bfloat16);
        }
        int64_t at = ((int64_t)(seq->first_row + row) * s->query_heads + head) * head_dim;
        for (int d = 0; d < head_dim; d++) {
            float x = sums[p][d] / total[p];
            if (bfloat16) ((uint16_t *)out)[at + d] = to_bfloat16(x);
            else ((float *)out)[at + d] = x;
        }
    }
}

/* Where a slot's first element stands among a head's keys; the next ones follow four bytes times LANES apart. */
INLINE int64_t key_at(int64_t slot, int64_t head_dim, int bfloat16) {
    return slot / LANES * head_dim * LANES + slot % LANES * (bfloat16 ? 2 : 1);
}

/* Puts a step's new keys and values into the cache. Strides count elements. */
static void store(const sequence *seq, const shape *s, const void *keys, const void *values,
                  int64_t key_row, int64_t key_head, int64_t value_row, int64_t value_head) {
    int head_dim = s->head_dim, padded = (head_dim + LANES - 1) / LANES * LANES;
    for (int head = 0; head < s->kv_heads; head++) {
        int64_t plane = (int64_t)s->layer * s->kv_heads + head;
        int64_t key_plane = plane * seq->capacity * head_dim;
        int64_t value_plane = plane * seq->capacity * padded;
        for (int r = 0; r < seq->num_rows; r++) {
            int64_t slot = seq->first_slot + r, row = seq->first_row + r;
            int64_t key_from = row * key_row + head * key_head;
            int64_t value_to = value_plane + slot * padded;
            int64_t value_from = row * value_row + head * value_head;
            if (s->bfloat16) {
                uint16_t *k = (uint16_t *)seq->keys + key_plane + key_at(slot, head_dim, 1);
                const uint16_t *from = (const uint16_t *)keys + key_from;
                for (int d = 0; d < head_dim; d += 2) memcpy(k + d * LANES, from + d, 4);
                memcpy((uint16_t *)seq->values + value_to, (const uint16_t *)values + value_from,
                       2 * head_dim);
            } else {
                float *k = (float *)seq->keys + key_plane + key_at(slot, head_dim, 0);
                const float *from = (const float *)keys + key_from;
                for (int d = 0; d < head_dim; d++) k[d * LANES] = from[d];
                memcpy((float *)seq->values + value_to, (const float *)values + value_from,
                       4 * head_dim);
            }
        }
    }
}

/* Floats that one thread needs for attention_part. */
int64_t attention_room(const sequence *sequences, int32_t num_sequences, int32_t head_dim) {
    int64_t longest = 0;
    for (int i = 0; i < num_sequences; i++) {
        int64_t length = sequences[i].first_slot + sequences[i].num_rows;
        longest = length > longest ? length : longest;
    }
    int64_t padded = (head_dim + LANES - 1) / LANES * LANES;
    return TILE * ((longest + LANES - 1) / LANES * LANES + padded);
}

/* Attention of one layer for all sequences of a step, in two parts. */
void attention_part(team *t, const attention *a) {
    const shape *s = &a->s;
    int group = s->query_heads / s->kv_heads;
    int64_t padded = (s->head_dim + LANES - 1) / LANES * LANES, tasks = 0;
    scratch work = {.scores = a->room + t->number * a->room_each};
    work.positions = a->room_each / TILE - padded;
    work.out = work.scores + TILE * work.positions;
    EACH(t, i, a->num_sequences)
    store(&a->sequences[i], s, a->keys, a->values, a->key_row, a->key_head, a->value_row,
          a->value_head);
    for (int i = 0; i < a->num_sequences; i++)
        tasks += s->kv_heads * ((a->sequences[i].num_rows * group + TILE - 1) / TILE);
    EACH(t, task, tasks) {
        const sequence *seq = a->sequences;
        int64_t index = task, tiles;
        for (;; seq++) {
            tiles = (seq->num_rows * group + TILE - 1) / TILE;
            if (index < tiles * s->kv_heads) break;
            index -= tiles * s->kv_heads;
        }
        int kv_head = (int)(index / tiles), first = (int)(index % tiles) * TILE;
        int pairs = seq->num_rows * group - first;
        if (pairs > TILE) pairs = TILE;
        if (s->bfloat16)
            attend_tile(seq, s, kv_head, first, pairs, a->query, a->query_row, a->query_head,
                        a->out, &work, 1);
        else
            attend_tile(seq, s, kv_head, first, pairs, a->query, a->query_row, a->query_head,
                        a->out, &work, 0);
    }
}

static void whole(team *t, void *arguments) { attention_part(t, arguments); }

/* The same for a layer by itself. Returns 0, or 1 if memory ran out. */
int attend(const sequence *sequences, int32_t num_sequences, const shape *s, const void *query,
           int64_t query_row, int64_t query_head, const void *keys, int64_t key_row,
           int64_t key_head, const void *values, int64_t value_row, int64_t value_head, void *out,
           int32_t threads) {
    attention a = {sequences, num_sequences, *s, query, query_row, query_head, keys, key_row,
                   key_head, values, value_row, value_head, out};
    a.room_each = attention_room(sequences, num_sequences, s->head_dim);
    a.room = malloc(sizeof(float) * threads * a.room_each);
    int failed = a.room == NULL || team_run(threads, 2, whole, &a);
    free(a.room);
    return failed;
}

/* Moves cached slots from[i] to to[i] in every layer and head, in ascending order; to[i] <= from[i]. */
void move_slots(void *keys, void *values, int64_t capacity, int32_t planes, int32_t head_dim,
                int32_t bfloat16, const int32_t *from, const int32_t *to, int32_t count) {
    int64_t padded = (head_dim + LANES - 1) / LANES * LANES, size = bfloat16 ? 2 : 4;
    for (int plane = 0; plane < planes; plane++) {
        char *k = (char *)keys + plane * capacity * head_dim * size;
        char *v = (char *)values + plane * capacity * padded * size;
        for (int i = 0; i < count; i++) {
            int64_t source = key_at(from[i], head_dim, bfloat16);
            int64_t target = key_at(to[i], head_dim, bfloat16);
            /* Four bytes: an element, or a pair of bfloat16. */
            for (int64_t d = 0; d < head_dim * size / 4; d++)
                memcpy(k + target * size + d * LANES * 4, k + source * size + d * LANES * 4, 4);
            memmove(v + to[i] * padded * size, v + from[i] * padded * size, padded * size);
        }
    }
}
