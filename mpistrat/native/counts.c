/* Counts of the rows that are needed from each chunk. */

#include "native.h"

/* count_rows(counts, chunks, step): add `step`, 1 or -1, to the int32 `counts` of each of `chunks`.
   Returns a list of the chunks whose count was 0 before it was raised, or is 0 after it was
   lowered, each where it occurs first. */
PyObject *mpistrat_count_rows(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    if (num_args != 3 || !PyArray_CheckExact(args[0]) || !mpistrat_is_int64(args[1])
        || PyArray_TYPE((PyArrayObject *)args[0]) != NPY_INT32
        || !PyArray_ISCARRAY((PyArrayObject *)args[0]))
        return PyErr_Format(PyExc_TypeError, "count_rows takes int32 counts, int64 chunks, a step");
    npy_int32 *counts = PyArray_DATA((PyArrayObject *)args[0]);
    const npy_int64 *chunks = PyArray_DATA((PyArrayObject *)args[1]);
    npy_intp num_chunks = PyArray_SIZE((PyArrayObject *)args[0]);
    npy_intp num_rows = PyArray_SIZE((PyArrayObject *)args[1]);
    long step = PyLong_AsLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    for (npy_intp i = 0; i < num_rows; i++)
        if (chunks[i] < 0 || chunks[i] >= num_chunks)
            return PyErr_Format(PyExc_IndexError, "no chunk %lld", (long long)chunks[i]);
    PyObject *found = PyList_New(0);
    if (found == NULL)
        return NULL;
    for (npy_intp i = 0; step < 0 && i < num_rows; i++)
        counts[chunks[i]]--;
    for (npy_intp i = 0; i < num_rows; i++) {
        npy_int32 *count = &counts[chunks[i]];
        if (*count == 0) {
            PyObject *number = PyLong_FromLongLong(chunks[i]);
            if (number == NULL || PyList_Append(found, number) != 0)
                Py_CLEAR(found);
            Py_XDECREF(number);
            if (found == NULL)
                return NULL;
            *count = step < 0 ? NPY_MIN_INT32 : 0; /* so that it is not listed twice */
        }
        if (step > 0)
            (*count)++;
    }
    for (npy_intp i = 0; step < 0 && i < num_rows; i++)
        if (counts[chunks[i]] == NPY_MIN_INT32)
            counts[chunks[i]] = 0;
    return found;
}
