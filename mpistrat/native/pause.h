/* Pause of a core that waits for a different core. */

#ifndef MPISTRAT_PAUSE_H
#define MPISTRAT_PAUSE_H

static inline void mpistrat_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
