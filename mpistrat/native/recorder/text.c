/* Text that grows, for JSON. */

#define _GNU_SOURCE
#include "sender.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

void add(struct text *text, const char *format, ...)
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

void add_string(struct text *text, const char *string, size_t size)
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
