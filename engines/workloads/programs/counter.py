"""Counts, and holds a mebibyte with a checksum: what every engine must be able to do."""

import hashlib
import signal
import sys
import time

sys.path.insert(0, "/workloads")
from common import say

memory = bytearray().join(hashlib.shake_128(bytes([block])).digest(4096) for block in range(256))
wanted = hashlib.sha256(memory).hexdigest()


def tell(*_):
    """Answer whoever asks."""
    found = hashlib.sha256(memory).hexdigest()
    say("sum", found)
    say("ok" if found == wanted else "bad: the memory changed")


signal.signal(signal.SIGUSR1, tell)
say("ready")
tick = 0
while True:
    tick += 1
    say("tick", tick)
    time.sleep(0.02)
