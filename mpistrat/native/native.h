/* Declarations that the files of the module share. */

#ifndef MPISTRAT_NATIVE_H
#define MPISTRAT_NATIVE_H

/* One build works with every Python from 3.10 on, because only the stable ABI is used. */
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL mpistrat_numpy
#ifndef MPISTRAT_MODULE
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include <setjmp.h>
#include <stdint.h>

typedef PyObject *fast_function(PyObject *module, PyObject *const *args, Py_ssize_t num_args);

/* sequence_calls.c */
fast_function mpistrat_call_round_start, mpistrat_call_round_done, mpistrat_call_round_meet,
    mpistrat_call_round_rest, mpistrat_call_round_expect,
    mpistrat_call_round_contribute, mpistrat_call_round_result, mpistrat_call_combine_rows,
    mpistrat_call_reduce_contribute,
    mpistrat_call_reduce_withdraw, mpistrat_call_reduce, mpistrat_call_contribute_slices,
    mpistrat_call_reduce_slice,
    mpistrat_call_collect_slices, mpistrat_call_reduce_part, mpistrat_call_collect_parts;
struct sequence;
/* Take part in a round with two numbers and their complements, and wait a while for the other
   ranks. 0: some ranks are missing; 2: all ranks have contributed the same numbers. */
int mpistrat_meet(struct sequence *seq, uint64_t *values, uint64_t *largest, int64_t turns,
                  uint64_t first, uint64_t second);

/* fast_reduction.c */
PyObject *mpistrat_fast_reduction_type(void);

/* lists.c */
fast_function mpistrat_join, mpistrat_split, mpistrat_array_at;
PyObject *mpistrat_describe(PyObject *module, PyObject *arrays);
PyObject *mpistrat_address(PyObject *module, PyObject *array);
PyObject *mpistrat_addresses(PyObject *module, PyObject *arrays);

/* counts.c */
fast_function mpistrat_count_rows;

/* rows.c */
fast_function mpistrat_decode_chunks, mpistrat_ask_for, mpistrat_map_file;
/* Let SIGBUS jump to `mpistrat_way_out` in this thread, if that is set. */
int mpistrat_guard(void);
extern _Thread_local sigjmp_buf *volatile mpistrat_way_out;

/* row_copies.c */
fast_function mpistrat_copy_rows, mpistrat_begin_copy, mpistrat_end_copy;
int mpistrat_is_int64(PyObject *object);

/* transpose.c */
fast_function mpistrat_transpose_bytes;

/* turns.c */
fast_function mpistrat_make_turn, mpistrat_hand_over, mpistrat_park,
    mpistrat_has_taken;

/* ending.c */
fast_function mpistrat_end_within, mpistrat_leave_at_exit;

#endif
