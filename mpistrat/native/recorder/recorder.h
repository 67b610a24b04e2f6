/* What the files of the recorder share: records of threads, communicators and requests. */

#ifndef MPISTRAT_RECORDER_H
#define MPISTRAT_RECORDER_H

#include <pthread.h>
#include <stdint.h>

#define MAX_THREADS 64
#define MAX_WAITS 8
#define HISTORY 32
#define VISIBLE __attribute__((visibility("default")))
#define NONE (-1)
#define PERSISTENT (-2)

enum class_of_function {
    SEND, RECV, SENDRECV, LOCAL, POLL, ISEND, IRECV, IOTHER, WAIT, COLL, ICOLL, MAKE, MAKEGROUP,
    FREE, OUTSIDE, WINMAKE, WINCOLL, WINGROUP, WINANY, FILEMAKE, FILECOLL, ABORT, FINALIZE, INIT,
    START, FORGET, READY
};

/* Handles of different kinds may have the same number. */
enum space { COMM, WIN, FILES };

struct function {
    const char *name;
    int class, comm, peer, tag, count, type, request, made, is_large;
};

/* One collective of a communicator. */
struct made {
    const struct function *function;
    int root;
    long bytes;
};

/* Communicator, window or file. It is never freed, because another thread may be reading it. */
struct group {
    long handle;
    int space, id, size, num_remote;
    uint64_t members;  /* hash of the world ranks of all members */
    int count;         /* number of earlier ones with the same members */
    int *ranks;        /* world ranks: of the local group, then of the remote one */
    long made;         /* number of collectives so far */
    struct made history[HISTORY];
};

/* What a call or a request waits for. */
struct wait {
    const struct function *function; /* NULL: not known */
    struct group *group;
    long number;     /* of the collective, or 0 */
    int peer, tag;   /* as the program passes them */
    int peer2, tag2; /* of the message to receive, in a sendrecv */
    int is_open;     /* a partitioned send whose partitions are not all ready */
    long bytes;      /* of a collective, or NONE */
};

struct thread {
    int is_used;
    long id;
    pthread_t pthread;
    uint32_t version; /* odd while the owner writes */
    int depth;
    const struct function *function; /* NULL: outside MPI */
    int num_waits;
    struct wait waits[MAX_WAITS];
    uint64_t begun, done; /* calls that have begun, and those that are over, without polls */
    uint64_t polls;       /* without success */
    const struct function *last_poll;
};

struct request {
    long handle;
    struct wait wait;
    int is_persistent, is_active, partitions, ready;
};

struct library {
    int is_found, are_pointers;
    void *handle;
    long comm_world, byte, request_null, comm_null;
    int any_source, any_tag, proc_null;
};

extern struct library library;
extern struct thread threads[MAX_THREADS];
extern struct group *groups[];
extern int num_groups;
extern int world_rank, world_size;

static inline long handle_of(long value)
{
    return library.are_pointers ? value : (long)(int)value;
}

static inline long handle_at(long address, long index)
{
    if (address == 0)
        return library.request_null;
    return library.are_pointers ? ((long *)address)[index] : (long)((int *)address)[index];
}

void *find_function(const char *name);

struct group *find_group(long handle, int space);
void add_communicator(long handle);
void add_like(const struct group *model, long handle, int space);
void forget_group(long handle, int space);
void note_world(void);

void add_request(long handle, const struct wait *wait, int is_persistent, int partitions);
int find_request(long handle, struct wait *wait);
void start_request(long handle);
void end_request(long handle, int is_gone);
void add_ready(long handle, int num_partitions);
int pending_requests(struct wait *found, int most);

void note_collective(const struct function *f, struct wait *wait);
void share_address(void);
void say_farewell(const char *word, int code);

#endif
