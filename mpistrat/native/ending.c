/* The end of a process that may wait for dead processes.

   MPI is finalized after Python has ended, so no Python code can watch it: a C thread does. */

#include "native.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static struct timespec limit;
static int code;

static void *end(void *unused)
{
    (void)unused;
    nanosleep(&limit, NULL);
    _exit(code);
}

static void begin(void)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, end, NULL) == 0)
        pthread_detach(thread);
}

/* end_within(milliseconds, code): once Python has ended, end the process with this exit code if it
   has not ended by itself in time. Functions registered last with Py_AtExit are called first. */
PyObject *mpistrat_end_within(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    long milliseconds = num_args == 2 ? PyLong_AsLong(args[0]) : -1;
    long wanted = num_args == 2 ? PyLong_AsLong(args[1]) : -1;
    if (PyErr_Occurred())
        return NULL;
    if (milliseconds < 0)
        return PyErr_Format(PyExc_TypeError, "end_within takes milliseconds and an exit code");
    limit = (struct timespec){milliseconds / 1000, milliseconds % 1000 * 1000000};
    code = (int)wanted;
    static int is_registered;
    if (!is_registered)
        is_registered = Py_AtExit(begin) == 0;
    Py_RETURN_NONE;
}

#ifdef __GLIBC__
static void leave(int status, void *unused)
{
    (void)unused;
    fflush(NULL);
    _exit(status);
}
#endif

/* leave_at_exit(): once Python has ended, end the process with the exit code of the program,
   without the exit functions of libraries, which may wait for a thread that hangs. Returns whether
   that is possible. */
PyObject *mpistrat_leave_at_exit(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module, (void)args, (void)num_args;
#ifdef __GLIBC__
    return PyBool_FromLong(on_exit(leave, NULL) == 0); /* last registered, first called */
#else
    Py_RETURN_FALSE;
#endif
}
