/* Sender of the recorder: a thread that tells the collector what this rank is doing.

   It runs without Python, so it can speak where a thread holds Python's lock inside MPI. Nothing is
   sent as long as nothing changes. */

#define _GNU_SOURCE
#include "recorder.h"
#include "sender.h"

#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define TICK_MS 250
#define STANDS_TICKS 4
#define MAX_TRIES 20
#define MAX_WAITS_TO_SEND 6

struct address address;
int is_given;
static int rank_of_launcher = NONE, has_left, is_welcome, question;
static int connection = NONE;
static pid_t owner;
static pthread_mutex_t socket_lock = PTHREAD_MUTEX_INITIALIZER;

double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

/* Sends text if it differs from what was sent last. */
void send_changed(struct text *text, struct text *last)
{
    if (text->size == last->size && memcmp(text->at, last->at, text->size) == 0)
        return;
    pthread_mutex_lock(&socket_lock);
    size_t sent = 0;
    int waits = 0; /* of 5 s: a collector may be stopped for a while, like all processes beside it */
    while (connection != NONE && sent < text->size) {
        ssize_t n = send(connection, text->at + sent, text->size - sent, MSG_NOSIGNAL);
        if (n < 0 && (errno == EINTR || (errno == EAGAIN && waits++ < MAX_WAITS_TO_SEND)))
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

static int open_connection(void)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM}, *found = NULL;
    char name[256];
    /* A collector on this machine may listen on the loopback interface alone. */
    int is_here = gethostname(name, sizeof name) == 0 && strcmp(name, address.host) == 0;
    if (getaddrinfo(is_here ? "127.0.0.1" : address.host, address.port, &hints, &found) != 0)
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

/* Waits one tick for an order. Returns 0 if the collector has closed the connection. */
static int obey(void)
{
    static char order[256];
    struct pollfd wanted = {connection, POLLIN, 0};
    if (connection == NONE) {
        usleep(TICK_MS * 1000);
        return 1;
    }
    if (poll(&wanted, 1, TICK_MS) <= 0)
        return 1;
    ssize_t n = recv(connection, order, sizeof order - 1, MSG_DONTWAIT);
    if (n <= 0) {
        pthread_mutex_lock(&socket_lock);
        if (n == 0) {
            close(connection);
            connection = NONE;
        }
        pthread_mutex_unlock(&socket_lock);
        return n != 0;
    }
    order[n] = 0; /* several may have come together */
    int code;
    char *at;
    is_welcome |= strstr(order, "welcome") != NULL;
    if ((at = strstr(order, "end ")) != NULL && sscanf(at, "end %d", &code) == 1)
        _exit(code);
    if ((at = strstr(order, "abort ")) != NULL && sscanf(at, "abort %d", &code) == 1)
        abort_job(code);
    if ((at = strstr(order, "ask ")) != NULL)
        sscanf(at, "ask %d", &question);
    return 1;
}

static void greet(void)
{
    char own[256] = "";
    gethostname(own, sizeof own - 1);
    say("{\"key\": \"%s\", \"pid\": %d, \"rank\": %d, \"host\": \"%s\"}", address.key, (int)owner,
        rank_of_launcher, own);
}

static void *work(void *unused)
{
    (void)unused;
    struct text text = {0}, state = {0}, history = {0};
    unsigned long long done = 0;
    int stands = 0, computes = 0;
    for (int tries = 0;;) {
        if (connection == NONE && address.port[0] != 0) {
            /* The collector drops who greets late, which a rank on a loaded machine may. */
            if (is_welcome || tries++ == MAX_TRIES || (connection = open_connection()) == NONE)
                return NULL; /* nobody watches, and the program must not suffer */
            announce_again();
            state.size = history.size = 0;
            greet();
        }
        int was_open = connection != NONE; /* the port may come at any moment */
        if (!obey() || !was_open || connection == NONE)
            continue;
        stands = num_done() == done ? stands + 1 : 0;
        done = num_done();
        int asked = question; /* the answer follows a state that is newer than the question */
        describe(&text);
        send_changed(&text, &state);
        if (stands >= STANDS_TICKS) {
            if (stands % STANDS_TICKS == 0)
                computes = is_computing();
            describe_history(&text, computes);
            send_changed(&text, &history);
        }
        if (asked != 0)
            say("{\"answer\": %d}", asked);
        question -= asked; /* only this thread writes it */
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
                           int dumps_to, int signal)
{
    pthread_t thread;
    snprintf(address.host, sizeof address.host, "%s", of_host);
    snprintf(address.key, sizeof address.key, "%s", of_key);
    snprintf(address.port, sizeof address.port, "%s", of_port);
    rank_of_launcher = rank, owner = getpid();
    watch_main_thread(dumps_to, signal);
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
