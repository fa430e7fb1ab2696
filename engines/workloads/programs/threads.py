"""Twenty threads with thread-locals, locks, conditions and a queue: all of them futexes."""

import sys

sys.path.insert(0, "/workloads")
import queue
import threading

from common import check, eventually, run, same

COUNT = 20


def setup():
    local, turn = threading.local(), threading.Condition()
    requests = [queue.Queue() for _ in range(COUNT)]
    answers = queue.Queue()
    barrier = threading.Barrier(COUNT + 1)
    spins = [0] * COUNT
    held = threading.Lock()
    held.acquire()
    waiting = []

    def work(number):
        local.name = f"thread {number}"
        barrier.wait()
        while True:
            word = requests[number].get()
            spins[number] += 1
            if word == "lock":
                with held:
                    answers.put(("locked", number))
            elif word == "wait":
                with turn:
                    waiting.append(number)
                    turn.wait()
                answers.put(("woken", number))
            else:
                answers.put((local.name, number))

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(COUNT)]
    for thread in threads:
        thread.start()
    barrier.wait()
    ids = [thread.native_id for thread in threads]
    requests[0].put("lock")
    for number in range(1, 5):
        requests[number].put("wait")
    eventually(lambda: len(waiting) == 4 and spins[0], "the threads wait")

    def verify():
        check(all(thread.is_alive() for thread in threads), "a thread died")
        same([thread.native_id for thread in threads], ids, "thread ids")
        for number in range(5, COUNT):
            requests[number].put("name")
        names = sorted(answers.get(timeout=20) for _ in range(5, COUNT))
        same(names, sorted((f"thread {n}", n) for n in range(5, COUNT)), "thread-locals")
        check(answers.empty(), "a thread that waited went on by itself")
        held.release()
        same(answers.get(timeout=20), ("locked", 0), "the lock")
        with turn:
            turn.notify_all()
        woken = sorted(answers.get(timeout=20) for _ in range(1, 5))
        same(woken, [("woken", n) for n in range(1, 5)], "the condition")
        eventually(lambda: sum(spins) == COUNT, "every thread worked once")

    return verify


run(setup)
