"""Holds random memory and counts: memory.py MIB INTERVAL_S. Prints `tick N T`, T in monotonic seconds.

The longest way from one T to the next is how long the process stood still, told by nobody but itself.
"""

import os
import sys
import time

memory = [os.urandom(1 << 20) for _ in range(int(sys.argv[1]))]
interval_s = float(sys.argv[2])
count = 0
while True:
    count += 1
    print("tick", count, f"{time.monotonic():.6f}", flush=True)
    time.sleep(interval_s)
