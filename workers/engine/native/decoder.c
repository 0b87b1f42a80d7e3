/* A step of a decoder of Llama's shape in bfloat16, on CPU: all layers in one call.
 *
 * Values are rounded to bfloat16 exactly where transformers' modules round them, so both say the same but for
 * the order of sums inside linear layers. A row's bits depend on nothing but the row and what it attends to.
 */
#include "attention.h"
#include "bytes.h"
#include "linear.h"

/* Weights of one layer: norms [hidden], linears packed (see linear.c), biases float32 or NULL. */
typedef struct {
    const uint16_t *input_norm, *post_norm, *query_norm, *key_norm;
    const uint16_t *qkv, *out, *gate_up, *down;
    const float *qkv_bias, *out_bias;
    int32_t window;
} layer_weights;

typedef struct {
    int32_t layers, hidden, intermediate, heads, kv_heads, head_dim, vocab;
    float eps, scale;
    const uint16_t *embedding; /* [vocab][hidden] */
    const uint16_t *cosine, *sine; /* [positions][head_dim] */
    const uint16_t *norm, *head; /* the last norm; the head, packed */
    const layer_weights *weights;
} decoder;

/* What one step wants besides logits: states before three layers, or behind the last norm, row by row. */
typedef struct {
    uint16_t *to; /* [rows][width], or NULL */
    int32_t width, entered[3]; /* width hidden: behind the last norm; 3 * hidden: entering these layers */
} taps;

INLINE float rounded(float x) { return widen_bfloat16(to_bfloat16(x)); }

/* x / rms(x) * weight, rounded before and after the product. Sums are over sixteen lanes, then across. */
static void rms_norm(const uint16_t *x, const uint16_t *weight, uint16_t *out, int32_t size,
                     float eps) {
    float lanes[LANES] = {0};
    for (int i = 0; i < size; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            float value = i + lane < size ? widen_bfloat16(x[i + lane]) : 0.0f;
            lanes[lane] += value * value;
        }
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    float inverse = 1.0f / sqrtf(sum / size + eps);
    for (int i = 0; i < size; i++)
        out[i] = to_bfloat16(rounded(widen_bfloat16(x[i]) * inverse) * widen_bfloat16(weight[i]));
}

/* Rotates one head in place: x * cos + rotate_half(x) * sin, rounded after each operation. */
static void rotate(uint16_t *x, const uint16_t *cosine, const uint16_t *sine, int32_t dim) {
    int half = dim / 2;
    for (int i = 0; i < half; i++) {
        float a = widen_bfloat16(x[i]), b = widen_bfloat16(x[i + half]);
        float low = rounded(a * widen_bfloat16(cosine[i])) + rounded(-b * widen_bfloat16(sine[i]));
        float high = rounded(b * widen_bfloat16(cosine[i + half])) +
                     rounded(a * widen_bfloat16(sine[i + half]));
        x[i] = to_bfloat16(low);
        x[i + half] = to_bfloat16(high);
    }
}

static void add(uint16_t *x, const uint16_t *y, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        x[i] = to_bfloat16(widen_bfloat16(x[i]) + widen_bfloat16(y[i]));
}

/* silu(gate) * up: gate and up lie side by side in `both`. */
static void gated(const uint16_t *both, uint16_t *out, int32_t size) {
    for (int i = 0; i < size; i += LANES) {
        vec gate, up, magnitude;
        int n = size - i < LANES ? size - i : LANES;
        for (int lane = 0; lane < LANES; lane++) {
            gate[lane] = lane < n ? widen_bfloat16(both[i + lane]) : 0.0f;
            up[lane] = lane < n ? widen_bfloat16(both[size + i + lane]) : 0.0f;
        }
        /* sigmoid from exp of what is never positive */
        magnitude = max_vec(gate, -gate);
        vec e = exp_vec(-magnitude);
        vec sigmoid = select_vec(gate > 0, 1.0f / (1.0f + e), e / (1.0f + e));
        vec product = gate * sigmoid;
        for (int lane = 0; lane < n; lane++)
            out[i + lane] = to_bfloat16(rounded(product[lane]) * up[lane]);
    }
}

/* Room between a step's parts, for so many rows: `y` is twice as wide as x. */
typedef struct {
    uint16_t *x, *y, *a, *b, *out;
    float *attention;
    int64_t attention_each;
    void *bytes;
} room;

/* A step: what it is given, and its room. `wanted` rows get logits, float32 [num_wanted][vocab]. */
typedef struct {
    const decoder *d;
    const sequence *sequences;
    int32_t num_sequences, rows;
    const int64_t *tokens, *positions, *wanted;
    int32_t num_wanted;
    float *logits;
    room m;
} step;

#define PARTS_OF_LAYER 12
#define PARTS_BESIDE 16

/* Makes the step's room for so many threads; `more` bytes of it are for an EAGLE head's linears. Returns what is
 * to be freed, or NULL without memory. */
static void *make_room(step *s, int32_t threads, int64_t more) {
    const decoder *d = s->d;
    room *m = &s->m;
    int64_t rows = s->rows > s->num_wanted ? s->rows : s->num_wanted;
    int64_t hidden = d->hidden, inner = d->intermediate;
    int64_t width = (d->heads + 2 * d->kv_heads) * (int64_t)d->head_dim;
    int64_t attended = d->heads * (int64_t)d->head_dim;
    int64_t wide = 2 * inner > width ? 2 * inner : width;
    int64_t narrow = attended > inner ? attended : inner;
    int64_t halves = rows * (3 * hidden + wide + narrow) + (more ? 0 : s->num_wanted) * (int64_t)d->vocab;
    m->attention_each = attention_room(s->sequences, s->num_sequences, d->head_dim);
    char *memory = malloc(4 * threads * m->attention_each + more + 2 * halves + 1);
    m->attention = (float *)memory;
    m->bytes = memory + 4 * threads * m->attention_each;
    m->x = (uint16_t *)((char *)m->bytes + more);
    m->y = m->x + rows * hidden;
    m->a = m->y + 2 * rows * hidden;
    m->b = m->a + rows * wide;
    m->out = m->b + rows * narrow;
    return memory;
}

/* One layer over the rows of m.x, whose attention reads m.y, `inputs` wide. */
static void layer_part(team *t, const step *s, int32_t number, int64_t inputs) {
    const decoder *d = s->d;
    const layer_weights *w = &d->weights[number];
    int64_t rows = s->rows, hidden = d->hidden, inner = d->intermediate, dim = d->head_dim;
    int64_t width = (d->heads + 2 * d->kv_heads) * dim, attended = d->heads * dim;
    uint16_t *x = s->m.x, *y = s->m.y, *a = s->m.a, *b = s->m.b;
    linear_part(t, &(linear){y, rows, inputs, w->qkv, w->qkv_bias, width, a});
    EACH(t, r, rows) {
        const uint16_t *cosine = d->cosine + s->positions[r] * dim;
        const uint16_t *sine = d->sine + s->positions[r] * dim;
        for (int64_t h = 0; h < d->heads + d->kv_heads; h++) {
            uint16_t *head = a + r * width + h * dim;
            const uint16_t *norm = h < d->heads ? w->query_norm : w->key_norm;
            if (norm != NULL) rms_norm(head, norm, head, dim, d->eps);
            rotate(head, cosine, sine, dim);
        }
    }
    attention_part(
        t, &(attention){s->sequences, s->num_sequences,
                        {number, d->heads, d->kv_heads, d->head_dim, 1, w->window, d->scale, 0.0f},
                        a, width, dim, a + attended, width, dim,
                        a + attended + d->kv_heads * dim, width, dim, b, s->m.attention,
                        s->m.attention_each});
    linear_part(t, &(linear){b, rows, attended, w->out, w->out_bias, hidden, y});
    EACH(t, r, rows) {
        add(x + r * hidden, y + r * hidden, hidden);
        rms_norm(x + r * hidden, w->post_norm, y + r * hidden, hidden, d->eps);
    }
    linear_part(t, &(linear){y, rows, hidden, w->gate_up, NULL, 2 * inner, a});
    EACH(t, r, rows) gated(a + r * 2 * inner, b + r * inner, inner);
    linear_part(t, &(linear){b, rows, inner, w->down, NULL, hidden, y});
    EACH(t, r, rows) add(x + r * hidden, y + r * hidden, hidden);
}

typedef struct {
    step s;
    const taps *tap;
} decoder_arguments;

static void decoder_work(team *t, void *arguments) {
    const step *s = &((const decoder_arguments *)arguments)->s;
    const taps *tap = ((const decoder_arguments *)arguments)->tap;
    const decoder *d = s->d;
    int64_t rows = s->rows, hidden = d->hidden;
    const room *m = &s->m;
    EACH(t, r, rows) memcpy(m->x + r * hidden, d->embedding + s->tokens[r] * hidden, 2 * hidden);
    int entered = 0;
    for (int32_t l = 0; l < d->layers; l++) {
        int tapped = tap->to != NULL && tap->width == 3 * hidden && entered < 3 &&
                     tap->entered[entered] == l;
        EACH(t, r, rows) {
            if (tapped)
                for (int i = entered; i < 3 && tap->entered[i] == l; i++)
                    memcpy(tap->to + r * tap->width + i * hidden, m->x + r * hidden, 2 * hidden);
            rms_norm(m->x + r * hidden, d->weights[l].input_norm, m->y + r * hidden, hidden, d->eps);
        }
        while (tapped && entered < 3 && tap->entered[entered] == l) entered++;
        layer_part(t, s, l, hidden);
    }
    if (tap->to != NULL && tap->width == hidden)
        EACH(t, r, rows)
    rms_norm(m->x + r * hidden, d->norm, tap->to + r * hidden, hidden, d->eps);
    EACH(t, i, s->num_wanted)
    rms_norm(m->x + s->wanted[i] * hidden, d->norm, m->y + i * hidden, hidden, d->eps);
    linear_part(t, &(linear){m->y, s->num_wanted, hidden, d->head, NULL, d->vocab, m->out});
    EACH(t, i, s->num_wanted)
    for (int64_t o = i * d->vocab; o < (i + 1) * (int64_t)d->vocab; o++)
        s->logits[o] = widen_bfloat16(m->out[o]);
}

/* Runs a step. Rows of all sequences lie one after the other; logits are already rounded to bfloat16.
 * Returns 0, or 1 if memory ran out. */
int decoder_step(const decoder *d, const sequence *sequences, int32_t num_sequences, int32_t rows,
                 const int64_t *tokens, const int64_t *positions, const int64_t *wanted,
                 int32_t num_wanted, const taps *tap, float *logits, int32_t threads) {
    decoder_arguments all = {{d, sequences, num_sequences, rows, tokens, positions, wanted,
                              num_wanted, logits},
                             tap};
    void *memory = make_room(&all.s, threads, 0);
    int failed = memory == NULL ||
                 team_run(threads, d->layers * PARTS_OF_LAYER + PARTS_BESIDE, decoder_work, &all);
    free(memory);
    return failed;
}

/* What an EAGLE head has besides one layer: EAGLE-3 a norm for states and a projection of the target's three,
 * EAGLE-1 a projection of token and state. */
typedef struct {
    const uint16_t *state_norm, *project;
    const float *project_bias;
    const int8_t *head; /* the head in bytes, see bytes.c */
    const float *head_scales;
    const int32_t *head_sums;
} eagle;

typedef struct {
    step s;
    const eagle *e;
    const uint16_t *features;
    uint16_t *states;
} eagle_arguments;

static void eagle_work(team *t, void *arguments) {
    const step *s = &((const eagle_arguments *)arguments)->s;
    const eagle *e = ((const eagle_arguments *)arguments)->e;
    const uint16_t *features = ((const eagle_arguments *)arguments)->features;
    uint16_t *states = ((const eagle_arguments *)arguments)->states;
    const decoder *d = s->d;
    const room *m = &s->m;
    int64_t rows = s->rows, hidden = d->hidden;
    int64_t inputs = e->state_norm == NULL ? hidden : 2 * hidden;
    if (features != NULL)
        linear_part(t, &(linear){features, rows, 3 * hidden, e->project, e->project_bias, hidden,
                                 states});
    EACH(t, r, rows) {
        const uint16_t *token = d->embedding + s->tokens[r] * hidden, *state = states + r * hidden;
        uint16_t *both = m->y + 2 * r * hidden;
        if (e->state_norm == NULL) {
            memcpy(both, token, 2 * hidden);
            memcpy(both + hidden, state, 2 * hidden);
        } else {
            rms_norm(token, d->weights[0].input_norm, both, hidden, d->eps);
            rms_norm(state, e->state_norm, both + hidden, hidden, d->eps);
            memcpy(m->x + r * hidden, state, 2 * hidden);
        }
    }
    if (e->state_norm == NULL) {
        linear_part(t, &(linear){m->y, rows, 2 * hidden, e->project, e->project_bias, hidden, m->x});
        EACH(t, r, rows) memcpy(m->y + r * hidden, m->x + r * hidden, 2 * hidden);
    }
    layer_part(t, s, 0, inputs);
    EACH(t, r, rows) memcpy(states + r * hidden, m->x + r * hidden, 2 * hidden);
    EACH(t, i, s->num_wanted) {
        const uint16_t *from = m->x + s->wanted[i] * hidden;
        if (d->norm != NULL)
            rms_norm(from, d->norm, m->y + i * hidden, hidden, d->eps);
        else
            memcpy(m->y + i * hidden, from, 2 * hidden);
    }
    bytes_part(t, &(bytes_linear){m->y, s->num_wanted, hidden, e->head, e->head_scales,
                                  e->head_sums, d->vocab, s->logits, m->bytes});
}

/* Runs rows of an EAGLE head: `states` before the tokens, in and, those expected at them, out, [rows][hidden].
 * With `features` of the target, [rows][3 * hidden], the states before are theirs. Returns 0, or 1 if memory ran out. */
int eagle_step(const decoder *d, const eagle *e, const sequence *sequences, int32_t num_sequences,
               int32_t rows, const int64_t *tokens, const int64_t *positions,
               const uint16_t *features, uint16_t *states,
               const int64_t *wanted, int32_t num_wanted, float *logits, int32_t threads) {
    eagle_arguments all = {{d, sequences, num_sequences, rows, tokens, positions, wanted,
                            num_wanted, logits},
                           e,
                           features,
                           states};
    void *memory = make_room(&all.s, threads, 4 + num_wanted * (4 + (d->hidden + 3) / 4 * 4));
    int failed =
        memory == NULL || team_run(threads, PARTS_OF_LAYER + PARTS_BESIDE, eagle_work, &all);
    free(memory);
    return failed;
}
