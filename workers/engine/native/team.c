/* Threads that help with steps, and sleep between them: the processor is shared with those who serve. */
#include "team.h"

#include <pthread.h>
#include <sched.h>

#ifdef __x86_64__
#include <immintrin.h>
#define PAUSE() _mm_pause()
#else
#define PAUSE() ((void)0)
#endif

#define SPINS 2000 /* looks at what others are at, before the processor is offered to them */
#define MOST 256

static struct {
    pthread_mutex_t taken; /* by whoever runs a step with helpers */
    pthread_mutex_t lock;  /* for what follows */
    pthread_cond_t wake;
    int32_t helpers, wanted;
    _Atomic int64_t round;
    part *parts;
    team_work work;
    void *arguments;
    _Atomic int32_t inside;
} pool = {.taken = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER};

static void look_again(int *looks) {
    PAUSE();
    if (++*looks >= SPINS) {
        *looks = 0;
        sched_yield();
    }
}

/* Returns when `count` pieces are done. */
void team_wait(part *p, int64_t count) {
    int looks = 0;
    while (atomic_load_explicit(&p->done, memory_order_acquire) < count) look_again(&looks);
}

static void *help(void *argument) {
    int32_t number = (int32_t)(intptr_t)argument;
    int64_t seen = 0;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.round == seen || number > pool.wanted) {
            seen = pool.round;
            pthread_cond_wait(&pool.wake, &pool.lock);
        }
        seen = pool.round;
        team t = {.parts = pool.parts, .number = number};
        team_work work = pool.work;
        void *arguments = pool.arguments;
        pool.inside++;
        pthread_mutex_unlock(&pool.lock);
        work(&t, arguments);
        atomic_fetch_sub_explicit(&pool.inside, 1, memory_order_release);
        /* Layers that are run one by one follow each other closely. */
        for (int i = 0; i < SPINS && pool.round == seen; i++) PAUSE();
        pthread_mutex_lock(&pool.lock);
    }
    return NULL;
}

/* Runs `work`, which has so many parts at most, on up to `threads` threads: fewer while others use them.
 * Returns 0, or 1 if memory ran out. */
int team_run(int32_t threads, int64_t parts, team_work work, void *arguments) {
    team mine = {0};
    if (threads > MOST) threads = MOST;
    if (threads <= 1 || pthread_mutex_trylock(&pool.taken) != 0) {
        work(&mine, arguments);
        return 0;
    }
    mine.parts = aligned_alloc(64, parts * sizeof(part));
    if (mine.parts == NULL) {
        pthread_mutex_unlock(&pool.taken);
        return 1;
    }
    memset(mine.parts, 0, parts * sizeof(part));
    pthread_mutex_lock(&pool.lock);
    while (pool.helpers < threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, (void *)(intptr_t)(pool.helpers + 1)) != 0) break;
        pthread_detach(thread);
        pool.helpers++;
    }
    pool.parts = mine.parts;
    pool.work = work;
    pool.arguments = arguments;
    pool.wanted = threads - 1;
    pool.round++;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    work(&mine, arguments);
    pthread_mutex_lock(&pool.lock);
    pool.wanted = 0; /* Whoever has not begun need not. */
    pthread_mutex_unlock(&pool.lock);
    int looks = 0;
    while (atomic_load_explicit(&pool.inside, memory_order_acquire) > 0) look_again(&looks);
    free(mine.parts);
    pthread_mutex_unlock(&pool.taken);
    return 0;
}
