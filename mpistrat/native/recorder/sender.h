/* What the files of the sender share: text, the state of this rank as JSON, and the connection. */

#ifndef MPISTRAT_SENDER_H
#define MPISTRAT_SENDER_H

#include <stddef.h>
#include <sys/types.h>
#include <time.h>

struct text { char *at; size_t size, room; };

void add(struct text *text, const char *format, ...);
void add_string(struct text *text, const char *string, size_t size);

/* Address of the collector. The thread that sends waits for the port. */
struct address { char host[256], port[16], key[128]; };
extern struct address address;
extern int is_given; /* whether the environment has the address */

double now_s(void);
void send_changed(struct text *text, struct text *last);

void watch_main_thread(int dumps_to, int signal);
void announce_again(void);
void describe(struct text *text);
void describe_history(struct text *text, int is_computing);
int is_computing(void);
unsigned long long num_done(void);

#endif
