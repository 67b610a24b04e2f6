/* Shared-memory collectives of the ranks of one node: see sequences.c. */

#ifndef MPISTRAT_SEQUENCES_H
#define MPISTRAT_SEQUENCES_H

#include <stdint.h>

struct sequence {
    int64_t size, own;            /* ranks, and the number of this one */
    int64_t step;                 /* steps at which this rank has arrived */
    int64_t half;                 /* bytes of each half */
    int64_t arena, arena_bytes;   /* memory of each rank for results: offset from its line, length */
    int64_t patience_ns;          /* how long a wait looks at the other ranks before it sleeps */
    int64_t keeps_core;           /* whether it keeps the core until then */
    char *line[];                 /* of each rank: counter and goal, halves from LINE_HEAD on */
};

/* A part of what is reduced. */
struct piece {
    const char *source;
    char *target;
    int64_t num_bytes;
};

/* In which order rows are combined, where a rank brings several. `numbers` has the number of rows of
   each rank, and then, for each row, with how many sums before it it is combined; `most_sums` wait at
   a time. */
struct order {
    int64_t most_sums, numbers[];
};

/* How numbers are combined: the number of a function, what floats of a size are divided by, and in
   which order: NULL for one row of each rank. */
struct arithmetic {
    int64_t function, divisor, itemsize;
    const struct order *order;
};

/* What is reduced: `num_rows` rows of this rank, each of `num_pieces` pieces and `total` bytes, in
   blocks of `block` bytes, for each row at most its part of a half. Of blocks up to `small` bytes,
   every rank reduces everything. */
struct message {
    const struct piece *pieces;
    int64_t num_rows, num_pieces, total, block, small;
};

/* A chunk of the part that each rank owns of an array, in bytes: part r lies from start[r] on. */
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
