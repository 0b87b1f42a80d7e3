/* A step's work, shared by threads.
 *
 * A step is a row of parts; a part is cut into pieces, which threads claim one after the other. None goes on to the
 * next part before all pieces of this one are done. So a thread that some other process has pushed aside holds up
 * the piece that it is at and nothing else, and one that comes late takes what is left.
 */
#ifndef SLIPSTREAM_TEAM_H
#define SLIPSTREAM_TEAM_H

#include "vector.h"

#include <stdatomic.h>

typedef struct {
    _Alignas(64) _Atomic int64_t claimed;
    _Atomic int64_t done;
} part;

/* One thread's view: `parts` is NULL where it works alone. */
typedef struct {
    part *parts;
    int64_t at, alone;
    int32_t number; /* of the thread, from 0 */
} team;

typedef void (*team_work)(team *t, void *arguments);

/* See team.c. */
int team_run(int32_t threads, int64_t parts, team_work work, void *arguments);
void team_wait(part *p, int64_t count);

/* The next piece of the part, from 0; as many as there are, or more, when none is left. */
INLINE int64_t team_claim(team *t) {
    if (t->parts == NULL) return t->alone++;
    return atomic_fetch_add_explicit(&t->parts[t->at].claimed, 1, memory_order_relaxed);
}

/* Waits until all `count` pieces are done; the next part begins. Returns 0. */
INLINE int team_next(team *t, int64_t count) {
    if (t->parts == NULL) {
        t->alone = 0;
    } else {
        team_wait(t->parts + t->at, count);
        t->at++;
    }
    return 0;
}

INLINE void team_done(team *t) {
    if (t->parts != NULL) atomic_fetch_add_explicit(&t->parts[t->at].done, 1, memory_order_release);
}

/* A part: the body runs once for every piece, on whichever thread claims it. It must not be left early. */
#define EACH(t, piece, count)                                                                      \
    for (int64_t piece; (piece = team_claim(t)) < (count) || team_next(t, count); team_done(t))

/* The same, where the body knows what its thread does next; beyond the count if that is nothing. */
#define EACH_AHEAD(t, piece, next, count)                                                          \
    for (int64_t piece = team_claim(t), next;                                                      \
         piece < (count) ? (next = team_claim(t), 1) : team_next(t, count);                        \
         team_done(t), piece = next)

#endif
