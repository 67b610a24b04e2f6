/* Mapped files, whose chunks are decoded to their places in a window, without Python's lock.

   If a mapped file becomes shorter, or a disk fails, touching the memory raises SIGBUS. Here that
   ends the work, but not the job. */

#include "native.h"

#include <fcntl.h>
#include <limits.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

static struct sigaction handler_before;
_Thread_local sigjmp_buf *volatile mpistrat_way_out;

static void on_bus_error(int number)
{
    if (mpistrat_way_out != NULL)
        siglongjmp(*mpistrat_way_out, 1);
    /* Not from this module: the instruction runs again, under the previous handler. */
    sigaction(number, &handler_before, NULL);
}

/* Handlers belong to the process, and other modules may set theirs at any time. */
int mpistrat_guard(void)
{
    struct sigaction found, ours = {0};
    if (sigaction(SIGBUS, NULL, &found) != 0)
        return -1;
    if (!(found.sa_flags & SA_SIGINFO) && found.sa_handler == on_bus_error)
        return 0;
    handler_before = found;
    ours.sa_handler = on_bus_error;
    ours.sa_flags = SA_NODEFER | SA_ONSTACK;
    return sigaction(SIGBUS, &ours, NULL);
}

typedef int lz4_function(const char *from, char *to, int size, int room);
typedef size_t zstd_function(void *to, size_t room, const void *from, size_t size);

static npy_uint64 big_endian(const unsigned char *bytes, int count)
{
    npy_uint64 number = 0;
    while (count-- > 0)
        number = number << 8 | *bytes++;
    return number;
}

/* A chunk of HDF5's filter for LZ4: its size (8 bytes) and its block size (4), then the blocks,
   each preceded by its own size (4). A block that LZ4 could not shorten is stored unchanged. */
static int decode_lz4(lz4_function *decompress, char *to, npy_uint64 room, const char *from,
                      npy_uint64 size)
{
    const unsigned char *header = (const unsigned char *)from;
    if (size < 12 || big_endian(header, 8) != room)
        return -1;
    npy_uint64 block = big_endian(header + 8, 4), position = 12;
    for (npy_uint64 filled = 0; filled < room; filled += block) {
        npy_uint64 length = block < room - filled ? block : room - filled;
        if (length == 0 || length > INT_MAX || position + 4 > size)
            return -1;
        npy_uint64 stored = big_endian(header + position, 4);
        position += 4;
        if (stored > INT_MAX || stored > size - position)
            return -1;
        if (stored == length)
            memcpy(to + filled, from + position, length);
        else if (decompress(from + position, to + filled, stored, length) != (int)length)
            return -1;
        position += stored;
    }
    return 0;
}

struct chunk {
    npy_int64 offset, size, filter_mask;
};

/* Returns how many chunks were decoded before the first one that cannot be. */
static npy_intp decode_all(char is_lz4, void *function, const char *from, const struct chunk *chunks,
                           char **targets, npy_intp num_bytes, npy_intp count)
{
    volatile npy_intp done = 0;
    sigjmp_buf here;
    if (sigsetjmp(here, 0)) {
        mpistrat_way_out = NULL;
        return done;
    }
    mpistrat_way_out = &here;
    for (; done < count; done++) {
        const struct chunk *chunk = &chunks[done];
        const char *stored = from + chunk->offset;
        char *to = targets[done];
        if (chunk->filter_mask & 1) { /* the filter was skipped */
            if (chunk->size != num_bytes)
                break;
            memcpy(to, stored, num_bytes);
        } else if (is_lz4) {
            if (decode_lz4((lz4_function *)function, to, num_bytes, stored, chunk->size) != 0)
                break;
        } else {
            zstd_function *decompress = (zstd_function *)function;
            if (decompress(to, num_bytes, stored, chunk->size) != (size_t)num_bytes)
                break;
        }
    }
    mpistrat_way_out = NULL;
    return done;
}

/* decode_chunks(codec, function, mapped, chunks, targets): fill each array of the list `targets`
   with a chunk of `mapped`, whose offset, size and filter mask `chunks` has as int64. `codec` is
   "lz4" or "zstd", and `function` is the address of the decoder. Returns how many were filled
   before the first chunk that is damaged, or beyond the end of a file that became shorter. */
PyObject *mpistrat_decode_chunks(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    if (num_args != 5 || !PyUnicode_Check(args[0]) || !PyArray_CheckExact(args[2])
        || !PyArray_ISCARRAY_RO((PyArrayObject *)args[2]) || !PyArray_CheckExact(args[3])
        || PyArray_TYPE((PyArrayObject *)args[3]) != NPY_INT64
        || !PyArray_ISCARRAY_RO((PyArrayObject *)args[3]) || !PyList_Check(args[4])
        || PyArray_SIZE((PyArrayObject *)args[3]) != 3 * PyList_Size(args[4]))
        return PyErr_Format(PyExc_TypeError,
                            "decode_chunks takes a codec, bytes, three int64 for each target");
    npy_intp count = PyList_Size(args[4]), num_bytes = 0, num_inside = 0;
    npy_int64 end = PyArray_NBYTES((PyArrayObject *)args[2]);
    const struct chunk *chunks = PyArray_DATA((PyArrayObject *)args[3]);
    void *function = PyLong_AsVoidPtr(args[1]);
    if (function == NULL || count == 0)
        return PyErr_Occurred() ? NULL : PyLong_FromLong(0);
    char **targets = malloc(count * sizeof *targets);
    if (targets == NULL)
        return PyErr_NoMemory();
    for (npy_intp i = 0; i < count; i++) {
        PyArrayObject *target = (PyArrayObject *)PyList_GetItem(args[4], i);
        if (!PyArray_CheckExact((PyObject *)target) || !PyArray_ISCARRAY(target)
            || (i > 0 && PyArray_NBYTES(target) != num_bytes)) {
            free(targets);
            return PyErr_Format(PyExc_TypeError, "decode_chunks: targets are arrays of one size");
        }
        targets[i] = PyArray_BYTES(target);
        num_bytes = PyArray_NBYTES(target);
    }
    while (num_inside < count && chunks[num_inside].offset >= 0 && chunks[num_inside].size >= 0
           && chunks[num_inside].offset <= end
           && chunks[num_inside].size <= end - chunks[num_inside].offset)
        num_inside++;
    char is_lz4 = PyUnicode_CompareWithASCIIString(args[0], "lz4") == 0;
    if (mpistrat_guard() != 0) {
        free(targets);
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    npy_intp done;
    Py_BEGIN_ALLOW_THREADS
    done = decode_all(is_lz4, function, PyArray_BYTES((PyArrayObject *)args[2]), chunks, targets,
                      num_bytes, num_inside);
    Py_END_ALLOW_THREADS
    free(targets);
    return PyLong_FromSsize_t(done);
}

#ifdef RWF_NOWAIT
static int is_in_memory(int descriptor, npy_int64 offset)
{
    char byte;
    struct iovec to = {&byte, 1};
    return preadv2(descriptor, &to, 1, offset, RWF_NOWAIT) == 1;
}
#else
static int is_in_memory(int descriptor, npy_int64 offset)
{
    (void)descriptor, (void)offset;
    return 0;
}
#endif

/* ask_for(descriptor, offsets, num_bytes): let the system begin to read this many bytes of a file
   from each of `offsets` on. Where the last page of a block is in memory, its others are in all
   likelihood too: the system reads ahead from front to back. To look for each page takes four times
   as long. A page that the next block shares may have come with that one, so it does not count. */
PyObject *mpistrat_ask_for(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    if (num_args != 3 || !mpistrat_is_int64(args[1]))
        return PyErr_Format(PyExc_TypeError, "ask_for takes a descriptor, int64 offsets, a number");
    int descriptor = (int)PyLong_AsLong(args[0]);
    long num_bytes = PyLong_AsLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    const npy_int64 *offsets = PyArray_DATA((PyArrayObject *)args[1]);
    npy_intp count = PyArray_SIZE((PyArrayObject *)args[1]);
    npy_int64 page = sysconf(_SC_PAGESIZE);
    Py_BEGIN_ALLOW_THREADS
    for (npy_intp i = 0; i < count; i++) {
        npy_int64 end = (offsets[i] + num_bytes) / page * page; /* of the pages that it fills */
        if (end - page < offsets[i] || !is_in_memory(descriptor, end - 1))
            posix_fadvise(descriptor, offsets[i], num_bytes, POSIX_FADV_WILLNEED);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static void unmap(PyObject *capsule)
{
    size_t *length = PyCapsule_GetContext(capsule);
    munmap(PyCapsule_GetPointer(capsule, NULL), *length);
    free(length);
}

/* map_file(descriptor, num_bytes): the bytes of a file as a read-only array, which needs no open
   descriptor. Only copy_rows may read it: other code would be ended by the signal. */
PyObject *mpistrat_map_file(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    if (num_args != 2)
        return PyErr_Format(PyExc_TypeError, "map_file takes a descriptor and a number of bytes");
    int descriptor = (int)PyLong_AsLong(args[0]);
    npy_intp num_bytes = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred())
        return NULL;
    void *memory = mmap(NULL, num_bytes, PROT_READ, MAP_SHARED, descriptor, 0);
    if (memory == MAP_FAILED)
        return PyErr_SetFromErrno(PyExc_OSError);
    size_t *length = malloc(sizeof *length);
    PyObject *owner = length == NULL ? NULL : PyCapsule_New(memory, NULL, NULL);
    if (owner == NULL) {
        free(length);
        munmap(memory, num_bytes);
        return length == NULL ? PyErr_NoMemory() : NULL;
    }
    *length = num_bytes;
    PyCapsule_SetContext(owner, length);
    PyCapsule_SetDestructor(owner, unmap);
    PyObject *array = PyArray_New(&PyArray_Type, 1, &num_bytes, NPY_UINT8, NULL, memory, 0,
                                  NPY_ARRAY_CARRAY_RO, NULL);
    if (array == NULL || PyArray_SetBaseObject((PyArrayObject *)array, owner) < 0) {
        if (array == NULL)
            Py_DECREF(owner);
        Py_CLEAR(array);
    }
    return array;
}
