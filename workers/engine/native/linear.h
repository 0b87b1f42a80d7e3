#ifndef SLIPSTREAM_LINEAR_H
#define SLIPSTREAM_LINEAR_H

#include "team.h"

/* One layer's work; `bias` may be NULL. */
typedef struct {
    const uint16_t *x;
    int64_t rows, inputs;
    const uint16_t *packed;
    const float *bias;
    int64_t outputs;
    uint16_t *out;
} linear;

/* See linear.c. */
void linear_part(team *t, const linear *l);

#endif
