/* Requests, by their handle: what each of them waits for. */

#include "recorder.h"

#define REQUESTS 16384
#define PROBES 64

static struct request requests[REQUESTS];
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

/* Returns the entry of a handle, or one for it if it `is_new`. The lock must be held. */
static struct request *entry_of(long handle, int is_new)
{
    struct request *free = NULL;
    for (int i = 0; i < PROBES; i++) {
        struct request *each = &requests[(place_of(handle) + i) % REQUESTS];
        if (each->handle == handle)
            return each;
        if (each->handle == 0 && free == NULL)
            free = each;
    }
    return is_new ? free : NULL;
}

/* Notes a request. One that is persistent waits for nothing before it is started. */
void add_request(long handle, const struct wait *wait, int is_persistent, int partitions)
{
    lock_requests();
    struct request *entry = entry_of(handle, 1);
    if (entry != NULL)
        *entry = (struct request){handle, *wait, is_persistent, !is_persistent, partitions, 0};
    unlock_requests();
}

/* Copies what a request waits for; `function` is NULL if that is not known. Returns 0 if it waits for
   nothing, because it is persistent and not started. */
int find_request(long handle, struct wait *wait)
{
    lock_requests();
    struct request *entry = entry_of(handle, 0);
    *wait = entry == NULL ? (struct wait){0} : entry->wait;
    if (entry != NULL)
        wait->is_open = entry->ready < entry->partitions;
    int waits = entry == NULL || entry->is_active;
    unlock_requests();
    return waits;
}

void start_request(long handle)
{
    struct wait wait = {0};
    lock_requests();
    struct request *entry = entry_of(handle, 0);
    if (entry != NULL)
        wait = entry->wait;
    unlock_requests();
    if (entry == NULL)
        return;
    if (wait.function->class == ICOLL) /* its number is that of its start */
        note_collective(wait.function, &wait);
    lock_requests();
    if ((entry = entry_of(handle, 0)) != NULL) {
        entry->wait.number = wait.number;
        entry->is_active = 1, entry->ready = 0;
    }
    unlock_requests();
}

/* Notes that a request is complete, or that it is freed. */
void end_request(long handle, int is_gone)
{
    lock_requests();
    struct request *entry = entry_of(handle, 0);
    if (entry != NULL && (is_gone || entry->is_persistent)) {
        entry->is_active = 0;
        if (is_gone)
            entry->handle = 0;
    }
    unlock_requests();
}

/* Notes that the program has filled some partitions of a partitioned send. */
void add_ready(long handle, int num_partitions)
{
    lock_requests();
    struct request *entry = entry_of(handle, 0);
    if (entry != NULL)
        entry->ready += num_partitions;
    unlock_requests();
}

int pending_requests(struct wait *found, int most)
{
    int n = 0;
    lock_requests();
    for (int i = 0; i < REQUESTS && n < most; i++)
        if (requests[i].handle != 0 && requests[i].is_active) {
            found[n] = requests[i].wait;
            found[n++].is_open = requests[i].ready < requests[i].partitions;
        }
    unlock_requests();
    return n;
}
