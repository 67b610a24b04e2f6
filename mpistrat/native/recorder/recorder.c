/* Recorder of MPI calls: replaces functions of MPI by ones that note the call and go on to it.

   It is compiled without mpi.h, and so serves every library: all arguments of MPI functions are
   integers or pointers, and are passed on as one `long` each (System V x86-64, AAPCS64 of Linux). A
   handle is an `int` in MPICH and its relatives, and a pointer in Open MPI and the ABI of MPI 5. */

#define _GNU_SOURCE
#include "recorder.h"
#include "functions.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

struct library library = {.any_source = -1, .any_tag = -1, .proc_null = -2};
struct thread threads[MAX_THREADS];
int world_rank = NONE, world_size;

/* ---- The MPI library. RTLD_NEXT does not see a library that Python opened, so look for it. */

static char paths[8][4096];
static int num_paths;

static int collect_path(struct dl_phdr_info *info, size_t size, void *unused)
{
    (void)size, (void)unused;
    const char *name = strrchr(info->dlpi_name, '/');
    if (name != NULL && strncmp(name, "/libmpi", 7) == 0 && num_paths < 8)
        snprintf(paths[num_paths++], sizeof paths[0], "%s", info->dlpi_name);
    return 0;
}

static void find_library(void)
{
    num_paths = 0;
    dl_iterate_phdr(collect_path, NULL);
    for (int i = 0; i < num_paths; i++) {
        void *handle = dlopen(paths[i], RTLD_LAZY | RTLD_NOLOAD);
        if (handle == NULL || dlsym(handle, "PMPI_Init") == NULL)
            continue;
        void *world = dlsym(handle, "ompi_mpi_comm_world");
        library.handle = handle;
        if (world != NULL) {
            library.are_pointers = 1;
            library.comm_world = (long)world;
            library.byte = (long)dlsym(handle, "ompi_mpi_byte");
            library.request_null = (long)dlsym(handle, "ompi_request_null");
            library.comm_null = (long)dlsym(handle, "ompi_mpi_comm_null");
        } else if (strstr(paths[i], "libmpi_abi") != NULL) {
            library.are_pointers = 1;
            library.comm_world = 0x101, library.byte = 0x247;
            library.request_null = 0x180, library.comm_null = 0x100;
            library.any_source = -1, library.any_tag = -2, library.proc_null = -3;
        } else {
            library.comm_world = 0x44000000, library.byte = 0x4c00010d;
            library.request_null = 0x2c000000, library.comm_null = 0x04000000;
            library.any_source = -2, library.proc_null = -1;
        }
        library.is_found = 1;
        return;
    }
}

void *find_function(const char *name)
{
    if (!library.is_found)
        find_library();
    return library.is_found ? dlsym(library.handle, name) : NULL;
}

static long handle_of(long value)
{
    return library.are_pointers ? value : (long)(int)value;
}

static long handle_at(long address, long index)
{
    if (address == 0)
        return library.request_null;
    return library.are_pointers ? ((long *)address)[index] : (long)((int *)address)[index];
}

/* ---- Threads */

static __thread struct thread *own;
static pthread_key_t end_of_thread;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct thread extra; /* for all threads beyond the last record */
static pid_t process;

static void release(void *thread)
{
    ((struct thread *)thread)->is_used = 0;
}

static struct thread *claim(void)
{
    pthread_mutex_lock(&lock);
    if (process == 0) {
        process = getpid();
        pthread_key_create(&end_of_thread, release);
    }
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

/* ---- Communicators, windows and files, by their handle */

#define MAX_GROUPS 65536
#define SLOTS 131072
struct group *groups[MAX_GROUPS];
int num_groups;
static struct group *slots[SLOTS];
static struct group gone;
static long world_group;

static unsigned slot_of(long handle, int space)
{
    uint64_t mixed = ((uint64_t)handle + space) * 0x9E3779B97F4A7C15ULL;
    return mixed >> 47; /* 17 bits */
}

static struct group *find_group(long handle, int space)
{
    for (unsigned i = slot_of(handle, space);; i = (i + 1) % SLOTS) {
        struct group *group = slots[i];
        if (group == NULL)
            return NULL;
        if (group->handle == handle && group->space == space && group != &gone)
            return group;
    }
}

static void forget_group(long handle, int space)
{
    pthread_mutex_lock(&lock);
    for (unsigned i = slot_of(handle, space); slots[i] != NULL; i = (i + 1) % SLOTS)
        if (slots[i]->handle == handle && slots[i]->space == space && slots[i] != &gone) {
            slots[i] = &gone;
            break;
        }
    pthread_mutex_unlock(&lock);
}

static int *world_ranks(long comm, int *size, int *num_remote)
{
    int (*test)(long, int *) = find_function("PMPI_Comm_test_inter");
    int (*local)(long, long *) = find_function("PMPI_Comm_group");
    int (*remote)(long, long *) = find_function("PMPI_Comm_remote_group");
    int (*count)(long, int *) = find_function("PMPI_Group_size");
    int (*end)(long *) = find_function("PMPI_Group_free");
    int (*translate)(long, int, int *, long, int *) = find_function("PMPI_Group_translate_ranks");
    int is_inter = 0, *ranks = NULL;
    *size = *num_remote = 0;
    test(comm, &is_inter);
    for (int part = 0; part <= is_inter; part++) {
        long group = 0;
        int n = 0;
        if ((part ? remote : local)(comm, &group) != 0 || count(handle_of(group), &n) != 0)
            break;
        int *numbers = malloc(n * sizeof(int)), *more = realloc(ranks, (*size + n) * sizeof(int));
        for (int i = 0; i < n; i++)
            numbers[i] = i;
        ranks = more;
        translate(handle_of(group), n, numbers, handle_of(world_group), ranks + *size);
        *size += n;
        *num_remote = part ? n : 0;
        free(numbers);
        end(&group);
    }
    return ranks;
}

static int order(const void *a, const void *b)
{
    return (*(int *)a > *(int *)b) - (*(int *)a < *(int *)b);
}

/* A communicator has the same hash and count on all its members, so they can name it. */
static void add_group(long handle, int space, int *ranks, int size, int num_remote)
{
    struct group *group = calloc(1, sizeof *group);
    int *sorted = malloc(size * sizeof(int));
    memcpy(sorted, ranks, size * sizeof(int));
    qsort(sorted, size, sizeof(int), order);
    uint64_t hash = 0xcbf29ce484222325ULL + space + (num_remote ? 7 : 0);
    for (int i = 0; i < size; i++)
        hash = (hash ^ (uint64_t)sorted[i]) * 0x100000001b3ULL;
    free(sorted);
    *group = (struct group){.handle = handle, .space = space, .size = size, .members = hash,
                            .ranks = ranks, .num_remote = num_remote};
    pthread_mutex_lock(&lock);
    for (int i = num_groups - 1; i >= 0; i--)
        if (groups[i]->members == hash) {
            group->count = groups[i]->count + 1;
            break;
        }
    if (num_groups < MAX_GROUPS) { /* those beyond are not known, and never end a job */
        group->id = num_groups;
        groups[num_groups] = group;
        __atomic_store_n(&num_groups, num_groups + 1, __ATOMIC_RELEASE);
        unsigned i = slot_of(handle, space);
        while (slots[i] != NULL && slots[i] != &gone)
            i = (i + 1) % SLOTS;
        __atomic_store_n(&slots[i], group, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&lock);
}

static void add_communicator(long handle)
{
    int size, num_remote, *ranks = world_ranks(handle, &size, &num_remote);
    if (size > 0)
        add_group(handle, COMM, ranks, size, num_remote);
}

static void add_like(const struct group *model, long handle, int space)
{
    int *ranks = malloc(model->size * sizeof(int));
    memcpy(ranks, model->ranks, model->size * sizeof(int));
    add_group(handle, space, ranks, model->size, model->num_remote);
}

/* ---- Requests, by their handle */

#define REQUESTS 16384
#define PROBES 64
static struct { long handle; struct wait wait; } requests[REQUESTS];
static char requests_lock;

static void lock_requests(void)
{
    while (__atomic_test_and_set(&requests_lock, __ATOMIC_ACQUIRE))
        ;
}

static void unlock_requests(void)
{
    __atomic_clear(&requests_lock, __ATOMIC_RELEASE);
}

static unsigned place_of(long handle)
{
    return ((uint64_t)handle * 0x9E3779B97F4A7C15ULL) >> 50; /* 14 bits */
}

static void add_request(long handle, const struct wait *wait)
{
    int free = NONE;
    lock_requests();
    for (int i = 0; i < PROBES; i++) {
        unsigned at = (place_of(handle) + i) % REQUESTS;
        if (requests[at].handle == handle) {
            free = at;
            break;
        }
        if (requests[at].handle == 0 && free == NONE)
            free = at;
    }
    if (free != NONE) {
        requests[free].handle = handle;
        requests[free].wait = *wait;
    }
    unlock_requests();
}

static int take_request(long handle, struct wait *wait, int removes)
{
    int is_found = 0;
    lock_requests();
    for (int i = 0; i < PROBES && !is_found; i++) {
        unsigned at = (place_of(handle) + i) % REQUESTS;
        if (requests[at].handle != handle)
            continue;
        is_found = 1;
        if (wait != NULL)
            *wait = requests[at].wait;
        if (removes)
            requests[at].handle = 0;
    }
    unlock_requests();
    return is_found;
}

int pending_requests(struct wait *found, int most)
{
    int n = 0;
    lock_requests();
    for (int i = 0; i < REQUESTS && n < most; i++)
        if (requests[i].handle != 0)
            found[n++] = requests[i].wait;
    unlock_requests();
    return n;
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

static void note_collective(const struct function *f, const long *a, struct wait *wait)
{
    struct group *group = wait->group;
    if (group == NULL)
        return;
    long number = __atomic_add_fetch(&group->made, 1, __ATOMIC_RELAXED);
    group->history[number % HISTORY] =
        (struct made){f, f->peer < 0 ? NONE : (int)a[f->peer], bytes_of(f, a)};
    wait->number = number;
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
    wait->function = f, wait->number = 0;
    wait->group = f->comm < 0 ? NULL : find_group(handle_in(f, a), space_of(f));
    wait->peer = f->peer < 0 ? NONE : (int)a[f->peer];
    wait->tag = f->tag < 0 ? NONE : (int)a[f->tag];
    switch (f->class) {
    case SENDRECV:
        wait->peer2 = (int)a[f->count], wait->tag2 = (int)a[f->type];
        break;
    case COLL: case ICOLL: case MAKE: case WINMAKE: case WINCOLL: case FILEMAKE:
    case FILECOLL: case OUTSIDE:
        note_collective(f, a, wait);
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
            wait = &t->waits[t->num_waits++];
            if (!take_request(saved[i], wait, 0))
                *wait = (struct wait){0};
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

static void end(struct thread *t, const struct function *f, const long *a, const long *saved, int code)
{
    long made;
    int is_poll = 0;
    if (code == 0)
        switch (f->class) {
        case ISEND: case IRECV: case IOTHER: case ICOLL:
            if (f->made >= 0 && t->waits[0].group != NULL)
                add_like(t->waits[0].group, handle_at(a[f->made], 0), COMM);
            add_request(handle_at(a[f->request], 0), &t->waits[0]);
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
            long n = f->count < 0 ? 1 : (long)(int)a[f->count];
            for (long i = 0; i < n && i < SAVED; i++)
                if (saved[i] != library.request_null && handle_at(a[f->request], i) != saved[i])
                    take_request(saved[i], NULL, 1);
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

#define VISIBLE __attribute__((visibility("default")))
#define NO_SUCH_FUNCTION 16 /* MPI_ERR_OTHER or its neighbour, by library */

#define FUNCTION(symbol, shown, large, arguments, ...)                                            \
    VISIBLE int MPI_##symbol(P##arguments)                                                        \
    {                                                                                             \
        static int (*real)(P##arguments);                                                         \
        static const struct function f = {"MPI_" #shown, __VA_ARGS__, large};                     \
        if (real == NULL && (real = find_function("PMPI_" #symbol)) == NULL)                      \
            return NO_SUCH_FUNCTION;                                                              \
        long a[] = {A##arguments}, saved[f.request < 0 ? 1 : SAVED];                              \
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
#ifdef WITH_LARGE_COUNTS
LARGE_FUNCTIONS(LARGE)
#endif

static void note_world(void)
{
    int (*rank)(long, int *) = find_function("PMPI_Comm_rank");
    int (*size)(long, int *) = find_function("PMPI_Comm_size");
    int (*group)(long, long *) = find_function("PMPI_Comm_group");
    rank(library.comm_world, &world_rank);
    size(library.comm_world, &world_size);
    group(library.comm_world, &world_group);
    add_communicator(library.comm_world);
    share_address();
}

static const struct function init = {"MPI_Init", INIT, NONE, NONE, NONE, NONE, NONE, NONE, NONE, 0};

VISIBLE int MPI_Init(long a0, long a1)
{
    int (*real)(long, long) = find_function("PMPI_Init");
    struct thread *t = begin(&init, NULL, NULL);
    int code = real(a0, a1);
    if (code == 0)
        note_world();
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
    if (code == 0)
        note_world();
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
