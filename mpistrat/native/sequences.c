/* Shared-memory collectives of the ranks of one node. comm/shared_memory.py creates the memory.

   A sequence is a series of steps that all ranks take. Each rank has a line in it: a counter of the
   steps at which it has arrived, which only this rank writes, and two halves for data, used in
   turn. A rank that has arrived at step k has left step k - 1, so a half is free again as soon as
   every rank has arrived at the step after the one that used it. The counter is written with
   release and read with acquire order: a rank that sees a step of another rank sees everything that
   the other rank wrote before.

   Each rank also has an arena in this memory, for results. If the results of a message are there on
   all ranks, each rank writes its slice of them to all arenas, and no rank has to copy them out.

   A waiting rank polls, which is fastest if each rank has a core. If ranks share cores, or the
   program computes on another thread in the meantime, polling takes the core from the ranks that it
   waits for. So after a time the rank sleeps, until a rank arrives.

   No function keeps state outside of its sequence. A function that can wait without end (reduce)
   may be called only when every rank has agreed to call it. Its wait ends if a rank has left: then
   the results must not be read. */

#include "sequences.h"
#include "pause.h"

#include <sched.h>
#include <string.h>
#include <time.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { GOAL = 64, LINE_HEAD = 128, ROUND_HEAD = 64, GRAIN = 64, CHUNK = 8192, VALUES = 4 };
enum { IS_ASLEEP = 8, EXPECTED = 16, HAS_LEFT = 24, NUM_WAKES = 72 };
enum { NAP_NS = 1000000, TURNS_OF_NAP = 256 };
enum { MOST_ENTRIES = 32 }; /* enough for the counter of up to 2**31 ranks */
enum { FAR_BYTES = 1 << 12, MOST_SLOW = 3, NUM_PAST = 256 }; /* see copy_to_others */
enum { SLOW_NS = 250 }; /* for each KiB: 4 GB/s, between the 2.4 of far cores and 10 from memory */
enum { PAST_BYTES = 1 << 22 }; /* more results than this do not stay in a core's caches */

/* ---- waiting ---- */

/* Whether this rank sleeps. Stored next to its counter, so that one read loads both. */
static uint32_t *is_asleep(const struct sequence *seq, int64_t rank)
{
    return (uint32_t *)(seq->line[rank] + IS_ASLEEP);
}

/* How often this rank was woken; the rank sleeps on this word. */
static uint32_t *num_wakes(const struct sequence *seq, int64_t rank)
{
    return (uint32_t *)(seq->line[rank] + NUM_WAKES);
}

static void wake(const struct sequence *seq, int64_t rank)
{
    if (!__atomic_exchange_n(is_asleep(seq, rank), 0, __ATOMIC_SEQ_CST))
        return;
    __atomic_add_fetch(num_wakes(seq, rank), 1, __ATOMIC_SEQ_CST);
#ifdef __linux__
    syscall(SYS_futex, num_wakes(seq, rank), FUTEX_WAKE, 1, NULL, NULL, 0);
#endif
}

/* Let other ranks see data copied past the caches before anything that is written from now on. */
static void end_copies_past(void)
{
#ifdef __SSE2__
    _mm_sfence();
#endif
}

/* Ordered with the checks of ranks that fall asleep: either they see the step, or are seen. */
static void arrive(struct sequence *seq)
{
    end_copies_past();
    seq->step++;
    __atomic_store_n((int64_t *)seq->line[seq->own], seq->step, __ATOMIC_SEQ_CST);
    for (int64_t q = 0; q < seq->size; q++)
        if (q != seq->own && __atomic_load_n(is_asleep(seq, q), __ATOMIC_SEQ_CST))
            wake(seq, q);
}

static int all_have_arrived(const struct sequence *seq)
{
    for (int64_t q = 0; q < seq->size; q++)
        if (__atomic_load_n((int64_t *)seq->line[q], __ATOMIC_SEQ_CST) < seq->step)
            return 0;
    return 1;
}

/* Sleep until some rank arrives, at most NAP_NS. */
static void take_nap(const struct sequence *seq)
{
    const struct timespec limit = {0, NAP_NS};
    uint32_t before = __atomic_load_n(num_wakes(seq, seq->own), __ATOMIC_SEQ_CST);
    __atomic_store_n(is_asleep(seq, seq->own), 1, __ATOMIC_SEQ_CST);
    if (!all_have_arrived(seq)) {
#ifdef __linux__
        syscall(SYS_futex, num_wakes(seq, seq->own), FUTEX_WAIT, before, &limit, NULL, 0);
#else
        const struct timespec moment = {0, NAP_NS / 16};
        nanosleep(before == 0 ? &limit : &moment, NULL);
#endif
    }
    __atomic_store_n(is_asleep(seq, seq->own), 0, __ATOMIC_SEQ_CST);
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* A wait: how often it has polled, and since when. */
struct wait {
    int64_t turns, began_ns;
};

/* Wait a moment. Ranks that share a core then yield it to each other. A rank that has its own core
   does not yield: another program on that core would keep it for milliseconds. It sleeps instead,
   and gets the core back as soon as it is woken. */
static void relax(const struct sequence *seq, struct wait *wait)
{
    if (wait->turns++ % 32 != 31) {
        mpistrat_pause();
        return;
    }
    int64_t now = now_ns();
    if (wait->began_ns == 0)
        wait->began_ns = now;
    if (now - wait->began_ns < seq->patience_ns) {
        if (!seq->keeps_core)
            sched_yield();
        return;
    }
    take_nap(seq);
    wait->turns += TURNS_OF_NAP;
}

/* Whether a rank has left, because another one is dead: the other ranks then leave too. */
static int one_has_left(const struct sequence *seq)
{
    for (int64_t q = 0; q < seq->size; q++)
        if (__atomic_load_n((int64_t *)(seq->line[q] + HAS_LEFT), __ATOMIC_RELAXED))
            return 1;
    return 0;
}

/* Return whether all ranks have arrived; if not, this rank has left. */
static int wait_for_all(const struct sequence *seq)
{
    struct wait wait = {0, 0};
    while (!all_have_arrived(seq)) {
        if (wait.turns % TURNS_OF_NAP == TURNS_OF_NAP - 1 && one_has_left(seq)) {
            __atomic_store_n((int64_t *)(seq->line[seq->own] + HAS_LEFT), 1, __ATOMIC_RELAXED);
            return 0;
        }
        relax(seq, &wait);
    }
    return 1;
}

static char *half_of(const struct sequence *seq, int64_t rank, int64_t use)
{
    return seq->line[rank] + LINE_HEAD + (use & 1) * seq->half;
}

/* ---- rounds: the largest of a few values ---- */

/* Contribute `values` to the next round. */
void mpistrat_round_start(struct sequence *seq, const uint64_t *values)
{
    memcpy(half_of(seq, seq->own, seq->step + 1), values, VALUES * sizeof *values);
    arrive(seq);
}

/* Poll up to `turns` times whether all ranks have arrived; then write the largest of each value. */
int mpistrat_round_done(const struct sequence *seq, uint64_t *largest, int64_t turns)
{
    struct wait wait = {0, 0};
    while (!all_have_arrived(seq)) {
        if (wait.turns + 1 >= turns)
            return 0;
        relax(seq, &wait);
    }
    for (int64_t q = 0; q < seq->size; q++) {
        const uint64_t *values = (const uint64_t *)half_of(seq, q, seq->step);
        for (int i = 0; i < VALUES; i++)
            if (q == 0 || values[i] > largest[i])
                largest[i] = values[i];
    }
    return 1;
}

/* Sleep until some rank arrives, at most NAP_NS; then do the same with one poll. */
int mpistrat_round_rest(const struct sequence *seq, uint64_t *largest)
{
    if (!all_have_arrived(seq))
        take_nap(seq);
    return mpistrat_round_done(seq, largest, 1);
}

/* Tell the other ranks that this one reaches collective `number` now, and poll for `limit_ns`
   whether each of them has told the same, or has arrived. */
int mpistrat_round_expect(const struct sequence *seq, int64_t number, int64_t limit_ns)
{
    int64_t began_ns = now_ns();
    __atomic_store_n((int64_t *)(seq->line[seq->own] + EXPECTED), number, __ATOMIC_RELEASE);
    for (;;) {
        int missing = 0;
        for (int64_t q = 0; q < seq->size; q++)
            missing |= __atomic_load_n((int64_t *)(seq->line[q] + EXPECTED), __ATOMIC_RELAXED) < number
                       && __atomic_load_n((int64_t *)seq->line[q], __ATOMIC_RELAXED) <= seq->step;
        if (!missing)
            return 1;
        if (now_ns() - began_ns > limit_ns)
            return 0;
        mpistrat_pause();
    }
}

/* ---- arithmetic ---- */

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define EACH_MACHINE __attribute__((target_clones("avx2", "default")))
#else
#define EACH_MACHINE
#endif

/* For a loop: no iteration reads what a different one writes. */
#if defined(__clang__)
#define EACH_APART _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define EACH_APART _Pragma("GCC ivdep")
#else
#define EACH_APART
#endif

/* `result` may be one of the operands, but must not overlap them in any other way. */
typedef void combine_function(char *result, const char *left, const char *right, int64_t num_bytes);

#define COMBINE(NAME, TYPE, VALUE)                                                          \
    EACH_MACHINE static void NAME(char *result, const char *left, const char *right,        \
                                  int64_t num_bytes)                                        \
    {                                                                                       \
        TYPE *out = (TYPE *)result;                                                         \
        const TYPE *a = (const TYPE *)left, *b = (const TYPE *)right;                       \
        EACH_APART                                                                          \
        for (int64_t i = 0; i < num_bytes / (int64_t)sizeof(TYPE); i++)                     \
            out[i] = (TYPE)(VALUE);                                                         \
    }

#define SUM_AND_PROD(NAME, TYPE)                    \
    COMBINE(sum_##NAME, TYPE, a[i] + b[i])          \
    COMBINE(prod_##NAME, TYPE, a[i] * b[i])
#define MIN_AND_MAX(NAME, TYPE)                     \
    COMBINE(min_##NAME, TYPE, b[i] < a[i] ? b[i] : a[i]) \
    COMBINE(max_##NAME, TYPE, b[i] > a[i] ? b[i] : a[i])

/* Signed overflow is undefined in C. Unsigned arithmetic wraps, with the same bits. */
SUM_AND_PROD(f4, float)
SUM_AND_PROD(f8, double)
SUM_AND_PROD(u1, uint8_t)
SUM_AND_PROD(u4, uint32_t)
SUM_AND_PROD(u8, uint64_t)
COMBINE(sum_u2, uint16_t, a[i] + b[i])
COMBINE(prod_u2, uint16_t, (uint32_t)a[i] * b[i])
MIN_AND_MAX(i1, int8_t)
MIN_AND_MAX(i2, int16_t)
MIN_AND_MAX(i4, int32_t)
MIN_AND_MAX(i8, int64_t)
MIN_AND_MAX(u1, uint8_t)
MIN_AND_MAX(u2, uint16_t)
MIN_AND_MAX(u4, uint32_t)
MIN_AND_MAX(u8, uint64_t)

/* By number: comm/shared_reducer.py numbers them in the same order. */
static combine_function *const combine_functions[] = {
    sum_f4, sum_f8, sum_u1, sum_u2, sum_u4, sum_u8,
    prod_f4, prod_f8, prod_u1, prod_u2, prod_u4, prod_u8,
    min_i1, min_i2, min_i4, min_i8, min_u1, min_u2, min_u4, min_u8,
    max_i1, max_i2, max_i4, max_i8, max_u1, max_u2, max_u4, max_u8,
};

/* Which NaN a sum returns depends on the order of the operands in its registers, so the very last
   sum replaces any NaN by NumPy's. */
#define LAST(NAME, TYPE, MASK, VALUE)                                                       \
    EACH_MACHINE static void NAME(char *result, const char *left, const char *right,        \
                                  int64_t num_bytes)                                        \
    {                                                                                       \
        TYPE *out = (TYPE *)result;                                                         \
        const TYPE *a = (const TYPE *)left, *b = (const TYPE *)right;                       \
        int64_t count = num_bytes / (int64_t)sizeof(TYPE);                                  \
        MASK is_any_nan = 0;                                                                \
        EACH_APART                                                                          \
        for (int64_t i = 0; i < count; i++) {                                               \
            TYPE value = VALUE;                                                             \
            is_any_nan |= -(MASK)(value != value);                                          \
            out[i] = value;                                                                 \
        }                                                                                   \
        for (int64_t i = 0; is_any_nan && i < count; i++)                                   \
            if (out[i] != out[i])                                                           \
                out[i] = (TYPE)__builtin_nanf("");                                          \
    }
LAST(last_sum_f4, float, int32_t, a[i] + b[i])
LAST(last_sum_f8, double, int64_t, a[i] + b[i])
LAST(last_prod_f4, float, int32_t, a[i] * b[i])
LAST(last_prod_f8, double, int64_t, a[i] * b[i])

static combine_function *last_function(int64_t function)
{
    enum { SUM_F4 = 0, SUM_F8 = 1, PROD_F4 = 6, PROD_F8 = 7 };
    switch (function) {
    case SUM_F4: return last_sum_f4;
    case SUM_F8: return last_sum_f8;
    case PROD_F4: return last_prod_f4;
    case PROD_F8: return last_prod_f8;
    default: return combine_functions[function];
    }
}

EACH_MACHINE static void divide_f4(float *a, int64_t count, float divisor)
{
    for (int64_t i = 0; i < count; i++)
        a[i] /= divisor;
}

EACH_MACHINE static void divide_f8(double *a, int64_t count, double divisor)
{
    for (int64_t i = 0; i < count; i++)
        a[i] /= divisor;
}

static void divide(char *total, int64_t num_bytes, int64_t itemsize, int64_t divisor)
{
    if (itemsize == 4)
        divide_f4((float *)total, num_bytes / 4, (float)divisor);
    else
        divide_f8((double *)total, num_bytes / 8, (double)divisor);
}

/* ---- reductions ---- */

/* A position in the pieces of a message; and whether data written there bypasses the caches. */
struct place {
    const struct piece *piece;
    int64_t offset;
    int goes_past;
};

/* Copy without reading the old content into the caches first. */
static void copy_past(char *to, const char *from, int64_t num_bytes)
{
#ifdef __SSE2__
    int64_t head = -(intptr_t)to & 15;
    if (num_bytes >= GRAIN) {
        memcpy(to, from, head);
        to += head, from += head, num_bytes -= head;
        for (; num_bytes >= GRAIN; to += GRAIN, from += GRAIN, num_bytes -= GRAIN)
            for (int i = 0; i < GRAIN / 16; i++)
                _mm_stream_si128((__m128i *)to + i, _mm_loadu_si128((const __m128i *)from + i));
    }
#endif
    memcpy(to, from, num_bytes);
}

/* Copy to memory of this rank that the other ranks have read, and will read.

   If they run on cores that share no cache with this one, a usual copy has to ask their caches for
   each line, and a copy past the caches is up to twenty times as fast. If they do share one, the
   usual copy is up to twice as fast, because the others then find the data in it. So usual copies
   are timed, and after some slow ones most copies go past the caches. */
static void copy_to_others(struct sequence *seq, char *to, const char *from, int64_t num_bytes)
{
    if (num_bytes < FAR_BYTES) {
        memcpy(to, from, num_bytes);
    } else if (seq->num_past > 0) {
        seq->num_past--;
        copy_past(to, from, num_bytes);
    } else {
        int64_t began_ns = now_ns();
        memcpy(to, from, num_bytes);
        int is_slow = now_ns() - began_ns > num_bytes / 1024 * SLOW_NS;
        seq->num_slow = is_slow ? seq->num_slow + 1 : 0;
        /* One may be slow for other reasons, such as the first use of memory. */
        if (seq->num_slow >= MOST_SLOW)
            seq->num_past = NUM_PAST;
    }
}

/* Copy the next bytes of the sources: for other ranks if there is a sequence. */
static void copy_in(struct place *from, struct sequence *seq, char *to, int64_t num_bytes)
{
    while (num_bytes > 0) {
        int64_t left = from->piece->num_bytes - from->offset;
        int64_t part = left < num_bytes ? left : num_bytes;
        if (seq == NULL)
            memcpy(to, from->piece->source + from->offset, part);
        else
            copy_to_others(seq, to, from->piece->source + from->offset, part);
        to += part, num_bytes -= part, from->offset += part;
        if (part == left)
            from->piece++, from->offset = 0;
    }
}

/* A target that is also the source of its piece is in the caches already. */
static int writes_past(const struct place *to)
{
    return to->goes_past && to->piece->source != to->piece->target;
}

static void copy_out(struct place *to, const char *from, int64_t num_bytes)
{
    while (num_bytes > 0) {
        int64_t left = to->piece->num_bytes - to->offset;
        int64_t part = left < num_bytes ? left : num_bytes;
        char *target = to->piece->target + to->offset;
        if (writes_past(to))
            copy_past(target, from, part);
        else
            memcpy(target, from, part);
        from += part, num_bytes -= part, to->offset += part;
        if (part == left)
            to->piece++, to->offset = 0;
    }
}

static void skip(struct place *place, int64_t num_bytes)
{
    while (num_bytes > 0) {
        int64_t left = place->piece->num_bytes - place->offset;
        int64_t part = left < num_bytes ? left : num_bytes;
        num_bytes -= part, place->offset += part;
        if (part == left)
            place->piece++, place->offset = 0;
    }
}

/* The next bytes of the sources: in their own memory, or copied to `room` if they span several. */
static const char *next_of(struct place *from, char *room, int64_t num_bytes)
{
    if (from->piece->num_bytes - from->offset > num_bytes) {
        from->offset += num_bytes;
        return from->piece->source + from->offset - num_bytes;
    }
    copy_in(from, NULL, room, num_bytes);
    return room;
}

/* The start of slice `number` of `owners` in a block, at a multiple of GRAIN. The ranks below
   `owners` have one slice each; the other ranks have none, and begin at the end. A grain is a cache
   line, so that no two ranks write to the same line. */
static int64_t slice_start(int64_t num_bytes, int64_t owners, int64_t number)
{
    int64_t grains = (num_bytes + GRAIN - 1) / GRAIN;
    int64_t start = number < owners ? grains * number / owners * GRAIN : num_bytes;
    return start < num_bytes ? start : num_bytes;
}

/* Where to write the next bytes of the targets: directly there, or to `room`, from which `copy_out`
   takes them. */
static char *room_at(const struct place *to, char *room, int64_t num_bytes)
{
    int fits = to->piece->num_bytes - to->offset >= num_bytes;
    return fits && !writes_past(to) ? to->piece->target + to->offset : room;
}

/* The partial sum of one chunk over the rows: a binary counter. Each entry is the sum of 2**k
   neighbours; the last one has the smallest k. comm/ops.py has the same tree. */
struct counter {
    combine_function *combine, *last;
    const char *entry[MOST_ENTRIES];
    int num_entries;
    char *sums; /* memory for the sum of each entry, at a distance of `stride` */
    int64_t stride;
};

/* Add a row, and combine it with the last `num_combined` entries. The last row is combined with all
   entries, and the sum is written to `result`. A row of this rank may be there, so nothing is
   written there before. */
static void count_in(struct counter *counter, const char *row, int64_t num_combined, int is_last,
                     char *result, int64_t num_bytes)
{
    if (is_last)
        num_combined = counter->num_entries;
    for (; num_combined > 0; num_combined--) {
        int i = --counter->num_entries;
        if (is_last && i == 0) {
            counter->last(result, counter->entry[i], row, num_bytes);
            return;
        }
        counter->combine(counter->sums + i * counter->stride, counter->entry[i], row, num_bytes);
        row = counter->sums + i * counter->stride;
    }
    counter->entry[counter->num_entries++] = row;
}

/* How many rows a rank contributes. */
static int64_t rows_of(const struct order *order, int64_t rank)
{
    return order == NULL ? 1 : order->numbers[rank];
}

/* The number of entries with which a row is combined, if it is not the last row. */
static int64_t num_combined(const struct sequence *seq, const struct order *order, int64_t row)
{
    if (order != NULL)
        return order->numbers[seq->size + row];
    int64_t count = 0;
    for (; row & 1; row >>= 1)
        count++;
    return count;
}

/* How many partial sums are kept at the same time. */
static int64_t most_sums(const struct sequence *seq, const struct order *order)
{
    if (order != NULL)
        return order->most_sums;
    int64_t count = 0;
    while ((int64_t)1 << count < seq->size)
        count++;
    return count;
}

/* The rows of all ranks: those of this rank at `in`, which moves behind them, those of other ranks
   in their halves, at a distance of `stride`. */
struct rows {
    int64_t use, stride;
    struct place *in;
};

/* Reduce bytes [start, stop) of a block, in a fixed tree. The results are written to `out`, and to
   this rank's half if `shares`. */
static void reduce_range(const struct sequence *seq, const struct arithmetic *how,
                         const struct rows *rows, int64_t start, int64_t stop, struct place out,
                         int shares)
{
    char total[CHUNK] __attribute__((aligned(64)));
    int64_t most = stop - start < CHUNK ? stop - start : CHUNK;
    int64_t num_own = rows_of(how->order, seq->own), num_sums = most_sums(seq, how->order);
    int64_t num_rows = 0;
    for (int64_t q = 0; q < seq->size; q++)
        num_rows += rows_of(how->order, q);
    struct counter counter = {
        .combine = combine_functions[how->function],
        .last = last_function(how->function),
        .stride = (most + GRAIN - 1) / GRAIN * GRAIN,
    };
    char memory[(num_sums + num_own) * counter.stride + GRAIN];
    counter.sums = memory + (-(intptr_t)memory & (GRAIN - 1));
    char *room = counter.sums + num_sums * counter.stride;
    for (int64_t at = start; at < stop; at += CHUNK) {
        int64_t num_bytes = stop - at < CHUNK ? stop - at : CHUNK, row = 0;
        char *result = room_at(&out, total, num_bytes);
        counter.num_entries = 0;
        for (int64_t q = 0; q < seq->size; q++) {
            for (int64_t i = 0; i < rows_of(how->order, q); i++, row++) {
                const char *part =
                    q == seq->own ? next_of(&rows->in[i], room + i * counter.stride, num_bytes)
                                  : half_of(seq, q, rows->use) + i * rows->stride + at;
                count_in(&counter, part, num_combined(seq, how->order, row), row == num_rows - 1,
                         result, num_bytes);
            }
        }
        if (how->divisor != 1)
            divide(result, num_bytes, how->itemsize, how->divisor);
        if (shares && seq->num_past > 0)
            copy_past(half_of(seq, seq->own, rows->use) + at, result, num_bytes);
        else if (shares)
            memcpy(half_of(seq, seq->own, rows->use) + at, result, num_bytes);
        if (result == total)
            copy_out(&out, total, num_bytes);
        else
            out.offset += num_bytes;
    }
}

/* A few numbers can be sent with the values of a round. Contribute them to the next round, as the
   row `offset` bytes behind the first. */
void mpistrat_round_contribute(struct sequence *seq, const char *source, int64_t num_bytes,
                               int64_t offset)
{
    memcpy(half_of(seq, seq->own, seq->step + 1) + ROUND_HEAD + offset, source, num_bytes);
}

/* Reduce the contributions of all ranks to the completed round: rows at a distance of `stride`. */
void mpistrat_round_result(struct sequence *seq, struct arithmetic how, int64_t stride,
                           char *target, int64_t num_bytes)
{
    char *own = half_of(seq, seq->own, seq->step) + ROUND_HEAD;
    int64_t num_own = rows_of(how.order, seq->own);
    struct piece pieces[num_own];
    struct place in[num_own];
    for (int64_t i = 0; i < num_own; i++) {
        pieces[i] = (struct piece){own + i * stride, target, num_bytes};
        in[i] = (struct place){&pieces[i], 0, 0};
    }
    const struct rows rows = {seq->step, stride, in};
    reduce_range(seq, &how, &rows, ROUND_HEAD, ROUND_HEAD + num_bytes,
                 (struct place){pieces, 0, 0}, 0);
}

/* The same for a few numbers that MPI has received: one row per rank, at a distance of `stride`,
   which a row does not exceed. `target` is different memory. */
void mpistrat_combine_rows(struct arithmetic how, const char *rows, int64_t stride,
                           int64_t num_rows, char *target, int64_t num_bytes)
{
    char sums[num_rows * stride] __attribute__((aligned(64)));
    struct counter counter = {
        .combine = combine_functions[how.function],
        .last = last_function(how.function),
        .sums = sums,
        .stride = stride,
    };
    for (int64_t row = 0; row < num_rows; row++)
        count_in(&counter, rows + row * stride, num_combined(NULL, NULL, row), row == num_rows - 1,
                 target, num_bytes);
    if (how.divisor != 1)
        divide(target, num_bytes, how.itemsize, how.divisor);
}

/* ---- reductions: results in arenas ---- */

static int64_t *goal_of(const struct sequence *seq, int64_t rank)
{
    return (int64_t *)(seq->line[rank] + GOAL);
}

/* Publish, with the next step, where in its arena this rank wants the results: -1 if there are
   several targets, or if they are elsewhere. */
static void publish_goal(struct sequence *seq, const struct message *message)
{
    int64_t goal = -1;
    if (message->num_pieces == 1 && seq->arena_bytes > 0) {
        int64_t offset = message->pieces->target - (seq->line[seq->own] + seq->arena);
        if (offset >= 0 && offset + message->total <= seq->arena_bytes)
            goal = offset;
    }
    *goal_of(seq, seq->own) = goal;
}

/* Whether all ranks have their targets in arenas. Valid between the two steps of a first block. */
static int all_have_goals(const struct sequence *seq)
{
    for (int64_t q = 0; q < seq->size; q++)
        if (*goal_of(seq, q) < 0)
            return 0;
    return 1;
}

/* Reduce bytes [start, stop) of a block, `done` bytes into the message, for all ranks. */
static void reduce_range_for_all(const struct sequence *seq, const struct arithmetic *how,
                                 const struct rows *rows, int64_t done, int64_t start,
                                 int64_t stop, int goes_past)
{
    for (int64_t at = start; at < stop; at += CHUNK) {
        int64_t num_bytes = stop - at < CHUNK ? stop - at : CHUNK;
        char total[CHUNK];
        const struct piece piece = {0, total, num_bytes};
        reduce_range(seq, how, rows, at, at + num_bytes, (struct place){&piece, 0, 0}, 0);
        for (int64_t q = 0; q < seq->size; q++) {
            char *target = seq->line[q] + seq->arena + *goal_of(seq, q) + done + at;
            if (goes_past)
                copy_past(target, total, num_bytes);
            else
                memcpy(target, total, num_bytes);
        }
    }
}

/* ---- reductions: blocks ---- */

/* Copy to `room` the parts of a block of one row that other ranks need. `in` moves behind the
   block. Returns where the slice of this rank begins. */
static struct place contribute_row(struct sequence *seq, struct place *in, char *room,
                                   int64_t num_bytes, int64_t small, int contributed)
{
    int64_t size = num_bytes > small ? seq->size : 1; /* every rank needs all of a small block */
    int64_t number = num_bytes > small ? seq->own : 1;
    int64_t start = slice_start(num_bytes, size, number);
    int64_t stop = slice_start(num_bytes, size, number + 1);
    struct place slice = *in;
    if (contributed) {
        if (num_bytes > small)
            skip(&slice, start);
        skip(in, num_bytes);
        return slice;
    }
    copy_in(in, seq, room, start);
    if (num_bytes > small)
        slice = *in;
    skip(in, stop - start);
    copy_in(in, seq, room + stop, num_bytes - stop);
    return slice;
}

/* Do this for each of the rows, and arrive. */
static void contribute_block(struct sequence *seq, const struct message *message, struct place *in,
                             struct place *slices, int64_t num_bytes, int contributed)
{
    char *own = half_of(seq, seq->own, seq->step / 2);
    for (int64_t i = 0; i < message->num_rows; i++)
        slices[i] = contribute_row(seq, &in[i], own + i * message->block, num_bytes,
                                   message->small, contributed);
    if (!contributed)
        arrive(seq);
}

/* Where each row begins. */
static void begin_rows(const struct message *message, struct place *in)
{
    for (int64_t i = 0; i < message->num_rows; i++)
        in[i] = (struct place){message->pieces + i * message->num_pieces, 0, 0};
}

/* Do the part of a reduction's first block that needs no other rank. If the ranks then agree in a
   round, the reduction finds that all have arrived. */
void mpistrat_reduce_contribute(struct sequence *seq, struct message message)
{
    struct place in[message.num_rows], slices[message.num_rows];
    int64_t num_bytes = message.total < message.block ? message.total : message.block;
    begin_rows(&message, in);
    publish_goal(seq, &message);
    if (num_bytes > 0)
        contribute_block(seq, &message, in, slices, num_bytes, 0);
}

/* Withdraw the contribution of mpistrat_reduce_contribute. The ranks have not agreed, so no rank
   has used it. */
void mpistrat_reduce_withdraw(struct sequence *seq)
{
    seq->step--;
    __atomic_store_n((int64_t *)seq->line[seq->own], seq->step, __ATOMIC_RELEASE);
}

/* Copy out the slices of the other ranks. `out` moves behind the block. */
static void collect_block(const struct sequence *seq, int64_t use, struct place *out,
                          int64_t num_bytes)
{
    for (int64_t q = 0; q < seq->size; q++) {
        int64_t from = slice_start(num_bytes, seq->size, q);
        int64_t to = slice_start(num_bytes, seq->size, q + 1);
        if (q == seq->own)
            skip(out, to - from);
        else
            copy_out(out, half_of(seq, q, use) + from, to - from);
    }
}

/* Reduce the concatenation of pieces over the ranks; results are written to the targets of the
   pieces.

   Each block is two steps. Between them its sources are in the halves; after them its results are
   there, unless they are at their targets already. `contributed` says that
   mpistrat_reduce_contribute was called with the same message. */
void mpistrat_reduce(struct sequence *seq, struct arithmetic how, struct message message,
                     int contributed)
{
    struct place in[message.num_rows], own_in[message.num_rows];
    struct place out = {message.pieces, 0, message.total >= PAST_BYTES};
    int for_all = 0;
    begin_rows(&message, in);
    if (!contributed)
        publish_goal(seq, &message);
    for (int64_t done = 0; done < message.total; done += message.block) {
        int64_t left = message.total - done;
        int64_t num_bytes = left < message.block ? left : message.block;
        const struct rows rows = {seq->step / 2, message.block, own_in};
        contribute_block(seq, &message, in, own_in, num_bytes, contributed && done == 0);
        struct place own_out = out;
        if (!wait_for_all(seq))
            return;
        if (num_bytes <= message.small) {
            arrive(seq); /* no rank waits for this step */
            reduce_range(seq, &how, &rows, 0, num_bytes, own_out, 0);
            skip(&out, num_bytes);
            continue;
        }
        int64_t start = slice_start(num_bytes, seq->size, seq->own);
        int64_t stop = slice_start(num_bytes, seq->size, seq->own + 1);
        if (done == 0)
            for_all = all_have_goals(seq);
        if (for_all) {
            reduce_range_for_all(seq, &how, &rows, done, start, stop, out.goes_past);
            skip(&out, num_bytes);
            arrive(seq); /* only the end of the last block waits for it */
            continue;
        }
        skip(&own_out, start);
        reduce_range(seq, &how, &rows, start, stop, own_out, seq->size > 1);
        arrive(seq);
        if (!wait_for_all(seq))
            return;
        collect_block(seq, rows.use, &out, num_bytes);
    }
    if (for_all && !wait_for_all(seq))
        return;
    if (out.goes_past)
        end_copies_past(); /* a different thread may read the results next */
}

/* The same for one block in three calls, so that the caller can reduce the slice further, with
   other nodes, in between. Only the first `owners` ranks have slices. First: do the part that needs
   no other rank; mpistrat_reduce_withdraw withdraws it. */
void mpistrat_contribute_slices(struct sequence *seq, int64_t owners, const char *source,
                                int64_t num_bytes)
{
    char *own = half_of(seq, seq->own, seq->step / 2);
    int64_t start = slice_start(num_bytes, owners, seq->own);
    int64_t stop = slice_start(num_bytes, owners, seq->own + 1);
    copy_to_others(seq, own, source, start);
    copy_to_others(seq, own + stop, source + stop, num_bytes - stop);
    arrive(seq);
}

/* Second: `slice` gets the address and the length in bytes of this rank's slice. */
void mpistrat_reduce_slice(struct sequence *seq, int64_t function, int64_t owners,
                           const char *source, int64_t num_bytes, int64_t slice[2])
{
    const struct arithmetic how = {function, 1, 0, NULL};
    int64_t use = (seq->step - 1) / 2;
    char *own = half_of(seq, seq->own, use);
    int64_t start = slice_start(num_bytes, owners, seq->own);
    int64_t stop = slice_start(num_bytes, owners, seq->own + 1);
    if (!wait_for_all(seq))
        return;
    const struct piece there = {source + start, own + start, stop - start};
    struct place in = {&there, 0, 0};
    if (stop > start)
        reduce_range(seq, &how, &(struct rows){use, 0, &in}, start, stop, in, 0);
    slice[0] = (int64_t)(own + start);
    slice[1] = stop - start;
}

/* Bytes [at, at + most) of the part of an array that `rank` owns. */
static struct range chunk_of(const struct parts *parts, int64_t rank)
{
    int64_t left = parts->start[rank + 1] - parts->start[rank] - parts->at;
    int64_t num_bytes = left < parts->most ? left : parts->most;
    return (struct range){parts->start[rank] + parts->at, num_bytes > 0 ? num_bytes : 0};
}

/* Reduce a chunk of the part that this rank owns; each rank contributes the whole array. `room`
   gets the address and the length of the result, which mpistrat_collect_parts shares after the
   caller has overwritten it. Each half has space for a chunk of every rank. */
void mpistrat_reduce_part(struct sequence *seq, int64_t function, const char *source,
                          struct parts parts, int64_t room[2])
{
    const struct arithmetic how = {function, 1, 0, NULL};
    int64_t use = seq->step / 2, begin = seq->own * parts.most;
    char *own = half_of(seq, seq->own, use);
    struct range mine = chunk_of(&parts, seq->own);
    for (int64_t q = 0; q < seq->size; q++) {
        struct range theirs = chunk_of(&parts, q);
        if (q != seq->own)
            copy_to_others(seq, own + q * parts.most, source + theirs.start, theirs.num_bytes);
    }
    arrive(seq);
    if (!wait_for_all(seq))
        return;
    const struct piece there = {source + mine.start, own + begin, mine.num_bytes};
    struct place in = {&there, 0, 0};
    if (mine.num_bytes > 0)
        reduce_range(seq, &how, &(struct rows){use, 0, &in}, begin, begin + mine.num_bytes, in, 0);
    room[0] = (int64_t)(own + begin);
    room[1] = mine.num_bytes;
}

/* Copy from each rank the data that it has left in the memory that mpistrat_reduce_part returned to
   it. Without a target nothing is copied. */
void mpistrat_collect_parts(struct sequence *seq, char *target, struct parts parts)
{
    int64_t use = (seq->step - 1) / 2;
    arrive(seq);
    if (!wait_for_all(seq))
        return;
    for (int64_t q = 0; q < seq->size && target != NULL; q++) {
        struct range theirs = chunk_of(&parts, q);
        if (q != seq->own)
            memcpy(target + theirs.start, half_of(seq, q, use) + q * parts.most, theirs.num_bytes);
    }
}

void mpistrat_collect_slices(struct sequence *seq, int64_t owners, char *target, int64_t num_bytes)
{
    const struct piece piece = {0, target, num_bytes};
    struct place out = {&piece, 0, 0};
    int64_t use = (seq->step - 1) / 2;
    arrive(seq);
    if (!wait_for_all(seq))
        return;
    for (int64_t q = 0; q < owners; q++) {
        int64_t from = slice_start(num_bytes, owners, q);
        int64_t to = slice_start(num_bytes, owners, q + 1);
        copy_out(&out, half_of(seq, q, use) + from, to - from);
    }
}
