"""Threads that are bound to one processor each, and a scheduling policy of their own."""

import sys

sys.path.insert(0, "/workloads")
import os
import threading

from common import eventually, run, same


def setup():
    processors = sorted(os.sched_getaffinity(0))
    done = threading.Event()
    ids = []

    def wait(processor):
        os.sched_setaffinity(0, {processor})
        ids.append(threading.get_native_id())
        done.wait()

    for processor in processors:
        threading.Thread(target=wait, args=(processor,), daemon=True).start()
    eventually(lambda: len(ids) == len(processors), "the threads are bound")
    wanted = {thread: os.sched_getaffinity(thread) for thread in ids}
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        pass  # a sandbox has no such policy
    policy = os.sched_getscheduler(0)

    def verify():
        same({thread: os.sched_getaffinity(thread) for thread in ids}, wanted, "processors of the threads")
        same(os.sched_getscheduler(0), policy, "scheduling policy")

    return verify


run(setup)
