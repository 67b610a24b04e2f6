/* Recorder of MPI calls: replaces functions of MPI by ones that note the call and go on to it.

   It is compiled without mpi.h, and so serves every library: all arguments of MPI functions are
   integers or pointers, and are passed on as one `long` each (System V x86-64, AAPCS64 of Linux). A
   handle is an `int` in MPICH and its relatives, and a pointer in Open MPI and the ABI of MPI 5. */

#define _GNU_SOURCE
#include "recorder.h"
#include "functions.h"

#include <sys/syscall.h>
#include <unistd.h>

struct thread threads[MAX_THREADS];

/* ---- Threads */

static __thread struct thread *own;
static pthread_key_t end_of_thread;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int has_key;
static struct thread extra; /* for all threads beyond the last record */

static void release(void *thread)
{
    ((struct thread *)thread)->is_used = 0;
}

static struct thread *claim(void)
{
    pthread_mutex_lock(&lock);
    if (!has_key)
        has_key = pthread_key_create(&end_of_thread, release) == 0;
    own = &extra;
    for (int i = 0; i < MAX_THREADS; i++)
        if (!threads[i].is_used) {
            own = &threads[i];
            own->id = syscall(SYS_gettid), own->pthread = pthread_self();
            own->function = NULL, own->depth = 0;
            __atomic_store_n(&own->is_used, 1, __ATOMIC_RELEASE);
            pthread_setspecific(end_of_thread, own);
            break;
        }
    pthread_mutex_unlock(&lock);
    return own;
}

/* ---- Begin and end of a call */

static int space_of(const struct function *f)
{
    if (f->class >= WINCOLL && f->class <= WINANY)
        return WIN;
    return f->class == FILECOLL ? FILES : COMM;
}

static int is_by_address(const struct function *f)
{
    return f->made == 0 && (f->class == FREE || f->class == WINCOLL || f->class == FILECOLL);
}

static long handle_in(const struct function *f, const long *a)
{
    return is_by_address(f) ? handle_at(a[f->comm], 0) : handle_of(a[f->comm]);
}

static long bytes_of(const struct function *f, const long *a)
{
    static int (*size_of)(long, int *);
    static __thread long last_type = -1;
    static __thread int last_size;
    if (f->count < 0 || f->class == SENDRECV)
        return NONE;
    if (a[f->type] != last_type) {
        if (size_of == NULL)
            size_of = find_function("PMPI_Type_size");
        if (size_of(a[f->type], &last_size) != 0)
            return NONE;
        last_type = a[f->type];
    }
    return (f->is_large ? a[f->count] : (long)(int)a[f->count]) * last_size;
}

void note_collective(const struct function *f, struct wait *wait)
{
    struct group *group = wait->group;
    if (group == NULL)
        return;
    long number = __atomic_add_fetch(&group->made, 1, __ATOMIC_RELAXED);
    group->history[number % HISTORY] = (struct made){f, wait->peer, wait->bytes};
    wait->number = number;
}

/* Pready, Pready_range and Pready_list, by the number of arguments before the request. */
static void note_ready(const struct function *f, const long *a)
{
    int n = f->request == 1 ? 1 : f->type < 0 ? (int)a[1] - (int)a[0] + 1 : (int)a[0];
    add_ready(handle_of(a[f->request]), n);
}

#define SAVED 64

/* Notes the call. Returns NULL where the library, or mpistrat itself, calls MPI within a call. */
static inline struct thread *begin(const struct function *f, const long *a, long *saved)
{
    struct thread *t = own != NULL ? own : claim();
    if (t == &extra || t->depth++ > 0)
        return NULL;
    __atomic_store_n(&t->version, t->version + 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    t->function = f;
    t->begun += f->class != POLL;
    t->num_waits = 1;
    struct wait *wait = t->waits;
    wait->function = f, wait->number = 0, wait->is_open = 0;
    wait->group = f->comm < 0 ? NULL : find_group(handle_in(f, a), space_of(f));
    wait->peer = f->peer < 0 ? NONE : (int)a[f->peer];
    wait->tag = f->tag < 0 ? NONE : (int)a[f->tag];
    switch (f->class) {
    case SENDRECV:
        wait->peer2 = (int)a[f->count], wait->tag2 = (int)a[f->type];
        break;
    case COLL: case ICOLL: case MAKE: case WINMAKE: case WINCOLL: case FILEMAKE:
    case FILECOLL: case OUTSIDE:
        wait->bytes = bytes_of(f, a);
        if (f->made != PERSISTENT)
            note_collective(f, wait);
        break;
    case START: {
        long n = f->count < 0 ? 1 : (long)(int)a[f->count];
        for (long i = 0; i < n; i++)
            start_request(handle_at(a[f->request], i));
        break;
    }
    case READY:
        note_ready(f, a);
        break;
    case WAIT: case POLL: {
        if (f->request < 0)
            break;
        long n = f->count < 0 ? 1 : (long)(int)a[f->count];
        t->num_waits = 0;
        for (long i = 0; i < n && i < SAVED; i++) {
            saved[i] = handle_at(a[f->request], i);
            if (saved[i] == library.request_null || t->num_waits == MAX_WAITS || f->class == POLL)
                continue;
            t->num_waits += find_request(saved[i], &t->waits[t->num_waits]);
        }
        if (n > SAVED && f->class == WAIT) { /* not all are known: never a proof of a hang */
            t->num_waits = 1;
            t->waits[0] = (struct wait){0};
        }
        break;
    }
    default:
        break;
    }
    __atomic_store_n(&t->version, t->version + 1, __ATOMIC_RELEASE);
    return t;
}

/* Of requests that are complete, one that is persistent keeps its handle. */
static void end_requests(const struct function *f, const long *a, const long *saved)
{
    long n = f->count < 0 ? 1 : (long)(int)a[f->count];
    int is_all = f->type < 0, is_some = f->type == 3; /* else one, whose index is an argument */
    for (long i = 0; i < n && i < SAVED; i++)
        if (saved[i] != library.request_null) {
            int is_gone = handle_at(a[f->request], i) != saved[i];
            if (is_gone || is_all)
                end_request(saved[i], is_gone);
        }
    if (is_all)
        return;
    const int *indices = (const int *)a[f->type];
    int num_ended = is_some ? *(const int *)a[f->made] : 1;
    for (int i = 0; i < num_ended; i++)
        if (indices[i] >= 0 && indices[i] < n && indices[i] < SAVED)
            end_request(saved[indices[i]], 0);
}

static void end(struct thread *t, const struct function *f, const long *a, const long *saved, int code)
{
    long made;
    int is_poll = 0;
    if (code == 0)
        switch (f->class) {
        case ISEND: case IRECV: case IOTHER: case ICOLL:
            if (f->made >= 0 && t->waits[0].group != NULL)
                add_like(t->waits[0].group, handle_at(a[f->made], 0), COMM);
            add_request(handle_at(a[f->request], 0), &t->waits[0], f->made == PERSISTENT,
                        f->class == ISEND && f->count >= 0 ? (int)a[f->count] : 0);
            break;
        case MAKE: case MAKEGROUP: case OUTSIDE:
            made = f->made < 0 ? library.comm_null : handle_at(a[f->made], 0);
            if (made != library.comm_null)
                add_communicator(made);
            break;
        case WINMAKE: case FILEMAKE:
            if (t->waits[0].group != NULL)
                add_like(t->waits[0].group, handle_at(a[f->made], 0), f->class == WINMAKE ? WIN : FILES);
            break;
        case WAIT: case POLL:
            is_poll = f->class == POLL && *(int *)a[f->made] <= 0;
            if (f->request < 0 || is_poll)
                break;
            end_requests(f, a, saved);
            break;
        default:
            break;
        }
    if (is_poll)
        t->polls++, t->last_poll = f;
    else
        t->done++;
    __atomic_store_n(&t->function, NULL, __ATOMIC_RELEASE);
}

/* The handles of communicators that are freed are used again. */
static void before(const struct function *f, const long *a)
{
    if (is_by_address(f))
        forget_group(handle_in(f, a), space_of(f));
    else if (f->class == FORGET)
        end_request(handle_at(a[f->request], 0), 1);
    else if (f->class == ABORT)
        say_farewell("abort", (int)a[1]);
}

/* ---- The functions */

#define P1 long a0
#define P2 P1, long a1
#define P3 P2, long a2
#define P4 P3, long a3
#define P5 P4, long a4
#define P6 P5, long a5
#define P7 P6, long a6
#define P8 P7, long a7
#define P9 P8, long a8
#define P10 P9, long a9
#define P11 P10, long a10
#define P12 P11, long a11
#define A1 a0
#define A2 A1, a1
#define A3 A2, a2
#define A4 A3, a3
#define A5 A4, a4
#define A6 A5, a5
#define A7 A6, a6
#define A8 A7, a7
#define A9 A8, a8
#define A10 A9, a9
#define A11 A10, a10
#define A12 A11, a11

#define NO_SUCH_FUNCTION 16 /* MPI_ERR_OTHER or its neighbour, by library */

#define FUNCTION(symbol, shown, large, arguments, ...)                                            \
    VISIBLE int MPI_##symbol(P##arguments)                                                        \
    {                                                                                             \
        static int (*real)(P##arguments);                                                         \
        static const struct function f = {"MPI_" #shown, __VA_ARGS__, large};                     \
        if (real == NULL && (real = find_function("PMPI_" #symbol)) == NULL)                      \
            return NO_SUCH_FUNCTION;                                                              \
        long a[] = {A##arguments}, saved[f.class == WAIT || f.class == POLL ? SAVED : 1];                              \
        struct thread *t = begin(&f, a, saved);                                                   \
        before(&f, a);                                                                            \
        int code = real(A##arguments);                                                            \
        if (t != NULL)                                                                            \
            end(t, &f, a, saved, code);                                                           \
        if (own != &extra)                                                                        \
            own->depth--;                                                                         \
        return code;                                                                              \
    }
#define SMALL(name, arguments, ...) FUNCTION(name, name, 0, arguments, __VA_ARGS__)
#define LARGE(name, arguments, ...) FUNCTION(name##_c, name, 1, arguments, __VA_ARGS__)

LARGE_FUNCTIONS(SMALL)
OTHER_FUNCTIONS(SMALL)
#ifdef WITH_MPI_4
LARGE_MPI_4_FUNCTIONS(SMALL)
OTHER_MPI_4_FUNCTIONS(SMALL)
#endif
#ifdef WITH_LARGE_COUNTS
LARGE_FUNCTIONS(LARGE)
LARGE_MPI_4_FUNCTIONS(LARGE)
#endif

static const struct function init = {"MPI_Init", INIT, NONE, NONE, NONE, NONE, NONE, NONE, NONE, 0};

VISIBLE int MPI_Init(long a0, long a1)
{
    int (*real)(long, long) = find_function("PMPI_Init");
    struct thread *t = begin(&init, NULL, NULL);
    int code = real(a0, a1);
    if (code == 0) {
        note_world();
        share_address();
    }
    if (t != NULL)
        end(t, &init, NULL, NULL, code);
    own->depth--;
    return code;
}

VISIBLE int MPI_Init_thread(long a0, long a1, long a2, long a3)
{
    int (*real)(long, long, long, long) = find_function("PMPI_Init_thread");
    struct thread *t = begin(&init, NULL, NULL);
    int code = real(a0, a1, a2, a3);
    if (code == 0) {
        note_world();
        share_address();
    }
    if (t != NULL)
        end(t, &init, NULL, NULL, code);
    own->depth--;
    return code;
}

VISIBLE int MPI_Finalize(void)
{
    static const struct function f = {"MPI_Finalize", FINALIZE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, 0};
    int (*real)(void) = find_function("PMPI_Finalize");
    struct thread *t = begin(&f, NULL, NULL);
    int code = real();
    if (t != NULL)
        end(t, &f, NULL, NULL, code);
    own->depth--;
    say_farewell("finalized", code);
    return code;
}
