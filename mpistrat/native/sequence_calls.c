/* Python's calls of the functions of sequences.c.

   Sequences and the values of rounds are passed by address, numbers to reduce as arrays. The
   callers in comm/ are trusted to pass correct dtypes and lengths; the checks here prevent reads
   and writes elsewhere. Functions that may wait let other threads run. */

#include "native.h"

#include "sequences.h"

#include <string.h>

enum { FEW = 16, SOON = 256 };

static int take_integers(PyObject *const *args, Py_ssize_t count, int64_t *values)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        values[i] = PyLong_AsLongLong(args[i]);
        if (values[i] == -1 && PyErr_Occurred())
            return 0;
    }
    return 1;
}

static int take_count(Py_ssize_t num_args, Py_ssize_t expected, const char *name)
{
    if (num_args == expected)
        return 1;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, expected, num_args);
    return 0;
}

static PyArrayObject *as_array(PyObject *object)
{
    if (PyArray_Check(object) && PyArray_IS_C_CONTIGUOUS((PyArrayObject *)object))
        return (PyArrayObject *)object;
    PyErr_SetString(PyExc_TypeError, "expected a NumPy array in C order");
    return NULL;
}

/* ---- rounds ---- */

/* round_start(seq, values) */
PyObject *mpistrat_call_round_start(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    int64_t given[2];
    if (!take_count(num_args, 2, "round_start") || !take_integers(args, 2, given))
        return NULL;
    mpistrat_round_start((struct sequence *)given[0], (const uint64_t *)given[1]);
    Py_RETURN_NONE;
}

/* round_done(seq, largest, turns) -> bool */
PyObject *mpistrat_call_round_done(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    int64_t given[3];
    if (!take_count(num_args, 3, "round_done") || !take_integers(args, 3, given))
        return NULL;
    return PyBool_FromLong(
        mpistrat_round_done((struct sequence *)given[0], (uint64_t *)given[1], given[2]));
}

/* round_rest(seq, largest) -> bool */
PyObject *mpistrat_call_round_rest(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    int64_t given[2];
    if (!take_count(num_args, 2, "round_rest") || !take_integers(args, 2, given))
        return NULL;
    int done;
    Py_BEGIN_ALLOW_THREADS
    done = mpistrat_round_rest((struct sequence *)given[0], (uint64_t *)given[1]);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(done);
}

/* round_expect(seq, limit_ns, number) -> bool */
PyObject *mpistrat_call_round_expect(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    int64_t given[3];
    if (!take_count(num_args, 3, "round_expect") || !take_integers(args, 3, given))
        return NULL;
    int all_come;
    Py_BEGIN_ALLOW_THREADS
    all_come = mpistrat_round_expect((struct sequence *)given[0], given[2], given[1]);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(all_come);
}

int mpistrat_meet(struct sequence *seq, uint64_t *values, uint64_t *largest, int64_t turns,
                  uint64_t first, uint64_t second)
{
    const uint64_t own[4] = {first, ~first, second, ~second};
    memcpy(values, own, sizeof own);
    mpistrat_round_start(seq, values);
    int done = mpistrat_round_done(seq, largest, SOON);
    if (!done) { /* a late rank may need a different thread of this rank */
        Py_BEGIN_ALLOW_THREADS
        done = mpistrat_round_done(seq, largest, turns);
        Py_END_ALLOW_THREADS
    }
    return !done ? 0 : memcmp(largest, own, sizeof own) == 0 ? 2 : 1;
}

/* round_meet(seq, values, largest, turns, first, second) -> int: see mpistrat_meet */
PyObject *mpistrat_call_round_meet(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    int64_t given[4];
    if (!take_count(num_args, 6, "round_meet") || !take_integers(args, 4, given))
        return NULL;
    uint64_t first = PyLong_AsUnsignedLongLong(args[4]);
    uint64_t second = PyLong_AsUnsignedLongLong(args[5]);
    if (PyErr_Occurred())
        return NULL;
    return PyLong_FromLong(mpistrat_meet((struct sequence *)given[0], (uint64_t *)given[1],
                                         (uint64_t *)given[2], given[3], first, second));
}

/* round_contribute(seq, offset, source) */
PyObject *mpistrat_call_round_contribute(PyObject *module, PyObject *const *args,
                                         Py_ssize_t num_args)
{
    (void)module;
    int64_t given[2];
    if (!take_count(num_args, 3, "round_contribute") || !take_integers(args, 2, given))
        return NULL;
    PyArrayObject *source = as_array(args[2]);
    if (source == NULL)
        return NULL;
    mpistrat_round_contribute((struct sequence *)given[0], PyArray_BYTES(source),
                              PyArray_NBYTES(source), given[1]);
    Py_RETURN_NONE;
}

/* round_result(seq, function, divisor, itemsize, order, stride, target) */
PyObject *mpistrat_call_round_result(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    int64_t given[6];
    if (!take_count(num_args, 7, "round_result") || !take_integers(args, 6, given))
        return NULL;
    PyArrayObject *target = as_array(args[6]);
    if (target == NULL)
        return NULL;
    const struct arithmetic how = {given[1], given[2], given[3], (const struct order *)given[4]};
    mpistrat_round_result((struct sequence *)given[0], how, given[5], PyArray_BYTES(target),
                          PyArray_NBYTES(target));
    Py_RETURN_NONE;
}

/* combine_rows(function, divisor, itemsize, rows, stride, num_rows, target) */
PyObject *mpistrat_call_combine_rows(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    int64_t given[6];
    if (!take_count(num_args, 7, "combine_rows") || !take_integers(args, 6, given))
        return NULL;
    PyArrayObject *target = as_array(args[6]);
    if (target == NULL)
        return NULL;
    const struct arithmetic how = {given[0], given[1], given[2], NULL};
    mpistrat_combine_rows(how, (const char *)given[3], given[4], given[5], PyArray_BYTES(target),
                          PyArray_NBYTES(target));
    Py_RETURN_NONE;
}

/* ---- reductions ---- */

/* Describe a list of targets, and a list of sources for each row, row by row. A short list uses
   `room`; otherwise the caller frees the pieces. */
static int take_message(PyObject *sources, PyObject *targets, struct piece *room,
                        struct message *message)
{
    if (!PyList_CheckExact(sources) || !PyList_CheckExact(targets) ||
        PyList_Size(sources) != PyList_Size(targets) * message->num_rows) {
        PyErr_SetString(PyExc_TypeError, "expected a list of sources for each row of targets");
        return 0;
    }
    int64_t count = PyList_Size(sources);
    message->num_pieces = PyList_Size(targets);
    message->total = 0;
    struct piece *pieces = room;
    if (count > FEW)
        pieces = PyMem_New(struct piece, count);
    if (pieces == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    message->pieces = pieces;
    for (int64_t i = 0; i < count; i++) {
        PyArrayObject *source = as_array(PyList_GetItem(sources, i)), *target = NULL;
        if (source != NULL)
            target = as_array(PyList_GetItem(targets, i % message->num_pieces));
        if (target != NULL && PyArray_NBYTES(source) != PyArray_NBYTES(target))
            PyErr_Format(PyExc_ValueError, "source and target %lld differ in length", (long long)i);
        if (PyErr_Occurred()) {
            if (pieces != room)
                PyMem_Free(pieces);
            return 0;
        }
        pieces[i] = (struct piece){PyArray_BYTES(source), PyArray_BYTES(target),
                                   PyArray_NBYTES(source)};
        if (i < message->num_pieces)
            message->total += pieces[i].num_bytes;
    }
    return 1;
}

/* reduce_contribute(seq, block, small, sources, targets) */
PyObject *mpistrat_call_reduce_contribute(PyObject *module, PyObject *const *args,
                                          Py_ssize_t num_args)
{
    (void)module;
    int64_t given[3];
    struct piece room[FEW];
    struct message message = {.num_rows = 1};
    if (!take_count(num_args, 5, "reduce_contribute") || !take_integers(args, 3, given) ||
        !take_message(args[3], args[4], room, &message))
        return NULL;
    message.block = given[1];
    message.small = given[2];
    Py_BEGIN_ALLOW_THREADS
    mpistrat_reduce_contribute((struct sequence *)given[0], message);
    Py_END_ALLOW_THREADS
    if (message.pieces != room)
        PyMem_Free((void *)message.pieces);
    Py_RETURN_NONE;
}

/* reduce_withdraw(seq) */
PyObject *mpistrat_call_reduce_withdraw(PyObject *module, PyObject *const *args,
                                        Py_ssize_t num_args)
{
    (void)module;
    int64_t seq;
    if (!take_count(num_args, 1, "reduce_withdraw") || !take_integers(args, 1, &seq))
        return NULL;
    mpistrat_reduce_withdraw((struct sequence *)seq);
    Py_RETURN_NONE;
}

/* reduce(seq, function, divisor, itemsize, order, num_rows, block, small, contributed, sources,
   targets) */
PyObject *mpistrat_call_reduce(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    int64_t given[9];
    struct piece room[FEW];
    struct message message;
    if (!take_count(num_args, 11, "reduce") || !take_integers(args, 9, given))
        return NULL;
    message.num_rows = given[5];
    if (!take_message(args[9], args[10], room, &message))
        return NULL;
    const struct arithmetic how = {given[1], given[2], given[3], (const struct order *)given[4]};
    message.block = given[6];
    message.small = given[7];
    Py_BEGIN_ALLOW_THREADS
    mpistrat_reduce((struct sequence *)given[0], how, message, (int)given[8]);
    Py_END_ALLOW_THREADS
    if (message.pieces != room)
        PyMem_Free((void *)message.pieces);
    Py_RETURN_NONE;
}

/* contribute_slices(seq, owners, source, num_bytes) */
PyObject *mpistrat_call_contribute_slices(PyObject *module, PyObject *const *args,
                                          Py_ssize_t num_args)
{
    (void)module;
    int64_t given[4];
    if (!take_count(num_args, 4, "contribute_slices") || !take_integers(args, 4, given))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    mpistrat_contribute_slices((struct sequence *)given[0], given[1], (const char *)given[2],
                               given[3]);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* reduce_slice(seq, function, owners, source, num_bytes) -> (address, bytes) of the slice */
PyObject *mpistrat_call_reduce_slice(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    int64_t given[5], slice[2] = {0, 0};
    if (!take_count(num_args, 5, "reduce_slice") || !take_integers(args, 5, given))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    mpistrat_reduce_slice((struct sequence *)given[0], given[1], given[2], (const char *)given[3],
                          given[4], slice);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("(LL)", (long long)slice[0], (long long)slice[1]);
}

/* collect_slices(seq, owners, target, num_bytes) */
PyObject *mpistrat_call_collect_slices(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    int64_t given[4];
    if (!take_count(num_args, 4, "collect_slices") || !take_integers(args, 4, given))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    mpistrat_collect_slices((struct sequence *)given[0], given[1], (char *)given[2], given[3]);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* reduce_part(seq, function, source, starts, at, most) -> (address, bytes) of the memory */
PyObject *mpistrat_call_reduce_part(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    int64_t given[6], room[2] = {0, 0};
    if (!take_count(num_args, 6, "reduce_part") || !take_integers(args, 6, given))
        return NULL;
    const struct parts parts = {(const int64_t *)given[3], given[4], given[5]};
    Py_BEGIN_ALLOW_THREADS
    mpistrat_reduce_part((struct sequence *)given[0], given[1], (const char *)given[2], parts, room);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("(LL)", (long long)room[0], (long long)room[1]);
}

/* collect_parts(seq, target, starts, at, most) */
PyObject *mpistrat_call_collect_parts(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    int64_t given[5];
    if (!take_count(num_args, 5, "collect_parts") || !take_integers(args, 5, given))
        return NULL;
    const struct parts parts = {(const int64_t *)given[2], given[3], given[4]};
    Py_BEGIN_ALLOW_THREADS
    mpistrat_collect_parts((struct sequence *)given[0], (char *)given[1], parts);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
