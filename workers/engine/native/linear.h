#ifndef SLIPSTREAM_LINEAR_H
#define SLIPSTREAM_LINEAR_H

#include "vector.h"

/* See linear.c. */
void linear_bfloat16(const uint16_t *x, int64_t rows, int64_t inputs, const uint16_t *packed,
                     const float *bias, int64_t outputs, uint16_t *out, int32_t threads);

#endif
