/* Turns of threads, passed on without Python's lock.

   A thread that releases a lock of the module threading and then waits for another lock still has
   Python's lock while the system wakes the next thread. That thread has to sleep again until
   Python's lock is free. Here Python's lock is released first, so a turn costs one wake-up.

   Waking a thread on a different core takes ten times as long as on this core, which is about to be
   free. So a thread that waits for its turn may run only on the core of the thread that passes the
   turn. As soon as it runs, it may use all its cores again: threads that it starts never see fewer.
   */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "native.h"

#include <pythread.h>

#ifdef __linux__
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

static const char *const NAME = "mpistrat.turn";

struct turn {
    PyThread_type_lock lock;
    int waiter; /* the thread that waits for it, if it may be bound to a core; else 0 */
    int is_taken; /* whether hand_over has taken it since it last passed a turn on for it */
#ifdef __linux__
    cpu_set_t cores; /* of the waiter */
#endif
};

#ifdef __linux__
static void bind_waiter(const struct turn *turn)
{
    cpu_set_t here;
    int waiter = __atomic_load_n(&turn->waiter, __ATOMIC_ACQUIRE), core = sched_getcpu();
    if (waiter == 0 || core < 0 || core >= CPU_SETSIZE)
        return;
    CPU_ZERO(&here);
    CPU_SET(core, &here);
    sched_setaffinity(waiter, sizeof here, &here);
}

/* Let the thread that passes the turn bind this one. An interrupted wait, which is begun again, may
   have been bound already. */
static void begin_wait(struct turn *turn)
{
    if (turn->waiter == 0 && sched_getaffinity(0, sizeof turn->cores, &turn->cores) == 0
        && CPU_COUNT(&turn->cores) > 1)
        __atomic_store_n(&turn->waiter, (int)syscall(SYS_gettid), __ATOMIC_RELEASE);
}

static void end_wait(struct turn *turn, int is_taken)
{
    if (turn->waiter == 0)
        return;
    sched_setaffinity(0, sizeof turn->cores, &turn->cores);
    if (is_taken)
        turn->waiter = 0;
}
#else
static void bind_waiter(const struct turn *turn)
{
    (void)turn;
}

static void begin_wait(struct turn *turn)
{
    (void)turn;
}

static void end_wait(struct turn *turn, int is_taken)
{
    (void)turn, (void)is_taken;
}
#endif

static void free_turn(PyObject *capsule)
{
    struct turn *turn = PyCapsule_GetPointer(capsule, NAME);
    PyThread_free_lock(turn->lock);
    PyMem_Free(turn);
}

/* make_turn(): a turn that no thread has been passed */
PyObject *mpistrat_make_turn(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module, (void)args, (void)num_args;
    struct turn *turn = PyMem_New(struct turn, 1);
    PyThread_type_lock lock = turn == NULL ? NULL : PyThread_allocate_lock();
    if (lock == NULL) {
        PyMem_Free(turn);
        return PyErr_NoMemory();
    }
    PyThread_acquire_lock(lock, WAIT_LOCK);
    *turn = (struct turn){.lock = lock};
    PyObject *capsule = PyCapsule_New(turn, NAME, free_turn);
    if (capsule == NULL) {
        PyThread_free_lock(lock);
        PyMem_Free(turn);
    }
    return capsule;
}

static int take_turns(PyObject *const *args, Py_ssize_t num_args, struct turn **turns)
{
    if (num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "expected two turns, or None");
        return 0;
    }
    for (int i = 0; i < 2; i++) {
        turns[i] = args[i] == Py_None ? NULL : PyCapsule_GetPointer(args[i], NAME);
        if (PyErr_Occurred())
            return 0;
    }
    return 1;
}

static void give(const struct turn *turn)
{
    if (turn == NULL)
        return;
    bind_waiter(turn);
    PyThread_release_lock(turn->lock);
}

/* hand_over(given, awaited): pass one turn and wait for the other. The handler of a signal may
   raise after the turn is passed. */
PyObject *mpistrat_hand_over(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    struct turn *turns[2];
    if (!take_turns(args, num_args, turns))
        return NULL;
    for (;;) {
        PyLockStatus status = PY_LOCK_ACQUIRED;
        if (turns[1] != NULL)
            turns[1]->is_taken = 0;
        Py_BEGIN_ALLOW_THREADS
        if (turns[1] != NULL)
            begin_wait(turns[1]);
        give(turns[0]);
        if (turns[1] != NULL) {
            status = PyThread_acquire_lock_timed(turns[1]->lock, -1, 1);
            end_wait(turns[1], status == PY_LOCK_ACQUIRED);
        }
        Py_END_ALLOW_THREADS
        turns[0] = NULL;
        if (turns[1] != NULL)
            turns[1]->is_taken = status == PY_LOCK_ACQUIRED;
        if (status == PY_LOCK_ACQUIRED)
            Py_RETURN_NONE;
        if (PyErr_CheckSignals() != 0)
            return NULL;
    }
}

/* has_taken(turn): whether the last hand_over that waited for it has taken it. A handler may also
   raise right after that. */
PyObject *mpistrat_has_taken(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    struct turn *turn = num_args == 1 ? PyCapsule_GetPointer(args[0], NAME) : NULL;
    if (turn == NULL)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "has_taken takes a turn");
    return PyBool_FromLong(turn->is_taken);
}

/* park(given, awaited): the same in a kept thread, which does not handle signals */
PyObject *mpistrat_park(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    struct turn *turns[2];
    if (!take_turns(args, num_args, turns))
        return NULL;
    if (turns[1] == NULL)
        return PyErr_Format(PyExc_TypeError, "park waits for a turn");
    Py_BEGIN_ALLOW_THREADS
    begin_wait(turns[1]);
    give(turns[0]);
    PyThread_acquire_lock(turns[1]->lock, WAIT_LOCK);
    end_wait(turns[1], 1);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
