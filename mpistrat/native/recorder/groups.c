/* Communicators, windows and files, by their handle. */

#include "recorder.h"

#include <stdlib.h>
#include <string.h>

#define MAX_GROUPS 65536
#define SLOTS 131072
struct group *groups[MAX_GROUPS];
int num_groups;
static struct group *slots[SLOTS];
int world_rank = NONE, world_size;
static long world_group;
static struct group gone;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;


static unsigned slot_of(long handle, int space)
{
    uint64_t mixed = ((uint64_t)handle + space) * 0x9E3779B97F4A7C15ULL;
    return mixed >> 47; /* 17 bits */
}

struct group *find_group(long handle, int space)
{
    for (unsigned i = slot_of(handle, space);; i = (i + 1) % SLOTS) {
        struct group *group = slots[i];
        if (group == NULL)
            return NULL;
        if (group->handle == handle && group->space == space && group != &gone)
            return group;
    }
}

void forget_group(long handle, int space)
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

void add_communicator(long handle)
{
    int size, num_remote, *ranks = world_ranks(handle, &size, &num_remote);
    if (size > 0)
        add_group(handle, COMM, ranks, size, num_remote);
}

void add_like(const struct group *model, long handle, int space)
{
    int *ranks = malloc(model->size * sizeof(int));
    memcpy(ranks, model->ranks, model->size * sizeof(int));
    add_group(handle, space, ranks, model->size, model->num_remote);
}

void note_world(void)
{
    int (*rank)(long, int *) = find_function("PMPI_Comm_rank");
    int (*size)(long, int *) = find_function("PMPI_Comm_size");
    int (*group)(long, long *) = find_function("PMPI_Comm_group");
    rank(library.comm_world, &world_rank);
    size(library.comm_world, &world_size);
    group(library.comm_world, &world_group);
    add_communicator(library.comm_world);
}
