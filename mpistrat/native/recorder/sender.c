/* Sender of the recorder: a thread that tells the collector what this rank is doing.

   It runs without Python, so it can speak where a thread holds Python's lock inside MPI. The lines
   come from the sampler, which is a Python thread; where that is late, from the file to which
   faulthandler has written the stacks. Nothing is sent as long as nothing changes. */

#define _GNU_SOURCE
#include "recorder.h"

#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define VISIBLE __attribute__((visibility("default")))
#define TICK_MS 250
#define STANDS_TICKS 4
#define LATE_S 1.2
#define JOIN_S 30.0
#define MAX_SHOWN_GROUPS 256
#define MAX_PENDING 64

static char host[256], port[16], key[128];
static int rank_of_launcher = NONE, dump_file = NONE, is_given, is_last_note, has_left;
static int connection = NONE;
static pid_t owner;
static pthread_mutex_t socket_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t note_lock = PTHREAD_MUTEX_INITIALIZER;
static char *note;
static double noted_s;
static clockid_t main_clock;

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

/* ---- Text */

struct text { char *at; size_t size, room; };

static void add(struct text *text, const char *format, ...)
{
    va_list list;
    for (;;) {
        size_t left = text->room - text->size;
        va_start(list, format);
        int n = vsnprintf(text->at == NULL ? NULL : text->at + text->size, left, format, list);
        va_end(list);
        if (n < 0)
            return;
        if ((size_t)n < left) {
            text->size += n;
            return;
        }
        char *more = realloc(text->at, text->room = 2 * text->room + n + 256);
        if (more == NULL)
            return;
        text->at = more;
    }
}

static void add_string(struct text *text, const char *string, size_t size)
{
    add(text, "\"");
    for (size_t i = 0; i < size; i++) {
        unsigned char c = string[i];
        if (c == '"' || c == '\\' || c < 32)
            add(text, "\\u%04x", c);
        else
            add(text, "%c", c);
    }
    add(text, "\"");
}

/* Sends text if it differs from what was sent last. */
static void send_changed(struct text *text, struct text *last)
{
    if (text->size == last->size && memcmp(text->at, last->at, text->size) == 0)
        return;
    pthread_mutex_lock(&socket_lock);
    size_t sent = 0;
    while (connection != NONE && sent < text->size) {
        ssize_t n = send(connection, text->at + sent, text->size - sent, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            close(connection);
            connection = NONE;
        }
        sent += n > 0 ? n : 0;
    }
    pthread_mutex_unlock(&socket_lock);
    struct text old = *last;
    *last = *text;
    *text = old;
}

/* ---- What this rank is doing */

static char is_announced[65536];

static void announce(const struct group *group)
{
    if (group == NULL || is_announced[group->id])
        return;
    is_announced[group->id] = 1;
    struct text text = {0}, nothing = {0};
    add(&text, "{\"group\": %d, \"key\": \"%llx.%d\", \"space\": %d, \"ranks\": [", group->id,
        (unsigned long long)group->members, group->count, group->space);
    for (int i = 0, end; i < group->size; i = end) {
        for (end = i + 1; end < group->size && group->ranks[end] == group->ranks[end - 1] + 1; end++)
            ;
        add(&text, "%s[%d, %d]", i ? ", " : "", group->ranks[i], group->ranks[end - 1]);
    }
    add(&text, "]}\n");
    send_changed(&text, &nothing);
    free(text.at), free(nothing.at);
}

static int world_rank_of(const struct group *group, int peer)
{
    if (peer == library.any_source)
        return -1;
    if (peer == library.proc_null || group == NULL)
        return -2;
    peer += group->num_remote ? group->size - group->num_remote : 0;
    return peer >= 0 && peer < group->size ? group->ranks[peer] : -2;
}

static int tag_of(int tag)
{
    return tag == library.any_tag ? -1 : tag;
}

static void add_wait(struct text *text, const struct wait *wait)
{
    const struct function *f = wait->function;
    if (f == NULL) {
        add(text, "null");
        return;
    }
    announce(wait->group);
    add(text, "{\"f\": \"%s\", \"c\": %d, \"g\": %d", f->name, f->class,
        wait->group == NULL ? NONE : wait->group->id);
    if (wait->number)
        add(text, ", \"n\": %ld", wait->number);
    if (f->class <= SENDRECV || f->class == ISEND || f->class == IRECV)
        add(text, ", \"p\": %d, \"t\": %d, \"shown\": %d", world_rank_of(wait->group, wait->peer),
            tag_of(wait->tag), wait->peer);
    else if (f->peer >= 0)
        add(text, ", \"root\": %d", wait->peer);
    if (f->class == SENDRECV)
        add(text, ", \"p2\": %d, \"t2\": %d", world_rank_of(wait->group, wait->peer2),
            tag_of(wait->tag2));
    add(text, "}");
}

/* Copies the record of a thread while its owner does not write. */
static int copy_thread(const struct thread *from, struct thread *to)
{
    for (int i = 0; i < 100; i++) {
        uint32_t version = __atomic_load_n(&from->version, __ATOMIC_ACQUIRE);
        memcpy(to, from, sizeof *to);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (version % 2 == 0 && version == __atomic_load_n(&from->version, __ATOMIC_RELAXED))
            return 1;
    }
    return 0;
}

static uint64_t num_done(void)
{
    uint64_t done = 0;
    for (int i = 0; i < MAX_THREADS; i++)
        done += threads[i].done;
    return done;
}

/* Shows which state a history belongs to. */
static uint64_t num_begun(void)
{
    uint64_t begun = 0;
    for (int i = 0; i < MAX_THREADS; i++)
        begun += threads[i].begun;
    return begun + num_done();
}

static void describe_calls(struct text *text)
{
    static uint64_t polls[MAX_THREADS];
    static int polled[MAX_THREADS]; /* ticks in which a thread is still shown as polling */
    const char *comma = "";
    add(text, "\"calls\": [");
    for (int i = 0; i < MAX_THREADS; i++) {
        struct thread t;
        if (!threads[i].is_used || !copy_thread(&threads[i], &t))
            continue;
        if (t.polls != polls[i])
            polled[i] = 2 * STANDS_TICKS;
        else if (polled[i] > 0)
            polled[i]--;
        polls[i] = t.polls;
        int is_in_poll = t.function != NULL && t.function->class == POLL;
        if (t.function == NULL || is_in_poll) {
            if (polled[i] > 0 && t.last_poll != NULL) {
                add(text, "%s{\"tid\": %ld, \"poll\": \"%s\"}", comma, t.id, t.last_poll->name);
                comma = ", ";
            }
            continue;
        }
        add(text, "%s{\"tid\": %ld, \"f\": \"%s\", \"c\": %d, \"waits\": [", comma, t.id,
            t.function->name, t.function->class);
        for (int j = 0; j < t.num_waits; j++) {
            add(text, j ? ", " : "");
            add_wait(text, &t.waits[j]);
        }
        add(text, "]}");
        comma = ", ";
    }
    add(text, "]");
}

/* The line of the innermost frame of the program's own files in a dump of the main thread, which is
   the last one. */
static void add_source(struct text *text, char *dump)
{
    char *start = dump, *next, path[4096], line[512];
    int number;
    while ((next = strstr(start, "most recent call first")) != NULL)
        start = next + 1;
    for (char *at = start; (at = strstr(at, "  File \"")) != NULL; at++) {
        if (sscanf(at, "  File \"%4095[^\"]\", line %d", path, &number) != 2)
            continue;
        if (strstr(path, "-packages/") || strstr(path, "/lib/python3") || path[0] == '<')
            continue;
        FILE *file = fopen(path, "re");
        while (file != NULL && number > 0 && fgets(line, sizeof line, file))
            number -= strchr(line, '\n') != NULL;
        if (file != NULL && number == 0) {
            add(text, ", \"source\": ");
            add_string(text, line, strcspn(line, "\n"));
        }
        if (file != NULL)
            fclose(file);
        return;
    }
}

static void describe(struct text *text)
{
    text->size = 0;
    add(text, "{\"state\": {\"rank\": %d, \"size\": %d, \"done\": %llu, \"v\": %llu, ", world_rank,
        world_size, (unsigned long long)num_done(), (unsigned long long)num_begun());
    describe_calls(text);
    pthread_mutex_lock(&note_lock);
    int is_late = now_s() - noted_s > LATE_S && !is_last_note;
    add(text, ", \"lines\": %s", note == NULL ? "null" : note);
    pthread_mutex_unlock(&note_lock);
    if (is_late && dump_file != NONE) {
        static char dump[32768];
        ssize_t n = pread(dump_file, dump, sizeof dump - 1, 0);
        dump[n > 0 ? n : 0] = 0;
        add(text, ", \"dump\": ");
        add_string(text, dump, n > 0 ? n : 0);
        add_source(text, dump);
    }
    add(text, "}}\n");
}

static int tracer(void)
{
    char line[256];
    int pid = 0;
    FILE *file = fopen("/proc/self/status", "re");
    while (file != NULL && fgets(line, sizeof line, file))
        if (sscanf(line, "TracerPid: %d", &pid) == 1)
            break;
    if (file != NULL)
        fclose(file);
    return pid;
}

static void describe_history(struct text *text, int is_computing)
{
    static struct wait pending[MAX_PENDING];
    text->size = 0;
    add(text, "{\"history\": {\"v\": %llu, \"computes\": %d, \"tracer\": %d, \"made\": [",
        (unsigned long long)num_begun(), is_computing, tracer());
    const char *comma = "";
    int n = __atomic_load_n(&num_groups, __ATOMIC_ACQUIRE), num_shown = 0;
    for (int i = n - 1; i >= 0 && num_shown < MAX_SHOWN_GROUPS; i--) {
        struct group *group = groups[i];
        if (group->size < 2 || group->made == 0)
            continue;
        announce(group);
        num_shown++;
        add(text, "%s[%d, %ld, [", comma, i, group->made);
        long first = group->made > HISTORY ? group->made - HISTORY + 1 : 1;
        for (long number = first; number <= group->made; number++) {
            struct made *made = &group->history[number % HISTORY];
            add(text, "%s[\"%s\", %d, %ld]", number == first ? "" : ", ", made->function->name,
                made->root, made->bytes);
        }
        add(text, "]]");
        comma = ", ";
    }
    add(text, "], \"pending\": [");
    n = pending_requests(pending, MAX_PENDING);
    for (int i = 0; i < n; i++) {
        add(text, i ? ", " : "");
        add_wait(text, &pending[i]);
    }
    add(text, "]}}\n");
}

/* ---- The connection */

static int open_connection(void)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM}, *found = NULL;
    char name[256];
    /* A collector on this machine may listen on the loopback interface alone. */
    int is_here = gethostname(name, sizeof name) == 0 && strcmp(name, host) == 0;
    if (getaddrinfo(is_here ? "127.0.0.1" : host, port, &hints, &found) != 0)
        return NONE;
    int open = NONE;
    for (struct addrinfo *each = found; each != NULL && open == NONE; each = each->ai_next) {
        open = socket(each->ai_family, each->ai_socktype | SOCK_CLOEXEC, each->ai_protocol);
        struct timeval limit = {5, 0};
        if (open != NONE)
            setsockopt(open, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
        if (open != NONE && connect(open, each->ai_addr, each->ai_addrlen) != 0) {
            close(open);
            open = NONE;
        }
    }
    freeaddrinfo(found);
    return open;
}

static void say(const char *format, ...)
{
    struct text text = {0}, nothing = {0};
    char line[512];
    va_list list;
    va_start(list, format);
    vsnprintf(line, sizeof line, format, list);
    va_end(list);
    add(&text, "%s\n", line);
    send_changed(&text, &nothing);
    free(text.at), free(nothing.at);
}

/* Python may have ended where this is called, and the process ends at once. */
void say_farewell(const char *word, int code)
{
    if (owner != getpid() || __atomic_exchange_n(&has_left, 1, __ATOMIC_RELAXED))
        return;
    say("{\"left\": \"%s\", \"code\": %d}", word, code);
}

static void *exit_later(void *code)
{
    usleep(1000000);
    _exit((int)(intptr_t)code);
}

/* Only MPI_Abort gives a launcher the exit code for sure: of ranks that exit, one kills the others.
   It may wait for a lock of the thread that hangs. */
static void abort_job(int code)
{
    int (*abort_all)(long, int) = find_function("PMPI_Abort");
    pthread_t thread;
    if (pthread_create(&thread, NULL, exit_later, (void *)(intptr_t)code) != 0 || abort_all == NULL)
        _exit(code);
    abort_all(library.comm_world, code);
}

static void obey(void)
{
    static char order[256];
    struct pollfd wanted = {connection, POLLIN, 0};
    if (connection == NONE) {
        usleep(TICK_MS * 1000);
        return;
    }
    if (poll(&wanted, 1, TICK_MS) <= 0)
        return;
    ssize_t n = recv(connection, order, sizeof order - 1, MSG_DONTWAIT);
    if (n <= 0) { /* the collector has ended, and nobody watches any more */
        pthread_mutex_lock(&socket_lock);
        if (n == 0) {
            close(connection);
            connection = NONE;
        }
        pthread_mutex_unlock(&socket_lock);
        return;
    }
    order[n] = 0;
    int code;
    if (sscanf(order, "end %d", &code) == 1)
        _exit(code);
    if (sscanf(order, "abort %d", &code) == 1)
        abort_job(code);
    if (strncmp(order, "ping", 4) == 0)
        say("{\"pong\": 1}");
}

static void *work(void *unused)
{
    (void)unused;
    struct text text = {0}, state = {0}, history = {0};
    uint64_t done = 0;
    int stands = 0;
    struct timespec cpu = {0}, before = {0};
    for (;;) {
        if (connection == NONE && port[0] != 0) {
            connection = open_connection();
            if (connection == NONE)
                return NULL; /* the program must not suffer */
            char own[256] = "";
            gethostname(own, sizeof own - 1);
            say("{\"key\": \"%s\", \"pid\": %d, \"rank\": %d, \"host\": \"%s\"}", key, (int)owner,
                rank_of_launcher, own);
        }
        int was_open = connection != NONE; /* the port may come at any moment */
        obey();
        if (connection == NONE && was_open)
            return NULL;
        if (connection == NONE)
            continue;
        stands = num_done() == done ? stands + 1 : 0;
        done = num_done();
        describe(&text);
        send_changed(&text, &state);
        if (stands < STANDS_TICKS)
            continue;
        if (stands % STANDS_TICKS == 0) {
            before = cpu;
            clock_gettime(main_clock, &cpu);
        }
        double used = cpu.tv_sec - before.tv_sec + (cpu.tv_nsec - before.tv_nsec) * 1e-9;
        describe_history(&text, used > 0.05);
        send_changed(&text, &history);
    }
}

static void forget(void)
{
    if (connection != NONE)
        close(connection);
    connection = NONE;
}

/* Called by Python's main thread. Without a port, MPI_Init brings the address from rank 0. */
VISIBLE int recorder_start(const char *of_host, const char *of_port, const char *of_key, int rank,
                           int dumps_to)
{
    pthread_t thread;
    snprintf(host, sizeof host, "%s", of_host);
    snprintf(key, sizeof key, "%s", of_key);
    snprintf(port, sizeof port, "%s", of_port);
    rank_of_launcher = rank, dump_file = dumps_to, owner = getpid();
    noted_s = now_s();
    pthread_getcpuclockid(pthread_self(), &main_clock);
    pthread_atfork(NULL, NULL, forget);
    sigset_t all, mask;
    sigfillset(&all); /* signals are for the threads of the program */
    pthread_sigmask(SIG_SETMASK, &all, &mask);
    int code = pthread_create(&thread, NULL, work, NULL);
    pthread_sigmask(SIG_SETMASK, &mask, NULL);
    if (code == 0)
        pthread_detach(thread);
    return code;
}

VISIBLE void recorder_shares_address(int does)
{
    is_given = !does;
}

/* What the sampler has seen, as JSON. After the last note, Python runs no more. */
VISIBLE void recorder_note(const char *json, int is_last)
{
    char *copy = strdup(json);
    pthread_mutex_lock(&note_lock);
    char *old = note;
    note = copy, noted_s = now_s(), is_last_note = is_last;
    pthread_mutex_unlock(&note_lock);
    free(old);
}

VISIBLE void recorder_leave(const char *word, int code)
{
    say_farewell(word, code);
}

VISIBLE unsigned long long recorder_progress(void)
{
    return num_done();
}

/* For the benchmark: seconds of `times` calls of a function with six arguments, without Python. */
VISIBLE double recorder_repeat(int (*call)(long, long, long, long, long, long), const long *a,
                               int times)
{
    double began = now_s();
    for (int i = 0; i < times; i++)
        call(a[0], a[1], a[2], a[3], a[4], a[5]);
    return now_s() - began;
}

__attribute__((destructor)) static void leave(void)
{
    if (owner != 0)
        say_farewell("left", 0);
}

/* ---- The address, from rank 0 to all. A rank without the recorder would make this hang. */

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
    struct { char host[256], port[16], key[128]; } address;
    double until_s = now_s() + JOIN_S;
    if (world_rank > 0) {
        long long magic = MAGIC;
        long request = 0;
        send(&magic, 8, byte, 0, TAG, world);
        receive(&address, sizeof address, byte, 0, TAG, world, &request);
        if (!finish(&request, until_s + 5))
            refuse("rank 0 is");
        memcpy(host, address.host, sizeof host);
        memcpy(key, address.key, sizeof key);
        memcpy(port, address.port, sizeof port); /* last: the thread waits for it */
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
    memcpy(address.host, host, sizeof host);
    memcpy(address.port, port, sizeof port);
    memcpy(address.key, key, sizeof key);
    for (int i = 1; i < world_size; i++)
        send(&address, sizeof address, byte, i, TAG, world);
    free(all), free(magic);
}
