/* Row copies: rows from any offsets, copied to their places in a batch, without Python's lock.

   Helpers, which are threads without Python, begin a copy while the program continues. The thread
   that ends the copy copies the rest, so it never waits for more than one part. */

#include "native.h"
#include "pause.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* How far a processor loads ahead while it copies; more would evict data that it still needs. */
enum { LINE = 64, AHEAD = 4096 };

/* A thread takes this many bytes at a time; smaller copies are not passed to helpers at all. */
enum { PART_BYTES = 1 << 16, MAX_HELPERS = 7, MAX_SPINS = 1 << 8 };

enum { NUM_OWNERS = 4 };

struct copy {
    const char *from;
    char *to;
    const npy_int64 *offsets, *places;
    npy_intp count, row_bytes, rows_per_part;
    npy_intp next;   /* the first row that no thread has taken */
    int has_failed;  /* the file has become shorter */
    int num_helping; /* helpers at work on it; changed only under the lock */
    int is_shared;   /* helpers may be at work on it */
    pid_t pid;
    struct copy *after; /* in the queue */
    PyObject *owners[NUM_OWNERS];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t has_work = PTHREAD_COND_INITIALIZER, has_left = PTHREAD_COND_INITIALIZER;
static struct copy *queue;
static struct helper {
    pthread_t thread;
    int core; /* where it ran last */
} helpers[MAX_HELPERS];
static int num_helpers;

/* Copy in parts: one long memcpy bypasses the caches, and the program uses the rows soon. */
static void copy_bytes(char *to, const char *from, npy_intp num_bytes)
{
    for (; num_bytes > PART_BYTES; num_bytes -= PART_BYTES, to += PART_BYTES, from += PART_BYTES)
        memcpy(to, from, PART_BYTES);
    memcpy(to, from, num_bytes);
}

/* Copy a row while the next row, which may be anywhere, is loaded from memory. */
static void copy_row(char *to, const char *from, npy_intp num_bytes, const char *next)
{
    npy_intp done = 0;
    for (; done + LINE <= num_bytes && done < AHEAD; done += LINE) {
        __builtin_prefetch(next + done, 0, 1);
        memcpy(to + done, from + done, LINE);
    }
    copy_bytes(to + done, from + done, num_bytes - done);
}

static npy_intp place_of(const struct copy *copy, npy_intp i)
{
    return copy->places == NULL ? i : copy->places[i];
}

/* Whether row `i` follows the row before it, both in the source and in the target. */
static int follows(const struct copy *copy, npy_intp i)
{
    return copy->offsets[i] == copy->offsets[i - 1] + copy->row_bytes
           && place_of(copy, i) == place_of(copy, i - 1) + 1;
}

static int copy_part(const struct copy *copy, npy_intp first, npy_intp end)
{
    sigjmp_buf here;
    if (sigsetjmp(here, 0)) {
        mpistrat_way_out = NULL;
        return -1;
    }
    mpistrat_way_out = &here;
    for (npy_intp i = first, after; i < end; i = after) {
        char *to = copy->to + place_of(copy, i) * copy->row_bytes;
        const char *from = copy->from + copy->offsets[i];
        for (after = i + 1; after < end && follows(copy, after); after++)
            ;
        if (after > i + 1)
            copy_bytes(to, from, (after - i) * copy->row_bytes);
        else
            copy_row(to, from, copy->row_bytes,
                     copy->from + copy->offsets[after < copy->count ? after : i]);
    }
    mpistrat_way_out = NULL;
    return 0;
}

/* Copy parts that no other thread has taken, until there are none. */
static void copy_parts(struct copy *copy)
{
    npy_intp first, rows = copy->rows_per_part;
    while ((first = __atomic_fetch_add(&copy->next, rows, __ATOMIC_RELAXED)) < copy->count) {
        npy_intp end = rows < copy->count - first ? first + rows : copy->count;
        if (copy_part(copy, first, end) != 0)
            __atomic_store_n(&copy->has_failed, 1, __ATOMIC_RELAXED);
    }
}

/* Remove a copy from the queue, under the lock, if it is there. */
static void unqueue(struct copy *copy)
{
    for (struct copy **link = &queue; *link != NULL; link = &(*link)->after)
        if (*link == copy) {
            *link = copy->after;
            return;
        }
}

static void *help(void *self)
{
    pthread_mutex_lock(&lock);
    for (;;) {
        ((struct helper *)self)->core = sched_getcpu();
        while (queue == NULL)
            pthread_cond_wait(&has_work, &lock);
        struct copy *copy = queue;
        copy->num_helping++;
        pthread_mutex_unlock(&lock);
        copy_parts(copy);
        pthread_mutex_lock(&lock);
        unqueue(copy);
        __atomic_store_n(&copy->num_helping, copy->num_helping - 1, __ATOMIC_RELEASE);
        pthread_cond_broadcast(&has_left);
    }
    return NULL;
}

/* A forked process has no helpers, and the lock may be in any state. */
static void forget_helpers(void)
{
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    has_work = has_left = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    queue = NULL;
    num_helpers = 0;
}

/* Create at least `wanted` helpers, under the lock, or as many as the system allows. */
static void have_helpers(int wanted)
{
    static int handles_forks;
    pthread_attr_t attributes;
    sigset_t all, before;
    if (num_helpers >= wanted || pthread_attr_init(&attributes) != 0)
        return;
    if (!handles_forks)
        handles_forks = pthread_atfork(NULL, NULL, forget_helpers) == 0;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 1 << 18);
    sigfillset(&all); /* the threads of the program handle the signals */
    sigdelset(&all, SIGBUS);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (handles_forks && num_helpers < wanted
           && pthread_create(&helpers[num_helpers].thread, &attributes, help,
                             &helpers[num_helpers]) == 0)
        helpers[num_helpers++].core = -1;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

/* Keep helpers off the core of this thread, under the lock: virtual machines wake a thread there,
   even if other cores are idle, and then the helper interrupts the thread that it should help. */
static void keep_apart(void)
{
    int core = sched_getcpu();
    cpu_set_t others;
    for (int i = 0; i < num_helpers; i++)
        if (core >= 0 && helpers[i].core == core
            && pthread_getaffinity_np(pthread_self(), sizeof others, &others) == 0) {
            CPU_CLR(core, &others);
            if (CPU_COUNT(&others) > 0)
                pthread_setaffinity_np(helpers[i].thread, sizeof others, &others);
        }
}

/* Let helpers begin a copy. */
static void share(struct copy *copy, int wanted)
{
    struct copy **last = &queue;
    pthread_mutex_lock(&lock);
    have_helpers(wanted < MAX_HELPERS ? wanted : MAX_HELPERS);
    keep_apart();
    if (num_helpers > 0) {
        while (*last != NULL)
            last = &(*last)->after;
        *last = copy;
        copy->is_shared = 1;
        pthread_cond_broadcast(&has_work);
    }
    pthread_mutex_unlock(&lock);
}

/* Copy the rest, and wait for the helpers. */
static void finish(struct copy *copy)
{
    copy_parts(copy);
    if (!copy->is_shared || copy->pid != getpid())
        return;
    copy->is_shared = 0;
    /* The rest of one part takes less time than going to sleep. */
    for (int i = 0; i < MAX_SPINS && __atomic_load_n(&copy->num_helping, __ATOMIC_ACQUIRE); i++)
        mpistrat_pause();
    pthread_mutex_lock(&lock);
    unqueue(copy);
    while (copy->num_helping > 0)
        pthread_cond_wait(&has_left, &lock);
    pthread_mutex_unlock(&lock);
}

static void abandon(PyObject *capsule)
{
    struct copy *copy = PyCapsule_GetPointer(capsule, NULL);
    __atomic_store_n(&copy->next, copy->count, __ATOMIC_RELAXED);
    finish(copy);
    for (int i = 0; i < NUM_OWNERS; i++)
        Py_DECREF(copy->owners[i]);
    free(copy);
}

int mpistrat_is_int64(PyObject *object)
{
    return PyArray_CheckExact(object) && PyArray_TYPE((PyArrayObject *)object) == NPY_INT64
           && PyArray_NDIM((PyArrayObject *)object) == 1
           && PyArray_ISCARRAY_RO((PyArrayObject *)object);
}

/* Fill `copy` from the arguments of copy_rows; 0 if they are valid. */
static int prepare(struct copy *copy, PyObject *const *args)
{
    if (!PyArray_CheckExact(args[0]) || !mpistrat_is_int64(args[1])
        || !PyArray_ISCARRAY_RO((PyArrayObject *)args[0])
        || !(args[2] == Py_None || mpistrat_is_int64(args[2]))
        || !PyArray_CheckExact(args[3]) || !PyArray_ISCARRAY((PyArrayObject *)args[3])
        || PyArray_NDIM((PyArrayObject *)args[3]) == 0) {
        PyErr_SetString(PyExc_TypeError, "copy_rows takes bytes, int64 offsets and places, and rows");
        return -1;
    }
    PyArrayObject *rows = (PyArrayObject *)args[3];
    npy_intp num_rows = PyArray_DIM(rows, 0), num_bytes = PyArray_NBYTES((PyArrayObject *)args[0]);
    copy->from = PyArray_BYTES((PyArrayObject *)args[0]);
    copy->to = PyArray_BYTES(rows);
    copy->count = PyArray_SIZE((PyArrayObject *)args[1]);
    copy->row_bytes = num_rows ? PyArray_NBYTES(rows) / num_rows : 0;
    copy->rows_per_part = PART_BYTES / (copy->row_bytes ? copy->row_bytes : 1);
    copy->rows_per_part += copy->rows_per_part == 0;
    copy->offsets = PyArray_DATA((PyArrayObject *)args[1]);
    if (args[2] != Py_None) {
        copy->places = PyArray_DATA((PyArrayObject *)args[2]);
        if (PyArray_SIZE((PyArrayObject *)args[2]) != copy->count) {
            PyErr_SetString(PyExc_ValueError, "copy_rows: not as many places as offsets");
            return -1;
        }
    } else if (copy->count > num_rows) {
        PyErr_SetString(PyExc_ValueError, "copy_rows: fewer rows than offsets");
        return -1;
    }
    for (npy_intp i = 0; i < copy->count; i++) {
        if (copy->places != NULL && (copy->places[i] < 0 || copy->places[i] >= num_rows)) {
            PyErr_Format(PyExc_IndexError, "copy_rows: no row %lld", (long long)copy->places[i]);
            return -1;
        }
        /* Outside of the mapping: the file was shorter when it was mapped. */
        copy->has_failed |= copy->offsets[i] < 0 || copy->offsets[i] > num_bytes - copy->row_bytes;
    }
    if (copy->has_failed)
        copy->next = copy->count;
    if (mpistrat_guard() != 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    return 0;
}

/* copy_rows(mapped, offsets, places, rows): copy the bytes at byte offsets[i] of `mapped` to row
   places[i] of `rows`, or to row i if `places` is None. Returns whether all of them could be read:
   False if the file has become shorter since. */
PyObject *mpistrat_copy_rows(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    struct copy copy = {0};
    if (num_args != 4)
        return PyErr_Format(PyExc_TypeError, "copy_rows takes four arguments");
    if (prepare(&copy, args) != 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    copy_parts(&copy);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(!copy.has_failed);
}

/* begin_copy(mapped, offsets, places, rows, num_helpers): begin the same copy in other threads.
   Returns the argument for end_copy; the arrays must not change until then. */
PyObject *mpistrat_begin_copy(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    int wanted = num_args == 5 ? (int)PyLong_AsLong(args[4]) : 0;
    if (num_args != 5 || PyErr_Occurred())
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "begin_copy takes five");
    struct copy *copy = calloc(1, sizeof *copy);
    if (copy == NULL)
        return PyErr_NoMemory();
    copy->pid = getpid();
    PyObject *capsule = prepare(copy, args) == 0 ? PyCapsule_New(copy, NULL, NULL) : NULL;
    if (capsule == NULL) {
        free(copy);
        return NULL;
    }
    for (int i = 0; i < NUM_OWNERS; i++) {
        Py_INCREF(args[i]);
        copy->owners[i] = args[i];
    }
    PyCapsule_SetDestructor(capsule, abandon);
    if (wanted > 0 && copy->count * copy->row_bytes >= PART_BYTES)
        share(copy, wanted);
    return capsule;
}

/* end_copy(copy): copy the rest of a copy that has begun. Returns the same as copy_rows. */
PyObject *mpistrat_end_copy(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    struct copy *copy = num_args == 1 ? PyCapsule_GetPointer(args[0], NULL) : NULL;
    if (copy == NULL)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "end_copy takes a copy");
    if (mpistrat_guard() != 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_BEGIN_ALLOW_THREADS
    finish(copy);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(!copy->has_failed);
}
