"""NumPy with a pool of threads that multiply matrices."""

import glob
import sys

sys.path.insert(0, "/workloads")
sys.path += glob.glob("/usr/lib/python3/dist-packages")
import threading

from common import Absent, check, eventually, run


def setup():
    try:
        import numpy
    except ImportError as error:
        raise Absent(f"no numpy: {error}") from error
    rounds = [0] * 4
    wrong = []
    matrices = [numpy.arange(40_000, dtype="f8").reshape(200, 200) % (7 + n) for n in range(4)]
    wanted = [float((matrix @ matrix).sum()) for matrix in matrices]
    generator = numpy.random.default_rng(7)
    generator.random(1000)
    twin = numpy.random.default_rng(7)
    twin.random(1000)
    future = twin.random(5).tolist()

    def work(number):
        while True:
            if float((matrices[number] @ matrices[number]).sum()) != wanted[number]:
                wrong.append(number)
            rounds[number] += 1

    for number in range(4):
        threading.Thread(target=work, args=(number,), daemon=True).start()
    eventually(lambda: min(rounds) > 2, "all threads work")

    def verify():
        before = list(rounds)
        eventually(
            lambda: all(now > then + 2 for now, then in zip(rounds, before, strict=True)), "threads go on"
        )
        check(not wrong, f"wrong results in threads {wrong}")
        check(generator.random(5).tolist() == future, "the random generator's state")

    return verify


run(setup)
