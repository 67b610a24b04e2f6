/* Fast reductions: an all-reduce of arrays that repeats an earlier call of the program.

   Python takes longer for such a call than reducing a few numbers takes.
   collectives/fast_reduction.py creates the objects, and takes over if anything is unusual. */

#include "native.h"
#include "sequences.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>

/* The objects that a FastReduction is created with, by name. */
#define OBJECTS(X)                                                                               \
    X(CHANNEL, "channel") X(LEDGER, "ledger") X(DEPARTED, "departed") X(KIND, "kind")            \
    X(ACQUIRE, "acquire") X(RELEASE, "release") X(RECORDING, "recording") X(LOGGER, "logger")    \
    X(DEBUG_LEVEL, "debug_level") X(BEGIN, "begin") X(FIND_PLACE, "find_place")                  \
    X(ISSUERS, "issuers") X(CODE_OWNERS, "code_owners") X(USER, "user") X(FLIGHT, "flight")      \
    X(ENTRY_TYPE, "entry_type") X(SIGNATURE, "signature")                                        \
    X(IS_WAITING, "waiting") X(IS_AGREED, "agreed") X(IS_DONE, "done")                           \
    X(CHECK_DEPARTED, "check_departed") X(MEET, "meet") X(VOTE, "vote") X(ROW, "row")            \
    X(END_ROUND, "end_round") X(CLOCK, "clock") X(END, "end") X(MOVE, "move") X(TAKE, "take")    \
    X(ENTER, "enter") X(CHECK, "check") X(EXIT, "exit")
#define AS_NUMBER(NUMBER, NAME) NUMBER,
#define AS_NAME(NUMBER, NAME) NAME,
enum { OBJECTS(AS_NUMBER) NUM_OBJECTS };
static const char *const object_names[] = {OBJECTS(AS_NAME)};

/* How far a call has progressed: Progress in collectives/fast_reduction.py. */
enum { OUTSIDE, INSIDE, BROUGHT, AGREED };

/* How the numbers are moved: Route in collectives/reduction.py. */
enum { BY_PYTHON, BY_MPI, IN_ROUND, IN_BLOCKS, IN_SLICES, GATHERED, IN_ROWS };

/* The numbers with which a FastReduction is created; 0 if none is passed. With GATHERED, `values`
   is the send buffer of this rank, and `largest` the receive buffer of the first of `owners` ranks;
   the receive buffers of the ranks follow each other at a distance of `turns` bytes. */
struct path {
    int64_t route;
    struct sequence *rounds;
    uint64_t *values, *largest;
    int64_t turns;
    struct sequence *reductions;
    int64_t function, divisor, itemsize, block, small, owners;
    uint64_t digest; /* digest of the signature */
    uint64_t spread[6]; /* the factor of each counter */
};
#define FIELD(NAME) {#NAME, offsetof(struct path, NAME)}
static const struct {
    const char *name;
    size_t offset;
} fields[] = {FIELD(route),   FIELD(rounds),  FIELD(values),   FIELD(largest), FIELD(turns),
              FIELD(reductions), FIELD(function), FIELD(divisor), FIELD(itemsize), FIELD(block),
              FIELD(small),   FIELD(owners),  FIELD(digest)};
enum { NUM_FIELDS = sizeof fields / sizeof *fields };
_Static_assert(sizeof(void *) == sizeof(int64_t), "an address is a field of 64 bits");

struct fast {
    PyObject_HEAD
    PyObject *objects[NUM_OBJECTS];
    struct path path;
    PyObject *entry; /* entry of the current call in the flight record */
    long progress;
    int is_known; /* whether another replica of this rank has reached this collective before */
};

/* The arguments of a call. */
struct given {
    PyObject *arrays; /* one array, or the object that Python takes for several */
    PyObject *out;
    PyObject *extra; /* a number that must agree too; NULL for none */
    PyObject *text; /* describes it in the flight record; NULL for none */
};

enum { NUM_COUNTERS = 6, ALL_EQUAL = 2 };
static const char *const texts[] = {
    "sequence", "runs", "merge_calls", "failures", "updates", "batches", "inside", "closed",
    "on_collective", "on_received", "checks", "pending", "shape", "dtype", "agreed_ns", "ended_ns", "state",
    "recorder", "isEnabledFor", "co_filename", "f_lasti", "f_back", "began_ns", "number",
    "counters", "signature", "extra", "place", "entries", "append", "usual_at", ""};
enum { SEQUENCE, INSIDE_NAME = NUM_COUNTERS, CLOSED, ON_COLLECTIVE, ON_RECEIVED, CHECKS, PENDING,
       SHAPE, DTYPE, AGREED_NS, ENDED_NS, STATE, RECORDER, IS_ENABLED_FOR, CO_FILENAME, F_LASTI,
       F_BACK, BEGAN_NS, NUMBER, COUNTERS, ITS_SIGNATURE, ITS_EXTRA, PLACE, ENTRIES, APPEND,
       USUAL_AT, NO_TEXT, NUM_NAMES };
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

/* ---- contents of a FastReduction ---- */

static PyObject *item(struct fast *fast, int number)
{
    return fast->objects[number]; /* borrowed */
}

/* Call item `number`, and return whether it returned. */
static int call(struct fast *fast, int number, PyObject *argument)
{
    PyObject *result = PyObject_CallFunctionObjArgs(item(fast, number), argument, NULL);
    Py_XDECREF(result);
    return result != NULL;
}

/* Set an attribute to the time that item CLOCK returns. */
static int note_time(struct fast *fast, PyObject *entry, int name)
{
    PyObject *now = PyObject_CallFunctionObjArgs(item(fast, CLOCK), NULL);
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

/* Whether a returned object is true; -1 on errors. */
static int is_true(PyObject *found)
{
    int truth = found == NULL ? -1 : PyObject_IsTrue(found);
    Py_XDECREF(found);
    return truth;
}

/* Whether a timeline or a log shows the data that are moved; -1 on errors. */
static int is_watched(struct fast *fast)
{
    int is_unrecorded = has(item(fast, RECORDING), RECORDER, Py_None);
    if (is_unrecorded != 1)
        return is_unrecorded < 0 ? -1 : 1;
    return is_true(PyObject_CallMethodObjArgs(item(fast, LOGGER), names[IS_ENABLED_FOR],
                                              item(fast, DEBUG_LEVEL), NULL));
}

/* Whether another replica of this rank has found everything as usual at this collective, which all
   of them reach before any of them continues; -1 on errors. */
static int is_known_as_usual(struct fast *fast)
{
    PyObject *sequence = PyObject_GetAttr(item(fast, LEDGER), names[SEQUENCE]);
    int is_known = sequence == NULL ? -1 : has(item(fast, LEDGER), USUAL_AT, sequence);
    Py_XDECREF(sequence);
    return is_known;
}

/* Tell the other replicas of this rank that everything is as usual. */
static int note_as_usual(struct fast *fast)
{
    PyObject *sequence = PyObject_GetAttr(item(fast, LEDGER), names[SEQUENCE]);
    int is_set = sequence != NULL
        && PyObject_SetAttr(item(fast, LEDGER), names[USUAL_AT], sequence) == 0;
    Py_XDECREF(sequence);
    return is_set ? 1 : -1;
}

/* Whether a collective needs no Call, which checks all special cases; -1 on errors. */
static int is_as_usual(struct fast *fast)
{
    int is_in_rows = fast->path.route == IN_ROWS;
    int is_known = is_in_rows ? is_known_as_usual(fast) : 0;
    fast->is_known = is_known;
    if (is_known)
        return is_known < 0 ? -1 : has(item(fast, CHANNEL), INSIDE_NAME, Py_None);
    for (int name = INSIDE_NAME; name <= ON_RECEIVED; name++) {
        int is_none = has(item(fast, CHANNEL), name, Py_None);
        if (is_none != 1)
            return is_none;
    }
    if (PyDict_Size(item(fast, DEPARTED)) > 0)
        return 0;
    int watched = is_watched(fast);
    if (watched != 0)
        return watched < 0 ? -1 : 0;
    return is_in_rows ? note_as_usual(fast) : 1;
}

/* ---- the steps of a call; each returns whether it has succeeded ---- */

static struct piece piece_of(PyObject *array, PyObject *target)
{
    return (struct piece){PyArray_BYTES((PyArrayObject *)array), PyArray_BYTES((PyArrayObject *)target),
                          PyArray_NBYTES((PyArrayObject *)array)};
}

static struct message message_of(const struct path *path, const struct piece *piece)
{
    return (struct message){piece, 1, 1, piece->num_bytes, path->block, path->small};
}

/* A new array for the result. */
static PyObject *take_target(struct fast *fast, PyArrayObject *array)
{
    enum { SMALL_BYTES = 1 << 12 }; /* NumPy allocates these in any case */
    if (PyArray_NBYTES(array) < SMALL_BYTES)
        return PyArray_SimpleNew(PyArray_NDIM(array), PyArray_DIMS(array), PyArray_TYPE(array));
    PyObject *shape = PyObject_GetAttr((PyObject *)array, names[SHAPE]);
    PyObject *dtype = PyObject_GetAttr((PyObject *)array, names[DTYPE]);
    PyObject *target = NULL;
    if (shape != NULL && dtype != NULL)
        target = PyObject_CallFunctionObjArgs(item(fast, TAKE), shape, dtype, NULL);
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    return target;
}

/* Put the numbers where the other ranks read them once they agree. */
static int bring(struct fast *fast, const struct path *path, PyObject *array, PyObject *target)
{
    const struct piece own = piece_of(array, target), *piece = &own;
    if (path->route == BY_MPI)
        return 1;
    if (path->route == IN_ROUND) {
        mpistrat_round_contribute(path->rounds, piece->source, piece->num_bytes, 0);
        return 1;
    }
    if (path->route == GATHERED) {
        memcpy(path->values, piece->source, piece->num_bytes);
        return 1;
    }
    Py_BEGIN_ALLOW_THREADS
    if (path->route == IN_SLICES)
        mpistrat_contribute_slices(path->reductions, path->owners, piece->source, piece->num_bytes);
    else
        mpistrat_reduce_contribute(path->reductions, message_of(path, piece));
    Py_END_ALLOW_THREADS
    fast->progress = BROUGHT;
    return 1;
}

/* The place of the user's code, as users_place returns it. Python looks it up if this is NULL
   without an error. */
static PyObject *known_place(struct fast *fast)
{
    if (PyDict_Size(item(fast, ISSUERS)) != 0)
        return NULL;
    PyObject *frame = (PyObject *)PyEval_GetFrame(), *place = NULL;
    Py_XINCREF(frame);
    while (frame != NULL && frame != Py_None) {
        PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        PyObject *file = PyObject_GetAttr(code, names[CO_FILENAME]), *next = NULL;
        PyObject *owner = file == NULL ? NULL : PyDict_GetItem(item(fast, CODE_OWNERS), file);
        if (owner == item(fast, USER)) {
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

static PyObject *find_place(struct fast *fast)
{
    PyObject *place = known_place(fast);
    if (place == NULL && !PyErr_Occurred())
        place = PyObject_CallFunctionObjArgs(item(fast, FIND_PLACE), PyEval_GetFrame(), NULL);
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

/* Set an attribute to a new reference, which is released. */
static int set_new(PyObject *entry, int name, PyObject *value)
{
    int is_set = value != NULL && PyObject_SetAttr(entry, names[name], value) == 0;
    Py_XDECREF(value);
    return is_set;
}

static void set_entry(struct fast *fast, PyObject *entry)
{
    PyObject *before = fast->entry;
    fast->entry = entry;
    Py_XDECREF(before);
}

/* Add an entry to the flight record: see FlightRecord.begin. */
static PyObject *begin_entry(struct fast *fast, const struct given *given)
{
    PyObject *entry = PyObject_CallFunctionObjArgs(item(fast, ENTRY_TYPE), NULL);
    PyObject *ledger = item(fast, LEDGER), *entries = NULL, *added = NULL;
    if (entry == NULL)
        return NULL;
    set_entry(fast, entry);
    if (set_new(entry, PLACE, find_place(fast)) && note_time(fast, entry, BEGAN_NS)
        && set_new(entry, AGREED_NS, PyLong_FromLong(0))
        && set_new(entry, ENDED_NS, PyLong_FromLong(0))
        && set_new(entry, NUMBER, PyObject_GetAttr(ledger, names[SEQUENCE]))
        && set_new(entry, COUNTERS, counters_of(ledger))
        && PyObject_SetAttr(entry, names[STATE], item(fast, IS_WAITING)) == 0
        && PyObject_SetAttr(entry, names[ITS_SIGNATURE], item(fast, SIGNATURE)) == 0
        && PyObject_SetAttr(entry, names[ITS_EXTRA],
                            given->text == NULL ? names[NO_TEXT] : given->text) == 0)
        entries = PyObject_GetAttr(item(fast, FLIGHT), names[ENTRIES]);
    if (entries != NULL)
        added = PyObject_CallMethodObjArgs(entries, names[APPEND], entry, NULL);
    Py_XDECREF(entries);
    Py_XDECREF(added);
    return added == NULL ? NULL : entry;
}

/* Count the collective, and return its digest: see Ledger.digest. */
static int count(struct fast *fast, const struct path *path, uint64_t *digest)
{
    PyObject *ledger = item(fast, LEDGER);
    uint64_t counters[NUM_COUNTERS];
    *digest = path->digest;
    for (int i = 0; i < NUM_COUNTERS; i++) {
        PyObject *counter = PyObject_GetAttr(ledger, names[i]);
        if (counter == NULL)
            return 0;
        counters[i] = PyLong_AsUnsignedLongLong(counter);
        Py_DECREF(counter);
        *digest += counters[i] * path->spread[i];
    }
    if (PyErr_Occurred())
        return 0;
    PyObject *next = PyLong_FromUnsignedLongLong(counters[SEQUENCE] + 1);
    int is_set = next != NULL && PyObject_SetAttr(ledger, names[SEQUENCE], next) == 0;
    Py_XDECREF(next);
    return is_set;
}

/* Contribute a call with `digest` to a round, like mpistrat_meet; -1 on errors. */
static int meet(struct fast *fast, const struct path *path, uint64_t digest)
{
    if (path->rounds != NULL)
        return mpistrat_meet(path->rounds, path->values, path->largest, path->turns, 0, digest);
    PyObject *status = PyLong_FromLong(0), *number = PyLong_FromUnsignedLongLong(digest);
    PyObject *found = NULL;
    if (status != NULL && number != NULL)
        found = PyObject_CallFunctionObjArgs(item(fast, MEET), status, number, NULL);
    int known = found == NULL ? -1 : (int)PyLong_AsLong(found);
    Py_XDECREF(status);
    Py_XDECREF(number);
    Py_XDECREF(found);
    return known;
}

/* Agree with the other ranks. */
static int agree(struct fast *fast, const struct path *path, const struct given *given)
{
    uint64_t digest, extra = 0;
    if (item(fast, MEET) == Py_None)
        return call(fast, VOTE, given->extra);
    PyObject *channel = item(fast, CHANNEL);
    if (given->extra != NULL)
        extra = PyLong_AsUnsignedLongLongMask(given->extra);
    if (PyErr_Occurred() || !count(fast, path, &digest)
        || (PyDict_Size(item(fast, DEPARTED)) > 0 && !call(fast, CHECK_DEPARTED, NULL))
        || PyObject_SetAttr(channel, names[PENDING], Py_True) != 0)
        return 0;
    int known = meet(fast, path, digest ^ extra);
    if (known < 0)
        return 0;
    if (known == ALL_EQUAL)
        return PyObject_SetAttr(channel, names[PENDING], Py_False) == 0;
    PyObject *argument = PyLong_FromLong(known);
    int agreed = argument != NULL && call(fast, END_ROUND, argument);
    Py_XDECREF(argument);
    return agreed;
}

/* Leave a wait for data, as Python does at the end of `with occupancy`. */
static int leave_wait(struct fast *fast, int has_succeeded)
{
    PyObject *type = Py_None, *error = Py_None, *trace = Py_None;
    if (!has_succeeded) {
        PyErr_Fetch(&type, &error, &trace);
        PyErr_NormalizeException(&type, &error, &trace);
    }
    PyObject *left = PyObject_CallFunctionObjArgs(
        item(fast, EXIT), type, error, trace == NULL ? Py_None : trace, NULL);
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

/* Reduce a block within the node, reduce its slice over nodes, and collect the slices. */
static int reduce_slices(struct fast *fast, const struct path *path, const struct piece *piece,
                         PyArrayObject *array)
{
    int64_t slice[2] = {0, 0};
    Py_BEGIN_ALLOW_THREADS
    mpistrat_reduce_slice(path->reductions, path->function, path->owners, piece->source,
                          piece->num_bytes, slice);
    Py_END_ALLOW_THREADS
    if (!call(fast, CHECK, NULL))
        return 0;
    if (slice[1] > 0) {
        npy_intp count = slice[1] / PyArray_ITEMSIZE(array);
        PyObject *own = PyArray_SimpleNewFromData(1, &count, PyArray_TYPE(array),
                                                  (void *)slice[0]);
        int is_moved = own != NULL && call(fast, MOVE, own);
        Py_XDECREF(own);
        if (!is_moved)
            return 0;
    }
    Py_BEGIN_ALLOW_THREADS
    mpistrat_collect_slices(path->reductions, path->owners, piece->target, piece->num_bytes);
    Py_END_ALLOW_THREADS
    return call(fast, CHECK, NULL);
}

/* Write the result to `target`. */
static int reduce(struct fast *fast, const struct path *path, PyObject *array, PyObject *target)
{
    if (path->route == BY_MPI) {
        PyObject *moved = PyObject_CallFunctionObjArgs(item(fast, MOVE), array, target, NULL);
        Py_XDECREF(moved);
        return moved != NULL;
    }
    const struct piece own = piece_of(array, target), *piece = &own;
    const struct arithmetic how = {path->function, path->divisor, path->itemsize, NULL};
    if (path->route == IN_ROUND) {
        mpistrat_round_result(path->rounds, how, 0, piece->target, piece->num_bytes);
        return 1;
    }
    if (path->route == GATHERED) {
        mpistrat_combine_rows(how, (const char *)path->largest, path->turns, path->owners,
                              piece->target, piece->num_bytes);
        return 1;
    }
    if (!call(fast, ENTER, NULL))
        return 0;
    if (path->route == IN_SLICES)
        return leave_wait(fast, reduce_slices(fast, path, piece, (PyArrayObject *)array));
    Py_BEGIN_ALLOW_THREADS
    mpistrat_reduce(path->reductions, how, message_of(path, piece), 1);
    Py_END_ALLOW_THREADS
    return leave_wait(fast, call(fast, CHECK, NULL));
}

/* ---- the call ---- */

/* Reduce the row of one of the replicas of this rank. Returns the result. The rank agrees for all
   of its replicas, and adds the entry to the flight record, with the place of the first replica. */
static PyObject *reduce_row(struct fast *fast, const struct given *given)
{
    PyObject *place = fast->is_known ? (Py_INCREF(Py_None), Py_None) : find_place(fast);
    PyObject *results = NULL;
    if (place != NULL)
        results = PyObject_CallFunctionObjArgs(item(fast, ROW), given->arrays, given->out, place,
                                               given->extra, NULL);
    Py_XDECREF(place);
    return results;
}

/* Reduce the arrays, once the channel is taken. Returns the result. */
static PyObject *reduce_inside(struct fast *fast, const struct given *given)
{
    struct path path = fast->path;
    PyArrayObject *array = (PyArrayObject *)given->arrays; /* except for BY_PYTHON and IN_ROWS */
    PyObject *out = given->out;
    if (path.route == IN_ROWS)
        return reduce_row(fast, given);
    int checks = has(item(fast, CHANNEL), CHECKS, Py_True);
    PyObject *target = NULL, *begun = NULL, *entry = NULL;
    if (checks < 0)
        return NULL;
    if (!checks && path.route == IN_ROUND) /* without checks there is no round */
        path.route = IN_BLOCKS;
    if (!checks && path.route == GATHERED)
        path.route = item(fast, MOVE) == Py_None ? BY_PYTHON : BY_MPI;
    if (path.route == BY_PYTHON) {
        begun = PyObject_CallFunctionObjArgs(item(fast, BEGIN), (PyObject *)array, out, NULL);
        if (begun == NULL)
            return NULL;
    } else {
        target = out == Py_None ? take_target(fast, array) : (Py_INCREF(out), out);
        if (target == NULL)
            return NULL;
        if (!bring(fast, &path, (PyObject *)array, target))
            goto failed;
    }
    if (checks && ((entry = begin_entry(fast, given)) == NULL || !agree(fast, &path, given)
                   || !note_time(fast, entry, AGREED_NS)
                   || PyObject_SetAttr(entry, names[STATE], item(fast, IS_AGREED)) != 0))
        goto failed;
    fast->progress = AGREED;
    if (path.route == BY_PYTHON)
        target = PyObject_CallFunctionObjArgs(item(fast, END), begun, NULL);
    else if (!reduce(fast, &path, (PyObject *)array, target))
        goto failed;
    if (target != NULL && checks
        && (!note_time(fast, entry, ENDED_NS)
            || PyObject_SetAttr(entry, names[STATE], item(fast, IS_DONE)) != 0))
        goto failed;
    Py_XDECREF(begun);
    return target;
failed:
    Py_XDECREF(begun);
    Py_XDECREF(target);
    return NULL;
}

/* Whether compiled code can read `array` and write to `out`; if not, with an error set. */
static int are_arrays(PyObject *array, PyObject *out)
{
    if (!PyArray_CheckExact(array) || !(out == Py_None || PyArray_CheckExact(out))) {
        PyErr_SetString(PyExc_TypeError, "all_reduce takes an array, and one or None");
        return 0;
    }
    if (out != Py_None
        && PyArray_NBYTES((PyArrayObject *)out) != PyArray_NBYTES((PyArrayObject *)array)) {
        PyErr_SetString(PyExc_ValueError, "all_reduce: array and out differ in length");
        return 0;
    }
    return 1;
}

/* all_reduce(array, out[, extra, text]): the reduction of a plain array, written to `out` if it is
   not None; None if a call must do it. If Python moves the numbers, `array` may be the object that
   it takes for several arrays. The ranks must also agree on the number `extra`, which the flight
   record shows as `text`. After an error with progress, the caller releases the channel. */
static PyObject *all_reduce(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    struct fast *fast = (struct fast *)self;
    if (num_args != 2 && num_args != 4)
        return PyErr_Format(PyExc_TypeError, "all_reduce takes 2 or 4 arguments");
    const struct given given = {args[0], args[1], num_args == 4 ? args[2] : NULL,
                                num_args == 4 ? args[3] : NULL};
    int is_by_python = fast->path.route == BY_PYTHON || fast->path.route == IN_ROWS;
    if (!is_by_python && !are_arrays(given.arrays, given.out))
        return NULL;
    int is_taken = is_true(PyObject_CallFunctionObjArgs(item(fast, ACQUIRE), Py_False, NULL));
    if (is_taken < 0)
        return NULL;
    if (!is_taken)
        Py_RETURN_NONE;
    int usual = is_as_usual(fast);
    PyObject *channel = item(fast, CHANNEL);
    if (usual != 1 || PyObject_SetAttr(channel, names[INSIDE_NAME], item(fast, KIND)) != 0) {
        PyObject *type, *error, *trace;
        PyErr_Fetch(&type, &error, &trace); /* nothing may be called with an error set */
        int is_released = call(fast, RELEASE, NULL);
        if (type != NULL)
            PyErr_Restore(type, error, trace);
        else if (is_released && usual == 0)
            Py_RETURN_NONE;
        return NULL;
    }
    set_entry(fast, NULL);
    fast->progress = INSIDE;
    PyObject *result = reduce_inside(fast, &given);
    if (result == NULL)
        return NULL;
    int is_outside = PyObject_SetAttr(channel, names[INSIDE_NAME], Py_None) == 0;
    if (is_outside)
        fast->progress = OUTSIDE;
    if (!is_outside || !call(fast, RELEASE, NULL))
        Py_CLEAR(result);
    return result;
}

/* ---- the type ---- */

static int clear(PyObject *self)
{
    struct fast *fast = (struct fast *)self;
    for (int i = 0; i < NUM_OBJECTS; i++)
        Py_CLEAR(fast->objects[i]);
    Py_CLEAR(fast->entry);
    return 0;
}

static int traverse(PyObject *self, visitproc visit, void *arg)
{
    struct fast *fast = (struct fast *)self;
    Py_VISIT(Py_TYPE(self));
    for (int i = 0; i < NUM_OBJECTS; i++)
        Py_VISIT(fast->objects[i]);
    Py_VISIT(fast->entry);
    return 0;
}

static void destroy(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Return a new FastReduction for named arguments: all of OBJECTS, any of `fields`, and `spread`. */
static PyObject *create(PyTypeObject *type, PyObject *args, PyObject *given)
{
    PyObject *self = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    struct fast *fast = (struct fast *)self;
    PyObject *spread = given == NULL ? NULL : PyDict_GetItemString(given, "spread");
    Py_ssize_t num_used = NUM_OBJECTS + 1;
    if (fast == NULL || make_names() < 0)
        goto failed;
    if (PyTuple_Size(args) != 0 || spread == NULL || !PyTuple_Check(spread)
        || PyTuple_Size(spread) != NUM_COUNTERS) {
        PyErr_Format(PyExc_TypeError, "FastReduction takes names, and spread as %d numbers",
                     NUM_COUNTERS);
        goto failed;
    }
    for (int i = 0; i < NUM_OBJECTS; i++) {
        fast->objects[i] = PyDict_GetItemString(given, object_names[i]);
        Py_XINCREF(fast->objects[i]);
        if (fast->objects[i] == NULL) {
            PyErr_Format(PyExc_TypeError, "FastReduction: %s is missing", object_names[i]);
            goto failed;
        }
    }
    for (int i = 0; i < NUM_FIELDS; i++) {
        PyObject *number = PyDict_GetItemString(given, fields[i].name);
        if (number == NULL)
            continue;
        uint64_t value = PyLong_AsUnsignedLongLongMask(number);
        memcpy((char *)&fast->path + fields[i].offset, &value, sizeof value);
        num_used++;
    }
    for (int i = 0; i < NUM_COUNTERS; i++)
        fast->path.spread[i] = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(spread, i));
    if (PyErr_Occurred())
        goto failed;
    if (PyDict_Size(given) != num_used) {
        PyErr_SetString(PyExc_TypeError, "FastReduction has got a name that it does not know");
        goto failed;
    }
    return self;
failed:
    Py_XDECREF(self);
    return NULL;
}

static PyMethodDef methods[] = {
    {"all_reduce", (PyCFunction)(void (*)(void))all_reduce, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"entry", T_OBJECT, offsetof(struct fast, entry), READONLY, NULL},
    {"progress", T_LONG, offsetof(struct fast, progress), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, create},       {Py_tp_dealloc, destroy}, {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},      {Py_tp_methods, methods}, {Py_tp_members, members},
    {0, NULL},
};

static PyType_Spec spec = {
    "mpistrat._native.FastReduction", sizeof(struct fast), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};

PyObject *mpistrat_fast_reduction_type(void)
{
    return PyType_FromSpec(&spec);
}
