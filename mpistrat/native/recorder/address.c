/* The address of the collector, from rank 0 to all in MPI_Init. A rank without the recorder would make
   this hang, so all ranks show first that they have it. */

#define _GNU_SOURCE
#include "recorder.h"
#include "sender.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define JOIN_S 30.0
#define TAG 32001
#define MAGIC 0x6d73776174636831LL

static int finish(long *request, double until_s)
{
    int (*test)(long *, int *, void *) = find_function("PMPI_Test");
    char status[64];
    int flag = 0;
    while (test(request, &flag, status) == 0 && !flag && now_s() < until_s)
        usleep(1000);
    return flag;
}

static void refuse(const char *who)
{
    fprintf(stderr, "mpistrat watch: %s not started with the watch. Start all ranks with it.\n", who);
    _exit(2);
}

void share_address(void)
{
    int (*send)(void *, int, long, int, int, long) = find_function("PMPI_Send");
    int (*receive)(void *, int, long, int, int, long, long *) = find_function("PMPI_Irecv");
    long world = library.comm_world, byte = library.byte;
    if (is_given || world_size < 2)
        return;
    struct address of_all;
    double until_s = now_s() + JOIN_S;
    if (world_rank > 0) {
        long long magic = MAGIC;
        long request = 0;
        send(&magic, 8, byte, 0, TAG, world);
        receive(&of_all, sizeof of_all, byte, 0, TAG, world, &request);
        if (!finish(&request, until_s + 5))
            refuse("rank 0 is");
        memcpy(address.host, of_all.host, sizeof address.host);
        memcpy(address.key, of_all.key, sizeof address.key);
        memcpy(address.port, of_all.port, sizeof address.port); /* last: the thread waits for it */
        return;
    }
    long *all = calloc(world_size, sizeof(long));
    long long *magic = calloc(world_size, 8);
    struct text missing = {0};
    for (int i = 1; i < world_size; i++)
        receive(&magic[i], 8, byte, i, TAG, world, &all[i]);
    for (int i = 1, n = 0; i < world_size; i++)
        if (!finish(&all[i], until_s) && n++ < 20)
            add(&missing, "%s%d", missing.size ? ", " : "ranks ", i);
    if (missing.size > 0) {
        add(&missing, " are");
        refuse(missing.at);
    }
    of_all = address;
    for (int i = 1; i < world_size; i++)
        send(&of_all, sizeof of_all, byte, i, TAG, world);
    free(all), free(magic);
}
