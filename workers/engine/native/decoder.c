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

/* Room between a layer's parts, for so many rows: `y` is twice as wide as x. */
typedef struct {
    uint16_t *x, *y, *a, *b;
} room;

static uint16_t *allocate(const decoder *d, int64_t rows, room *m) {
    int64_t hidden = d->hidden, inner = d->intermediate;
    int64_t width = (d->heads + 2 * d->kv_heads) * (int64_t)d->head_dim;
    int64_t attended = d->heads * (int64_t)d->head_dim;
    int64_t wide = 2 * inner > width ? 2 * inner : width;
    int64_t narrow = attended > inner ? attended : inner;
    uint16_t *memory = malloc(2 * rows * (3 * hidden + wide + narrow));
    m->x = memory;
    m->y = m->x + rows * hidden;
    m->a = m->y + 2 * rows * hidden;
    m->b = m->a + rows * wide;
    return memory;
}

/* One layer over the rows of m->x, whose attention reads m->y, `inputs` wide. Returns 0, or 1 without memory. */
static int run_layer(const decoder *d, int32_t number, const sequence *sequences,
                     int32_t num_sequences, int32_t rows, int64_t inputs, const int64_t *positions,
                     const room *m, int32_t threads) {
    const layer_weights *w = &d->weights[number];
    int64_t hidden = d->hidden, inner = d->intermediate, dim = d->head_dim;
    int64_t width = (d->heads + 2 * d->kv_heads) * dim, attended = d->heads * dim;
    uint16_t *x = m->x, *y = m->y, *a = m->a, *b = m->b;
    linear_bfloat16(y, rows, inputs, w->qkv, w->qkv_bias, width, a, threads);
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 8)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < d->heads + d->kv_heads; h++) {
            uint16_t *head = a + r * width + h * dim;
            const uint16_t *norm = h < d->heads ? w->query_norm : w->key_norm;
            if (norm != NULL) rms_norm(head, norm, head, dim, d->eps);
            rotate(head, d->cosine + positions[r] * dim, d->sine + positions[r] * dim, dim);
        }
    shape s = {number, d->heads, d->kv_heads, d->head_dim, 1, w->window, d->scale, 0.0f};
    int failed = attend(sequences, num_sequences, &s, a, width, dim, a + attended, width, dim,
                        a + attended + d->kv_heads * dim, width, dim, b, threads);
    linear_bfloat16(b, rows, attended, w->out, w->out_bias, hidden, y, threads);
    add(x, y, rows * hidden);
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 8)
    for (int64_t r = 0; r < rows; r++)
        rms_norm(x + r * hidden, w->post_norm, y + r * hidden, hidden, d->eps);
    linear_bfloat16(y, rows, hidden, w->gate_up, NULL, 2 * inner, a, threads);
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 8)
    for (int64_t r = 0; r < rows; r++) gated(a + r * 2 * inner, b + r * inner, inner);
    linear_bfloat16(b, rows, inner, w->down, NULL, hidden, y, threads);
    add(x, y, rows * hidden);
    return failed;
}

/* Runs a step. Rows of all sequences lie one after the other; `wanted` rows get logits, float32
 * [num_wanted][vocab], already rounded to bfloat16. Returns 0, or 1 if memory ran out. */
int decoder_step(const decoder *d, const sequence *sequences, int32_t num_sequences, int32_t rows,
                 const int64_t *tokens, const int64_t *positions, const int64_t *wanted,
                 int32_t num_wanted, const taps *tap, float *logits, int32_t threads) {
    int64_t hidden = d->hidden;
    room m;
    uint16_t *memory = allocate(d, rows > num_wanted ? rows : num_wanted, &m);
    uint16_t *out = malloc(2 * (num_wanted ? num_wanted : 1) * (int64_t)d->vocab);
    if (memory == NULL || out == NULL) {
        free(memory);
        free(out);
        return 1;
    }
    for (int64_t r = 0; r < rows; r++)
        memcpy(m.x + r * hidden, d->embedding + tokens[r] * hidden, 2 * hidden);
    int failed = 0, entered = 0;
    for (int32_t l = 0; l < d->layers && !failed; l++) {
        while (tap->to != NULL && tap->width == 3 * hidden && entered < 3 &&
               tap->entered[entered] == l) {
            for (int64_t r = 0; r < rows; r++)
                memcpy(tap->to + r * tap->width + entered * hidden, m.x + r * hidden, 2 * hidden);
            entered++;
        }
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 8)
        for (int64_t r = 0; r < rows; r++)
            rms_norm(m.x + r * hidden, d->weights[l].input_norm, m.y + r * hidden, hidden, d->eps);
        failed = run_layer(d, l, sequences, num_sequences, rows, hidden, positions, &m, threads);
    }
    if (tap->to != NULL && tap->width == hidden) {
        for (int64_t r = 0; r < rows; r++)
            rms_norm(m.x + r * hidden, d->norm, tap->to + r * hidden, hidden, d->eps);
    }
    for (int64_t i = 0; i < num_wanted; i++)
        rms_norm(m.x + wanted[i] * hidden, d->norm, m.y + i * hidden, hidden, d->eps);
    linear_bfloat16(m.y, num_wanted, hidden, d->head, NULL, d->vocab, out, threads);
    int64_t count = num_wanted * (int64_t)d->vocab;
    for (int64_t i = 0; i < count; i++) logits[i] = widen_bfloat16(out[i]);
    free(memory);
    free(out);
    return failed;
}

/* What an EAGLE head has besides one layer: EAGLE-3 a norm for states, EAGLE-1 a projection of token and state. */
typedef struct {
    const uint16_t *state_norm, *project;
    const float *project_bias;
    const int8_t *head; /* the head in bytes, see bytes.c */
    const float *head_scales;
    const int32_t *head_sums;
} eagle;

/* Runs rows of an EAGLE head: `states` before the tokens, in and, those expected at them, out, [rows][hidden].
 * `wanted` rows get logits, float32 [num_wanted][vocab]. Returns 0, or 1 if memory ran out. */
int eagle_step(const decoder *d, const eagle *e, const sequence *sequences, int32_t num_sequences,
               int32_t rows, const int64_t *tokens, const int64_t *positions, uint16_t *states,
               const int64_t *wanted, int32_t num_wanted, float *logits, int32_t threads) {
    int64_t hidden = d->hidden;
    room m;
    uint16_t *memory = allocate(d, rows > num_wanted ? rows : num_wanted, &m);
    if (memory == NULL) return 1;
    int64_t inputs = e->state_norm == NULL ? hidden : 2 * hidden;
    for (int64_t r = 0; r < rows; r++) {
        const uint16_t *token = d->embedding + tokens[r] * hidden, *state = states + r * hidden;
        uint16_t *both = m.y + 2 * r * hidden;
        if (e->state_norm == NULL) {
            memcpy(both, token, 2 * hidden);
            memcpy(both + hidden, state, 2 * hidden);
        } else {
            rms_norm(token, d->weights[0].input_norm, both, hidden, d->eps);
            rms_norm(state, e->state_norm, both + hidden, hidden, d->eps);
            memcpy(m.x + r * hidden, state, 2 * hidden);
        }
    }
    if (e->state_norm == NULL) {
        linear_bfloat16(m.y, rows, 2 * hidden, e->project, e->project_bias, hidden, m.x, threads);
        memcpy(m.y, m.x, 2 * rows * hidden);
    }
    int failed = run_layer(d, 0, sequences, num_sequences, rows, inputs, positions, &m, threads);
    memcpy(states, m.x, 2 * rows * hidden);
    for (int64_t i = 0; i < num_wanted; i++) {
        const uint16_t *from = m.x + wanted[i] * hidden;
        if (d->norm != NULL)
            rms_norm(from, d->norm, m.y + i * hidden, hidden, d->eps);
        else
            memcpy(m.y + i * hidden, from, 2 * hidden);
    }
    if (!failed)
        failed = linear_bytes(m.y, num_wanted, hidden, e->head, e->head_scales, e->head_sums,
                              d->vocab, logits, threads);
    free(memory);
    return failed;
}
