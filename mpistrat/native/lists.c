/* Packing of lists of arrays: descriptions of arrays, and their numbers one behind the other.

   A training step reduces hundreds of arrays, and Python would need a microsecond for each. */

#include "native.h"

#include <string.h>

/* Whether `object` is an array, not of a subclass, that can be sent from its own memory. */
static int is_plain(PyObject *object)
{
    if (!PyArray_CheckExact(object))
        return 0;
    PyArrayObject *array = (PyArrayObject *)object;
    int number = PyArray_TYPE(array);
    int is_number = PyTypeNum_ISNUMBER(number) || number == NPY_BOOL;
    return is_number && PyArray_IS_C_CONTIGUOUS(array) && PyArray_ISBEHAVED_RO(array);
}

/* describe(arrays): bytes that are equal for lists of arrays of equal dtypes and shapes; None
   unless all are plain. */
PyObject *mpistrat_describe(PyObject *module, PyObject *arrays)
{
    (void)module;
    if (!PyList_CheckExact(arrays))
        Py_RETURN_NONE;
    Py_ssize_t length = 0, count = PyList_Size(arrays);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *array = PyList_GetItem(arrays, i);
        if (!is_plain(array))
            Py_RETURN_NONE;
        length += 1 + PyArray_NDIM((PyArrayObject *)array);
    }
    PyObject *text = PyBytes_FromStringAndSize(NULL, length * (Py_ssize_t)sizeof(npy_intp));
    if (text == NULL)
        return NULL;
    npy_intp *entry = (npy_intp *)PyBytes_AsString(text);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyArrayObject *array = (PyArrayObject *)PyList_GetItem(arrays, i);
        int ndim = PyArray_NDIM(array);
        *entry++ = PyArray_TYPE(array) * 256 + ndim;
        memcpy(entry, PyArray_DIMS(array), ndim * sizeof *entry);
        entry += ndim;
    }
    return text;
}

/* join(arrays, joined): copy plain arrays to `joined`, one behind the other. */
PyObject *mpistrat_join(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    if (num_args != 2 || !PyList_CheckExact(args[0]) || !is_plain(args[1]))
        return PyErr_Format(PyExc_TypeError, "join takes a list of arrays, and an array");
    PyArrayObject *joined = (PyArrayObject *)args[1];
    char *to = PyArray_BYTES(joined);
    npy_intp left = PyArray_NBYTES(joined);
    for (Py_ssize_t i = 0; i < PyList_Size(args[0]); i++) {
        PyObject *array = PyList_GetItem(args[0], i);
        if (!is_plain(array) || PyArray_NBYTES((PyArrayObject *)array) > left)
            return PyErr_Format(PyExc_ValueError, "join: array %zd is not plain or too long", i);
        npy_intp num_bytes = PyArray_NBYTES((PyArrayObject *)array);
        memcpy(to, PyArray_BYTES((PyArrayObject *)array), num_bytes);
        to += num_bytes, left -= num_bytes;
    }
    Py_RETURN_NONE;
}

/* split(joined, arrays): new arrays in the shapes of `arrays`, filled from the array `joined`. */
PyObject *mpistrat_split(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    if (num_args != 2 || !is_plain(args[0]) || !PyList_CheckExact(args[1]))
        return PyErr_Format(PyExc_TypeError, "split takes an array, and a list of arrays");
    PyArrayObject *joined = (PyArrayObject *)args[0];
    const char *from = PyArray_BYTES(joined);
    npy_intp left = PyArray_NBYTES(joined);
    Py_ssize_t count = PyList_Size(args[1]);
    PyObject *results = PyList_New(count);
    for (Py_ssize_t i = 0; results != NULL && i < count; i++) {
        PyArrayObject *like = (PyArrayObject *)PyList_GetItem(args[1], i);
        PyObject *result = NULL;
        if (PyArray_CheckExact(like))
            result = PyArray_SimpleNew(PyArray_NDIM(like), PyArray_DIMS(like), PyArray_TYPE(joined));
        else
            PyErr_Format(PyExc_TypeError, "split: item %zd is no array", i);
        npy_intp num_bytes = result == NULL ? 0 : PyArray_NBYTES((PyArrayObject *)result);
        if (result != NULL && num_bytes > left) {
            PyErr_Format(PyExc_ValueError, "split: array %zd is too long", i);
            Py_CLEAR(result);
        }
        if (result == NULL) {
            Py_CLEAR(results);
            break;
        }
        memcpy(PyArray_BYTES((PyArrayObject *)result), from, num_bytes);
        from += num_bytes, left -= num_bytes;
        PyList_SetItem(results, i, result);
    }
    return results;
}

/* address(array): the start of its memory. */
PyObject *mpistrat_address(PyObject *module, PyObject *array)
{
    (void)module;
    if (!PyArray_Check(array))
        return PyErr_Format(PyExc_TypeError, "address takes a NumPy array");
    return PyLong_FromVoidPtr(PyArray_DATA((PyArrayObject *)array));
}

/* addresses(arrays): bytes with the address of each array, as a list of pointers in C. */
PyObject *mpistrat_addresses(PyObject *module, PyObject *arrays)
{
    (void)module;
    if (!PyList_CheckExact(arrays))
        return PyErr_Format(PyExc_TypeError, "addresses takes a list of NumPy arrays");
    Py_ssize_t count = PyList_Size(arrays);
    PyObject *text = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(void *));
    for (Py_ssize_t i = 0; text != NULL && i < count; i++) {
        PyObject *array = PyList_GetItem(arrays, i);
        if (!PyArray_Check(array)) {
            Py_DECREF(text);
            return PyErr_Format(PyExc_TypeError, "addresses: item %zd is no array", i);
        }
        void *address = PyArray_DATA((PyArrayObject *)array);
        memcpy(PyBytes_AsString(text) + i * sizeof address, &address, sizeof address);
    }
    return text;
}

/* array_at(address, shape, dtype, owner): an array in memory that lives as long as `owner`. */
PyObject *mpistrat_array_at(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    if (num_args != 4 || !PyTuple_CheckExact(args[1]) || !PyArray_DescrCheck(args[2]))
        return PyErr_Format(PyExc_TypeError, "array_at takes address, shape, dtype and owner");
    void *address = PyLong_AsVoidPtr(args[0]);
    npy_intp shape[NPY_MAXDIMS];
    Py_ssize_t ndim = PyTuple_Size(args[1]);
    for (Py_ssize_t i = 0; i < ndim && i < NPY_MAXDIMS; i++)
        shape[i] = PyLong_AsSsize_t(PyTuple_GetItem(args[1], i));
    if (PyErr_Occurred())
        return NULL;
    Py_INCREF(args[2]);
    PyArray_Descr *dtype = (PyArray_Descr *)args[2];
    PyObject *array = PyArray_NewFromDescr(&PyArray_Type, dtype, (int)ndim, shape,
                                           NULL, address, NPY_ARRAY_CARRAY, NULL);
    if (array == NULL)
        return NULL;
    Py_INCREF(args[3]);
    if (PyArray_SetBaseObject((PyArrayObject *)array, args[3]) < 0)
        Py_CLEAR(array);
    return array;
}
