/* Transpose of bytes: HDF5's shuffle filter, which collects the first bytes of all items, then the
   second bytes, and so on; and its inverse. */

#include "native.h"

#include <string.h>

/* Items that are divided at a time: they stay in the first cache. */
#define BLOCK_BYTES 8192

/* The compiler knows the number of columns in each of these loops: it then reads whole vectors, and
   divides them. */
#define SPLIT(COLUMNS)                                                                             \
    static void split_##COLUMNS(const npy_uint8 *restrict from, npy_intp count,                    \
                                npy_uint8 *restrict to, npy_intp distance)                         \
    {                                                                                              \
        for (npy_intp i = 0; i < count; i++)                                                       \
            for (int j = 0; j < COLUMNS; j++)                                                      \
                to[j * distance + i] = from[i * COLUMNS + j];                                      \
    }
SPLIT(2)
SPLIT(4)

/* Write byte j of each of `count` items to `to + j * distance`. */
static void split(const npy_uint8 *from, npy_intp count, npy_intp columns, npy_uint8 *to,
                  npy_intp distance)
{
    if (columns == 1)
        memcpy(to, from, count);
    else if (columns == 2)
        split_2(from, count, to, distance);
    else if (columns == 4)
        split_4(from, count, to, distance);
    else if (columns % 2 == 0 && count * columns <= BLOCK_BYTES) {
        /* First the bytes of even and of odd columns, as items of half the size. */
        npy_uint8 halves[BLOCK_BYTES];
        npy_intp half = columns / 2, size = count * half;
        split_2(from, size, halves, size);
        split(halves, count, half, to, 2 * distance);
        split(halves + size, count, half, to + distance, 2 * distance);
    } else
        for (npy_intp j = 0; j < columns; j++)
            for (npy_intp i = 0; i < count; i++)
                to[j * distance + i] = from[i * columns + j];
}

#define JOIN(ROWS)                                                                                 \
    case ROWS:                                                                                     \
        for (npy_intp j = 0; j < columns; j++)                                                     \
            for (int i = 0; i < ROWS; i++)                                                         \
                to[j * ROWS + i] = from[i * columns + j];                                          \
        return

static void transpose(const npy_uint8 *restrict from, npy_uint8 *restrict to, npy_intp rows,
                      npy_intp columns)
{
    if (rows == 0 || columns == 0)
        return;
    if (columns < rows && columns <= BLOCK_BYTES) {
        npy_intp count = BLOCK_BYTES / columns;
        for (npy_intp i = 0; i < rows; i += count)
            split(from + i * columns, i + count < rows ? count : rows - i, columns, to + i, rows);
        return;
    }
    switch (rows) {
        JOIN(2);
        JOIN(4);
        JOIN(8);
    }
    /* In blocks, so that the lines of both arrays stay in the cache. */
    for (npy_intp i = 0; i < rows; i += 64)
        for (npy_intp j = 0; j < columns; j += 64)
            for (npy_intp a = i; a < rows && a < i + 64; a++)
                for (npy_intp b = j; b < columns && b < j + 64; b++)
                    to[b * rows + a] = from[a * columns + b];
}

/* transpose_bytes(source, target): write the transpose of the 2-d uint8 array `source` to `target`,
   which has as many bytes. Both are contiguous, and not the same memory. Python's lock is
   released. */
PyObject *mpistrat_transpose_bytes(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    if (num_args != 2 || !PyArray_CheckExact(args[0]) || !PyArray_CheckExact(args[1])
        || PyArray_TYPE((PyArrayObject *)args[0]) != NPY_UINT8
        || PyArray_TYPE((PyArrayObject *)args[1]) != NPY_UINT8
        || PyArray_NDIM((PyArrayObject *)args[0]) != 2
        || !PyArray_ISCARRAY_RO((PyArrayObject *)args[0])
        || !PyArray_ISCARRAY((PyArrayObject *)args[1])
        || PyArray_SIZE((PyArrayObject *)args[0]) != PyArray_SIZE((PyArrayObject *)args[1]))
        return PyErr_Format(PyExc_TypeError, "transpose_bytes takes two uint8 arrays of one size");
    const npy_uint8 *from = PyArray_DATA((PyArrayObject *)args[0]);
    npy_uint8 *to = PyArray_DATA((PyArrayObject *)args[1]);
    npy_intp rows = PyArray_DIM((PyArrayObject *)args[0], 0);
    npy_intp columns = PyArray_DIM((PyArrayObject *)args[0], 1);
    Py_BEGIN_ALLOW_THREADS
    transpose(from, to, rows, columns);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
