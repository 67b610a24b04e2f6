/* Repeated reductions: an all-reduce of one array that the program has made before.

   Python alone takes longer for it than to reduce a few numbers. collectives/fast_reduction.py makes the
   list that says what to do, and goes on where anything is not as usual. */

#include "native.h"
#include "sequences.h"

#include <string.h>

/* What the list has. The last two are written here. */
enum {
    CHANNEL, LEDGER, DEPARTED, KIND, WAY, ACQUIRE, RELEASE, RECORDING, LOGGER, DEBUG_LEVEL, BEGIN,
    FIND_PLACE, ISSUERS, OWNERS, USER, FLIGHT, ENTRY_TYPE, SIGNATURE, EXTRA, IS_WAITING,
    CHECK_DEPARTED, MEET, VOTE, END_ROUND, CLOCK, IS_AGREED, END, MOVE, IS_DONE, TAKE, ENTER, CHECK,
    EXIT,
    PROGRESS, ENTRY
};

/* How far a call has come: the channel is taken; the numbers lie where others look for them; all
   ranks agree. */
enum { OUTSIDE, INSIDE, BROUGHT, AGREED };

/* How the numbers travel: as Python does it; by what Python has ready; in shared memory, all of them
   with the round, in blocks, or in one block whose slices Python reduces over nodes; by MPI with the
   round. */
enum { BY_PYTHON, READY, IN_ROUND, IN_BLOCKS, IN_SLICES, GATHERED };

/* GATHERED: `values` is where those of this rank leave from, `largest` where those of the first of
   `owners` ranks arrive, and of each other one `turns` bytes behind those of the one before. */

struct way {
    int64_t travel;
    struct sequence *rounds;
    uint64_t *values, *largest;
    int64_t turns;
    struct sequence *reductions;
    int64_t function, divisor, itemsize, block, small, owners;
    uint64_t digest, spread[6]; /* of the signature, and what each counter is multiplied by */
};

enum { NUM_COUNTERS = 6, ALL_EQUAL = 2 };
static const char *const texts[] = {
    "sequence", "runs", "merge_calls", "failures", "updates", "batches", "inside", "closed",
    "on_collective", "on_received", "checks", "pending", "shape", "dtype", "agreed_ns", "ended_ns", "state",
    "recorder", "isEnabledFor", "co_filename", "f_lasti", "f_back", "began_ns", "number",
    "counters", "signature", "extra", "place", "entries", "append"};
enum { SEQUENCE, INSIDE_NAME = NUM_COUNTERS, CLOSED, ON_COLLECTIVE, ON_RECEIVED, CHECKS, PENDING,
       SHAPE, DTYPE, AGREED_NS, ENDED_NS, STATE, RECORDER, IS_ENABLED_FOR, CO_FILENAME, F_LASTI,
       F_BACK, BEGAN_NS, NUMBER, COUNTERS, ITS_SIGNATURE, ITS_EXTRA, PLACE, ENTRIES, APPEND,
       NUM_NAMES };
static PyObject *names[NUM_NAMES];

static int make_names(void)
{
    for (int i = 0; i < NUM_NAMES && names[NUM_NAMES - 1] == NULL; i++) {
        PyObject *name = PyUnicode_InternFromString(texts[i]);
        if (name == NULL)
            return -1;
        names[i] = name;
    }
    return 0;
}

/* ---- what the list has ---- */

static PyObject *item(PyObject *list, int number)
{
    return PyList_GetItem(list, number); /* borrowed */
}

static int set_progress(PyObject *list, long progress)
{
    return PyList_SetItem(list, PROGRESS, PyLong_FromLong(progress));
}

/* Call item `number`, and return whether it returned. */
static int call(PyObject *list, int number, PyObject *argument)
{
    PyObject *result = PyObject_CallFunctionObjArgs(item(list, number), argument, NULL);
    Py_XDECREF(result);
    return result != NULL;
}

/* Set an attribute to what item CLOCK returns. */
static int note_time(PyObject *list, PyObject *entry, int name)
{
    PyObject *now = PyObject_CallFunctionObjArgs(item(list, CLOCK), NULL);
    int is_set = now != NULL && PyObject_SetAttr(entry, names[name], now) == 0;
    Py_XDECREF(now);
    return is_set;
}

/* Whether an attribute is `value`; -1 on errors. */
static int has(PyObject *object, int name, const PyObject *value)
{
    PyObject *found = PyObject_GetAttr(object, names[name]);
    Py_XDECREF(found);
    return found == NULL ? -1 : found == value;
}

/* Whether what was returned is true; -1 on errors. */
static int is_true(PyObject *found)
{
    int truth = found == NULL ? -1 : PyObject_IsTrue(found);
    Py_XDECREF(found);
    return truth;
}

/* Whether a timeline or a log shows what moves; -1 on errors. */
static int is_watched(PyObject *list)
{
    int is_unrecorded = has(item(list, RECORDING), RECORDER, Py_None);
    if (is_unrecorded != 1)
        return is_unrecorded < 0 ? -1 : 1;
    return is_true(PyObject_CallMethodObjArgs(item(list, LOGGER), names[IS_ENABLED_FOR],
                                              item(list, DEBUG_LEVEL), NULL));
}

/* Whether a collective can do without a Call, which looks at all that may be; -1 on errors. */
static int is_as_usual(PyObject *list)
{
    for (int name = INSIDE_NAME; name <= ON_RECEIVED; name++) {
        int is_none = has(item(list, CHANNEL), name, Py_None);
        if (is_none != 1)
            return is_none;
    }
    if (PyDict_Size(item(list, DEPARTED)) > 0)
        return 0;
    int watched = is_watched(list);
    return watched < 0 ? -1 : !watched;
}

/* ---- the steps of a call; each returns whether it has succeeded ---- */

static int take_way(PyObject *list, struct way *way)
{
    const char *bytes = PyBytes_AsString(item(list, WAY));
    if (bytes == NULL)
        return 0;
    memcpy(way, bytes, sizeof *way);
    return 1;
}

static struct piece piece_of(PyObject *array, PyObject *target)
{
    return (struct piece){PyArray_BYTES((PyArrayObject *)array), PyArray_BYTES((PyArrayObject *)target),
                          PyArray_NBYTES((PyArrayObject *)array)};
}

static struct message message_of(const struct way *way, const struct piece *piece)
{
    return (struct message){piece, 1, 1, piece->num_bytes, way->block, way->small};
}

/* A new array for the result. */
static PyObject *take_target(PyObject *list, PyArrayObject *array)
{
    enum { SMALL_BYTES = 1 << 12 }; /* they come from NumPy in any case */
    if (PyArray_NBYTES(array) < SMALL_BYTES)
        return PyArray_SimpleNew(PyArray_NDIM(array), PyArray_DIMS(array), PyArray_TYPE(array));
    PyObject *shape = PyObject_GetAttr((PyObject *)array, names[SHAPE]);
    PyObject *dtype = PyObject_GetAttr((PyObject *)array, names[DTYPE]);
    PyObject *target = NULL;
    if (shape != NULL && dtype != NULL)
        target = PyObject_CallFunctionObjArgs(item(list, TAKE), shape, dtype, NULL);
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    return target;
}

/* Put the numbers where the other ranks look for them once they agree. */
static int bring(PyObject *list, const struct way *way, PyObject *array, PyObject *target)
{
    const struct piece own = piece_of(array, target), *piece = &own;
    if (way->travel == READY)
        return 1;
    if (way->travel == IN_ROUND) {
        mpistrat_round_contribute(way->rounds, piece->source, piece->num_bytes, 0);
        return 1;
    }
    if (way->travel == GATHERED) {
        memcpy(way->values, piece->source, piece->num_bytes);
        return 1;
    }
    Py_BEGIN_ALLOW_THREADS
    if (way->travel == IN_SLICES)
        mpistrat_contribute_slices(way->reductions, way->owners, piece->source, piece->num_bytes);
    else
        mpistrat_reduce_contribute(way->reductions, message_of(way, piece));
    Py_END_ALLOW_THREADS
    return set_progress(list, BROUGHT) == 0;
}

/* Where the user's code is, as users_place finds it, which does so where this is NULL without an
   error. */
static PyObject *known_place(PyObject *list)
{
    if (PyDict_Size(item(list, ISSUERS)) != 0)
        return NULL;
    PyObject *frame = (PyObject *)PyEval_GetFrame(), *place = NULL;
    Py_XINCREF(frame);
    while (frame != NULL && frame != Py_None) {
        PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        PyObject *file = PyObject_GetAttr(code, names[CO_FILENAME]), *next = NULL;
        PyObject *owner = file == NULL ? NULL : PyDict_GetItem(item(list, OWNERS), file);
        if (owner == item(list, USER)) {
            PyObject *offset = PyObject_GetAttr(frame, names[F_LASTI]);
            if (offset != NULL)
                place = PyTuple_Pack(2, code, offset);
            Py_XDECREF(offset);
        } else if (owner != NULL) {
            next = PyObject_GetAttr(frame, names[F_BACK]);
        }
        Py_DECREF(code);
        Py_XDECREF(file);
        Py_DECREF(frame);
        frame = next;
    }
    Py_XDECREF(frame);
    return place;
}

static PyObject *find_place(PyObject *list)
{
    PyObject *place = known_place(list);
    if (place == NULL && !PyErr_Occurred())
        place = PyObject_CallFunctionObjArgs(item(list, FIND_PLACE), PyEval_GetFrame(), NULL);
    return place;
}

/* The counters of the ledger that an entry has: see FlightEntry. */
static PyObject *counters_of(PyObject *ledger)
{
    static const int wanted[] = {1, 2, 4, 3};
    PyObject *counters = PyTuple_New(4);
    for (int i = 0; counters != NULL && i < 4; i++) {
        PyObject *counter = PyObject_GetAttr(ledger, names[wanted[i]]);
        if (counter == NULL)
            Py_CLEAR(counters);
        else
            PyTuple_SetItem(counters, i, counter);
    }
    return counters;
}

/* Set an attribute to a new reference, which is given up. */
static int set_new(PyObject *entry, int name, PyObject *value)
{
    int is_set = value != NULL && PyObject_SetAttr(entry, names[name], value) == 0;
    Py_XDECREF(value);
    return is_set;
}

/* Add an entry to the flight record: see FlightRecord.begin. */
static PyObject *begin_entry(PyObject *list)
{
    PyObject *entry = PyObject_CallFunctionObjArgs(item(list, ENTRY_TYPE), NULL);
    PyObject *ledger = item(list, LEDGER), *entries = NULL, *added = NULL;
    if (entry == NULL || PyList_SetItem(list, ENTRY, entry) != 0) /* which keeps it */
        return NULL;
    if (set_new(entry, PLACE, find_place(list)) && note_time(list, entry, BEGAN_NS)
        && set_new(entry, AGREED_NS, PyLong_FromLong(0))
        && set_new(entry, ENDED_NS, PyLong_FromLong(0))
        && set_new(entry, NUMBER, PyObject_GetAttr(ledger, names[SEQUENCE]))
        && set_new(entry, COUNTERS, counters_of(ledger))
        && PyObject_SetAttr(entry, names[STATE], item(list, IS_WAITING)) == 0
        && PyObject_SetAttr(entry, names[ITS_SIGNATURE], item(list, SIGNATURE)) == 0
        && PyObject_SetAttr(entry, names[ITS_EXTRA], item(list, EXTRA)) == 0)
        entries = PyObject_GetAttr(item(list, FLIGHT), names[ENTRIES]);
    if (entries != NULL)
        added = PyObject_CallMethodObjArgs(entries, names[APPEND], entry, NULL);
    Py_XDECREF(entries);
    Py_XDECREF(added);
    return added == NULL ? NULL : entry;
}

/* Count the collective, and return its digest: see Ledger.digest. */
static int count(PyObject *list, const struct way *way, uint64_t *digest)
{
    PyObject *ledger = item(list, LEDGER);
    uint64_t counters[NUM_COUNTERS];
    *digest = way->digest;
    for (int i = 0; i < NUM_COUNTERS; i++) {
        PyObject *counter = PyObject_GetAttr(ledger, names[i]);
        if (counter == NULL)
            return 0;
        counters[i] = PyLong_AsUnsignedLongLong(counter);
        Py_DECREF(counter);
        *digest += counters[i] * way->spread[i];
    }
    if (PyErr_Occurred())
        return 0;
    PyObject *next = PyLong_FromUnsignedLongLong(counters[SEQUENCE] + 1);
    int is_set = next != NULL && PyObject_SetAttr(ledger, names[SEQUENCE], next) == 0;
    Py_XDECREF(next);
    return is_set;
}

/* Bring a call with `digest` to a round: as mpistrat_meet; -1 on errors. */
static int meet(PyObject *list, const struct way *way, uint64_t digest)
{
    if (way->rounds != NULL)
        return mpistrat_meet(way->rounds, way->values, way->largest, way->turns, 0, digest);
    PyObject *status = PyLong_FromLong(0), *number = PyLong_FromUnsignedLongLong(digest);
    PyObject *found = NULL;
    if (status != NULL && number != NULL)
        found = PyObject_CallFunctionObjArgs(item(list, MEET), status, number, NULL);
    int known = found == NULL ? -1 : (int)PyLong_AsLong(found);
    Py_XDECREF(status);
    Py_XDECREF(number);
    Py_XDECREF(found);
    return known;
}

/* Agree with the other ranks. */
static int agree(PyObject *list, const struct way *way)
{
    uint64_t digest;
    if (item(list, MEET) == Py_None)
        return call(list, VOTE, NULL);
    PyObject *channel = item(list, CHANNEL);
    if (!count(list, way, &digest)
        || (PyDict_Size(item(list, DEPARTED)) > 0 && !call(list, CHECK_DEPARTED, NULL))
        || PyObject_SetAttr(channel, names[PENDING], Py_True) != 0)
        return 0;
    int known = meet(list, way, digest);
    if (known < 0)
        return 0;
    if (known == ALL_EQUAL)
        return PyObject_SetAttr(channel, names[PENDING], Py_False) == 0;
    PyObject *argument = PyLong_FromLong(known);
    int agreed = argument != NULL && call(list, END_ROUND, argument);
    Py_XDECREF(argument);
    return agreed;
}

/* Leave a wait for data, as Python leaves `with occupancy`. */
static int leave_wait(PyObject *list, int has_succeeded)
{
    PyObject *type = Py_None, *error = Py_None, *trace = Py_None;
    if (!has_succeeded) {
        PyErr_Fetch(&type, &error, &trace);
        PyErr_NormalizeException(&type, &error, &trace);
    }
    PyObject *left = PyObject_CallFunctionObjArgs(
        item(list, EXIT), type, error, trace == NULL ? Py_None : trace, NULL);
    if (has_succeeded || left == NULL) {
        if (!has_succeeded) {
            Py_XDECREF(type);
            Py_XDECREF(error);
            Py_XDECREF(trace);
        }
        Py_XDECREF(left);
        return has_succeeded && left != NULL;
    }
    Py_DECREF(left);
    PyErr_Restore(type, error, trace);
    return 0;
}

/* Reduce a block within the node, its slice over nodes, and collect the slices. */
static int reduce_slices(PyObject *list, const struct way *way, const struct piece *piece,
                         PyArrayObject *array)
{
    int64_t slice[2] = {0, 0};
    Py_BEGIN_ALLOW_THREADS
    mpistrat_reduce_slice(way->reductions, way->function, way->owners, piece->source,
                          piece->num_bytes, slice);
    Py_END_ALLOW_THREADS
    if (!call(list, CHECK, NULL))
        return 0;
    if (slice[1] > 0) {
        npy_intp count = slice[1] / PyArray_ITEMSIZE(array);
        PyObject *own = PyArray_SimpleNewFromData(1, &count, PyArray_TYPE(array),
                                                  (void *)slice[0]);
        int is_moved = own != NULL && call(list, MOVE, own);
        Py_XDECREF(own);
        if (!is_moved)
            return 0;
    }
    Py_BEGIN_ALLOW_THREADS
    mpistrat_collect_slices(way->reductions, way->owners, piece->target, piece->num_bytes);
    Py_END_ALLOW_THREADS
    return call(list, CHECK, NULL);
}

/* Write the result to `target`. */
static int reduce(PyObject *list, const struct way *way, PyObject *array, PyObject *target)
{
    if (way->travel == READY) {
        PyObject *moved = PyObject_CallFunctionObjArgs(item(list, MOVE), array, target, NULL);
        Py_XDECREF(moved);
        return moved != NULL;
    }
    const struct piece own = piece_of(array, target), *piece = &own;
    const struct arithmetic how = {way->function, way->divisor, way->itemsize, NULL};
    if (way->travel == IN_ROUND) {
        mpistrat_round_result(way->rounds, how, 0, piece->target, piece->num_bytes);
        return 1;
    }
    if (way->travel == GATHERED) {
        mpistrat_combine_rows(how, (const char *)way->largest, way->turns, way->owners,
                              piece->target, piece->num_bytes);
        return 1;
    }
    if (!call(list, ENTER, NULL))
        return 0;
    if (way->travel == IN_SLICES)
        return leave_wait(list, reduce_slices(list, way, piece, (PyArrayObject *)array));
    Py_BEGIN_ALLOW_THREADS
    mpistrat_reduce(way->reductions, how, message_of(way, piece), 1);
    Py_END_ALLOW_THREADS
    return leave_wait(list, call(list, CHECK, NULL));
}

/* ---- the call ---- */

/* Reduce `array`, once the channel is taken. Returns the result. */
static PyObject *reduce_inside(PyObject *list, PyArrayObject *array, PyObject *out)
{
    struct way way;
    int checks = has(item(list, CHANNEL), CHECKS, Py_True);
    PyObject *target = NULL, *begun = NULL, *entry = NULL;
    if (checks < 0 || !take_way(list, &way))
        return NULL;
    if (!checks && way.travel == IN_ROUND) /* there is none */
        way.travel = IN_BLOCKS;
    if (!checks && way.travel == GATHERED)
        way.travel = item(list, MOVE) == Py_None ? BY_PYTHON : READY;
    if (way.travel == BY_PYTHON) {
        begun = PyObject_CallFunctionObjArgs(item(list, BEGIN), (PyObject *)array, out, NULL);
        if (begun == NULL)
            return NULL;
    } else {
        target = out == Py_None ? take_target(list, array) : (Py_INCREF(out), out);
        if (target == NULL)
            return NULL;
        if (!bring(list, &way, (PyObject *)array, target))
            goto failed;
    }
    if (checks && ((entry = begin_entry(list)) == NULL || !agree(list, &way)
                   || !note_time(list, entry, AGREED_NS)
                   || PyObject_SetAttr(entry, names[STATE], item(list, IS_AGREED)) != 0))
        goto failed;
    if (set_progress(list, AGREED) != 0)
        goto failed;
    if (way.travel == BY_PYTHON)
        target = PyObject_CallFunctionObjArgs(item(list, END), begun, NULL);
    else if (!reduce(list, &way, (PyObject *)array, target))
        goto failed;
    if (target != NULL && checks
        && (!note_time(list, entry, ENDED_NS)
            || PyObject_SetAttr(entry, names[STATE], item(list, IS_DONE)) != 0))
        goto failed;
    Py_XDECREF(begun);
    return target;
failed:
    Py_XDECREF(begun);
    Py_XDECREF(target);
    return NULL;
}

/* repeat(list, array, out): the reduction of a plain array, written to `out` if that is not None;
   None where a call must do it. After an error with progress, the caller gives the channel back. */
PyObject *mpistrat_repeat(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    if (num_args != 3 || !PyList_CheckExact(args[0]) || !PyArray_CheckExact(args[1])
        || !(args[2] == Py_None || PyArray_CheckExact(args[2])))
        return PyErr_Format(PyExc_TypeError, "repeat takes a list, an array, and one or None");
    PyObject *list = args[0];
    PyArrayObject *array = (PyArrayObject *)args[1];
    if (args[2] != Py_None
        && PyArray_NBYTES((PyArrayObject *)args[2]) != PyArray_NBYTES(array))
        return PyErr_Format(PyExc_ValueError, "repeat: array and out differ in length");
    int is_taken = -1;
    if (make_names() == 0)
        is_taken = is_true(PyObject_CallFunctionObjArgs(item(list, ACQUIRE), Py_False, NULL));
    if (is_taken < 0)
        return NULL;
    if (!is_taken)
        Py_RETURN_NONE;
    int usual = is_as_usual(list);
    PyObject *channel = item(list, CHANNEL);
    if (usual != 1 || PyObject_SetAttr(channel, names[INSIDE_NAME], item(list, KIND)) != 0) {
        PyObject *type, *error, *trace;
        PyErr_Fetch(&type, &error, &trace); /* nothing may be called with an error set */
        int is_released = call(list, RELEASE, NULL);
        if (type != NULL)
            PyErr_Restore(type, error, trace);
        else if (is_released && usual == 0)
            Py_RETURN_NONE;
        return NULL;
    }
    Py_INCREF(Py_None);
    if (PyList_SetItem(list, ENTRY, Py_None) != 0 || set_progress(list, INSIDE) != 0)
        return NULL;
    PyObject *result = reduce_inside(list, array, args[2]);
    if (result == NULL)
        return NULL;
    if (PyObject_SetAttr(channel, names[INSIDE_NAME], Py_None) != 0
        || set_progress(list, OUTSIDE) != 0 || !call(list, RELEASE, NULL))
        Py_CLEAR(result);
    return result;
}
