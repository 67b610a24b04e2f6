"""What the benchmark of the machine counts, and that a rank takes no more among more ranks."""

import os
import socket
import threading

import pytest

from benchmarks.machine.counts import Calls, read_process, read_trace
from benchmarks.machine.job import count_job

TRACE = """\
41 execve("/usr/bin/python3", ["python3"], 0x7ffe /* 9 vars */) = 0
41 openat(AT_FDCWD, "/etc/ld.so.cache", O_RDONLY|O_CLOEXEC) = 3
42 newfstatat(AT_FDCWD, "/usr/lib/a.py", <unfinished ...>
41 open("b.py", O_RDONLY) = -1 ENOENT (No such file or directory)
42 <... newfstatat resumed>{st_mode=S_IFDIR|0755, st_size=4096, ...}, 0) = 0
41 getdents64(3, 0x55d0 /* 4 entries */, 32768) = 112
41 connect(5, {sa_family=AF_INET, sin_port=htons(80)}, 16) = 0
41 access("/tmp/end of the work", F_OK) = -1 ENOENT (No such file or directory)
41 openat(AT_FDCWD, "later", O_RDONLY) = 3
"""


def test_calls_are_counted_up_to_the_mark():
    assert read_trace(TRACE.splitlines(), "end of the work") == Calls(opens=2, looks=2, connects=1)


def test_a_process_is_read():
    before = read_process(os.getpid())
    with socket.socket(), open(os.devnull):
        is_over = threading.Event()
        thread = threading.Thread(target=is_over.wait)
        thread.start()
        now = read_process(os.getpid())
        is_over.set()
        thread.join()
    assert now.sockets == before.sockets + 1
    assert now.descriptors == before.descriptors + 2
    assert now.threads == before.threads + 1
    assert 0 < now.anonymous <= now.own <= now.resident


@pytest.mark.launches
def test_sockets_threads_and_page_tables_of_a_rank_do_not_grow_with_the_ranks():
    plain, few, many = (
        count_job(stage, num_ranks, 120)
        for stage, num_ranks in (("plain", 8), ("strategy", 2), ("strategy", 8))
    )
    assert few["sockets_max"] == many["sockets_max"]
    assert few["threads_max"] == many["threads_max"]
    if "connects" in many:  # rank 0 waits for two of its peers at most: the monitors form a ring
        assert many["connects_max"] <= few["connects_max"] + 1
    # Of the memory that all ranks share, mpistrat's rounds are 36 KiB per rank: two pages of tables
    # hold those of 100 ranks, and the arenas are not touched.
    assert many["page_tables_max"] - plain["page_tables_max"] < 120 * 1024
