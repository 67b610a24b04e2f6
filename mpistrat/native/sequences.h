/* Shared-memory collectives of the ranks of one node: see sequences.c. */

#ifndef MPISTRAT_SEQUENCES_H
#define MPISTRAT_SEQUENCES_H

#include <stdint.h>

struct sequence {
    int64_t size, own;            /* number of ranks, and the number of this one */
    int64_t step;                 /* steps at which this rank has arrived */
    int64_t half;                 /* bytes of each half */
    int64_t arena, arena_bytes;   /* memory of each rank for results: offset from its line, length */
    int64_t patience_ns;          /* how long a wait polls the other ranks before it sleeps */
    int64_t keeps_core;           /* whether it keeps the core until then */
    int64_t num_slow, num_past;   /* slow copies in a row, and how many will go past the caches */
    char *line[];                 /* per rank: counter and goal, halves from LINE_HEAD on */
};

/* A part of an array to reduce. */
struct piece {
    const char *source;
    char *target;
    int64_t num_bytes;
};

/* The order in which rows are combined, if a rank contributes several. `numbers` has the number of
   rows of each rank, and then, for each row, the number of earlier sums with which it is combined;
   at most `most_sums` sums are kept at the same time. */
struct order {
    int64_t most_sums, numbers[];
};

/* How numbers are combined: the number of a function, the divisor for floats and their size, and
   the order, which is NULL for one row per rank. */
struct arithmetic {
    int64_t function, divisor, itemsize;
    const struct order *order;
};

/* The arrays to reduce: `num_rows` rows of this rank, each of `num_pieces` pieces and `total`
   bytes, in blocks of `block` bytes, at most one row's part of a half. For blocks up to `small`
   bytes, every rank reduces everything. */
struct message {
    const struct piece *pieces;
    int64_t num_rows, num_pieces, total, block, small;
};

/* A chunk of the part of an array that each rank owns, in bytes: part r begins at start[r]. */
struct parts {
    const int64_t *start;
    int64_t at, most;
};

struct range {
    int64_t start, num_bytes;
};

void mpistrat_round_start(struct sequence *seq, const uint64_t *values);
int mpistrat_round_done(const struct sequence *seq, uint64_t *largest, int64_t turns);
int mpistrat_round_rest(const struct sequence *seq, uint64_t *largest);
int mpistrat_round_expect(const struct sequence *seq, int64_t number, int64_t limit_ns);
void mpistrat_round_contribute(struct sequence *seq, const char *source, int64_t num_bytes,
                               int64_t offset);
void mpistrat_round_result(struct sequence *seq, struct arithmetic how, int64_t stride,
                           char *target, int64_t num_bytes);

void mpistrat_combine_rows(struct arithmetic how, const char *rows, int64_t stride,
                           int64_t num_rows, char *target, int64_t num_bytes);

void mpistrat_reduce_contribute(struct sequence *seq, struct message message);
void mpistrat_reduce_withdraw(struct sequence *seq);
void mpistrat_reduce(struct sequence *seq, struct arithmetic how, struct message message,
                     int contributed);

void mpistrat_contribute_slices(struct sequence *seq, int64_t owners, const char *source,
                                int64_t num_bytes);
void mpistrat_reduce_slice(struct sequence *seq, int64_t function, int64_t owners,
                           const char *source, int64_t num_bytes, int64_t slice[2]);
void mpistrat_collect_slices(struct sequence *seq, int64_t owners, char *target, int64_t num_bytes);
void mpistrat_reduce_part(struct sequence *seq, int64_t function, const char *source,
                          struct parts parts, int64_t room[2]);
void mpistrat_collect_parts(struct sequence *seq, char *target, struct parts parts);

#endif
