"""One gibibyte of memory with a checksum."""

import sys

sys.path.insert(0, "/workloads")
import hashlib
import os

from common import run, same


def setup():
    # Random blocks repeated: random enough not to be compressed away, and made within a second.
    block = os.urandom(16 << 20)
    memory = [bytearray(block) for _ in range(64)]
    for number, piece in enumerate(memory):
        piece[number : number + 8] = number.to_bytes(8, "big")

    def total():
        digest = hashlib.blake2b()
        for piece in memory:
            digest.update(piece)
        return digest.hexdigest()

    wanted = total()
    return lambda: same(total(), wanted, "checksum of a gibibyte")


run(setup)
