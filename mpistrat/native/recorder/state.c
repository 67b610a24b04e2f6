/* State of this rank as JSON: the calls of its threads, its lines, its collectives so far. */

#define _GNU_SOURCE
#include "recorder.h"
#include "sender.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define POLLED_TICKS 8
#define LATE_S 1.2
#define OUTSIDE_S 5.0 /* a signal may disturb a slow system call, so it comes later there */
#define MAX_SHOWN_GROUPS 256
#define MAX_PENDING 64

static char is_announced[65536];

/* A new connection has heard of no group. */
void announce_again(void)
{
    memset(is_announced, 0, sizeof is_announced);
}

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
    if (wait->is_open)
        add(text, ", \"open\": 1");
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

unsigned long long num_done(void)
{
    unsigned long long done = 0;
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
            polled[i] = POLLED_TICKS;
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

/* The line of the innermost frame of the program's own files in a dump of the main thread. */
static void add_source(struct text *text, char *dump)
{
    char path[4096], line[512];
    int number;
    for (char *at = dump; (at = strstr(at, "  File \"")) != NULL; at++) {
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

/* ---- Lines, from the sampler. Where a thread holds Python's lock, the sampler stands still: then the
   main thread writes its stack itself, in a signal handler of faulthandler. No other thread may read
   that stack meanwhile, because it may change and end the program (`dump_traceback_later` does). */

static pthread_mutex_t note_lock = PTHREAD_MUTEX_INITIALIZER;
static char *note;
static double noted_s, asked_s;
static uint64_t note_version, seen_version, asked_version;
static int is_last_note, dump_file = NONE, dump_signal;
static pthread_t main_thread;
static clockid_t main_clock;

void watch_main_thread(int dumps_to, int signal)
{
    main_thread = pthread_self(), dump_file = dumps_to, dump_signal = signal;
    pthread_getcpuclockid(main_thread, &main_clock);
    noted_s = now_s();
}

/* Called by the sampler before it looks at the lines: they are not older than this. */
VISIBLE unsigned long long recorder_version(void)
{
    return num_begun();
}

/* What the sampler has seen, as JSON. After the last note, Python runs no more. */
VISIBLE void recorder_note(const char *json, unsigned long long version, int is_last)
{
    char *copy = strdup(json);
    pthread_mutex_lock(&note_lock);
    char *old = note;
    note = copy, noted_s = now_s(), note_version = version, is_last_note = is_last;
    pthread_mutex_unlock(&note_lock);
    free(old);
}

static int is_main_in_mpi(void)
{
    for (int i = 0; i < MAX_THREADS; i++)
        if (threads[i].is_used && pthread_equal(threads[i].pthread, main_thread)) {
            const struct function *f = threads[i].function;
            return f != NULL && f->class != POLL;
        }
    return 0;
}

/* Lets the main thread write its stack, if it has stood still since the last look. The lock must be
   held: after the last note, Python removes the handler, and the signal would end the program. */
static void ask_for_dump(uint64_t version, double late_s)
{
    struct sigaction known;
    int stands = version == seen_version;
    seen_version = version;
    if (!stands || asked_version == version || dump_file == NONE || dump_signal == 0)
        return;
    if (!is_main_in_mpi() && (late_s < OUTSIDE_S || now_s() - asked_s < OUTSIDE_S))
        return;
    if (sigaction(dump_signal, NULL, &known) != 0 || known.sa_handler == SIG_DFL ||
        known.sa_handler == SIG_IGN)
        return;
    asked_version = version, asked_s = now_s();
    if (ftruncate(dump_file, 0) == 0)
        pthread_kill(main_thread, dump_signal);
}

static void add_lines(struct text *text)
{
    static char dump[32768];
    ssize_t size = 0;
    uint64_t version = num_begun();
    pthread_mutex_lock(&note_lock);
    double late_s = now_s() - noted_s;
    uint64_t of_lines = is_last_note ? version : note_version;
    int is_late = late_s > LATE_S && !is_last_note;
    if (is_late)
        ask_for_dump(version, late_s);
    add(text, ", \"lines\": %s", note == NULL ? "null" : note);
    pthread_mutex_unlock(&note_lock);
    if (is_late && asked_version == version && of_lines != version &&
        (size = pread(dump_file, dump, sizeof dump - 1, 0)) > 0) {
        dump[size] = 0;
        of_lines = version;
        add(text, ", \"dump\": ");
        add_string(text, dump, size);
        add_source(text, dump);
    }
    add(text, ", \"lv\": %llu", (unsigned long long)of_lines);
}

void describe(struct text *text)
{
    text->size = 0;
    add(text, "{\"state\": {\"rank\": %d, \"size\": %d, \"done\": %llu, \"v\": %llu, ", world_rank,
        world_size, num_done(), (unsigned long long)num_begun());
    describe_calls(text);
    add_lines(text);
    add(text, "}}\n");
}

/* Whether the main thread has used the processor since the last call. */
int is_computing(void)
{
    static struct timespec last;
    struct timespec now = last;
    clock_gettime(main_clock, &now);
    double used_s = now.tv_sec - last.tv_sec + (now.tv_nsec - last.tv_nsec) * 1e-9;
    last = now;
    return used_s > 0.05;
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

void describe_history(struct text *text, int is_computing)
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
