#ifndef SLIPSTREAM_BYTES_H
#define SLIPSTREAM_BYTES_H

#include "team.h"

/* One layer's work. */
typedef struct {
    const uint16_t *x;
    int64_t rows, inputs;
    const int8_t *packed;
    const float *scales;
    const int32_t *sums;
    int64_t outputs;
    float *out;
    void *room;
} bytes_linear;

/* See bytes.c. */
void bytes_part(team *t, const bytes_linear *l);

#endif
