#ifndef SLIPSTREAM_BYTES_H
#define SLIPSTREAM_BYTES_H

#include "vector.h"

/* See bytes.c. */
int linear_bytes(const uint16_t *x, int64_t rows, int64_t inputs, const int8_t *packed,
                 const float *scales, const int32_t *sums, int64_t outputs, float *out,
                 int32_t threads);

#endif
