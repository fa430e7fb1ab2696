"""What runs in the container of the show: state in memory, on disk and in a socket, and it counts."""

import hashlib
import random
import socket
import time
from pathlib import Path

N_BYTES = 64 << 20

memory = random.Random(7).randbytes(N_BYTES)  # noqa: S311
listener = socket.create_server(("127.0.0.1", 7777))
started = Path("/data/started-once")
with started.open("a") as file:
    file.write(f"{time.time()}\n")
count = 0
while True:
    count += 1
    digest = hashlib.sha256(memory).hexdigest()[:12]
    starts = len(started.read_text().splitlines())
    print(
        f"tick {count} memory {digest} starts {starts} port {listener.getsockname()[1]} "
        f"net {Path('/proc/self/ns/net').readlink()}",
        flush=True,
    )
    time.sleep(0.1)
