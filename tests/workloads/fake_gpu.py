"""A process that holds a pretended GPU: counts on it, and plays the driver's part inside the process.

Usage: fake_gpu.py DIRECTORY UUID[,UUID...] [--mib N] [--used N] [--ranks N] [--loose PATH]

DIRECTORY is the fabric's (tests/gpu/fake/fabric.h says what is in it) as this process sees it. The memory of
a GPU is a file `vram/UUID/HANDLE`; a checkpoint copies it into the process's own memory and removes it, a
restore puts it back under a new handle. Every `call` of the program on its GPU waits while it is locked.

Prints `tick N` every 20 ms, where N is counted on the GPU. SIGUSR1 prints `sum HEX`, a checksum of the GPU's
memory without the count. --used: only so many of the GPUs it sees. --ranks: so many processes, of which the
first prints. --loose: keep a file open that no checkpoint closes.
"""

import argparse
import hashlib
import mmap
import os
import secrets
import signal
import struct
import threading
import time
from pathlib import Path

STATE, REQUEST, ANSWER, N_DEVICES, MEBIBYTES, N_USED = 40, 44, 48, 52, 56, 60
UUIDS, WANTED, HOST_MEMORY = 64, 64 + 8 * 48, 4096
PAGE_FILE_BYTES = 1 << 20
VRAM_BYTES = 64 << 10
RUNNING, LOCKED, CHECKPOINTED = 0, 1, 2


class Gpu:
    """One process's GPUs."""

    def __init__(self, directory: Path, uuids: list[str], n_used: int, mebibytes: int, seed: str) -> None:
        self.directory = directory
        with (directory / "gpu-page").open("r+b") as file:
            self.page = mmap.mmap(file.fileno(), PAGE_FILE_BYTES, flags=mmap.MAP_PRIVATE)
        self.handle = secrets.token_hex(8)
        self.n = n_used
        self.busy = threading.Lock()
        for number, uuid in enumerate(uuids):
            self.set_text(UUIDS + 48 * number, uuid)
        for number in range(n_used):
            random = hashlib.shake_128(f"{seed} {number}".encode()).digest(VRAM_BYTES - 8)
            self.path(number).write_bytes(bytes(8) + random)
        for at, value in ((N_DEVICES, len(uuids)), (N_USED, n_used), (MEBIBYTES, mebibytes)):
            self.set(at, value)
        self.page[8:40] = (directory / "id").read_bytes()[:32]
        self.page[0:8] = b"FAKEGPU1"
        threading.Thread(target=self.drive, daemon=True).start()

    def get(self, at: int) -> int:
        return struct.unpack_from("<I", self.page, at)[0]

    def set(self, at: int, value: int) -> None:
        struct.pack_into("<I", self.page, at, value)

    def text(self, at: int) -> str:
        return self.page[at : at + 48].rstrip(b"\0").decode()

    def set_text(self, at: int, text: str) -> None:
        self.page[at : at + 48] = text.encode().ljust(48, b"\0")

    def path(self, number: int) -> Path:
        return self.directory / "vram" / self.text(UUIDS + 48 * number) / self.handle

    def saved(self, number: int) -> slice:
        start = HOST_MEMORY + number * VRAM_BYTES
        return slice(start, start + VRAM_BYTES)

    # --- the driver's part -----------------------------------------------------------------------------

    def drive(self) -> None:
        acts = {1: self.lock, 2: self.checkpoint, 3: self.restore, 4: self.unlock}
        while True:
            act = acts.get(self.get(REQUEST))
            if act is None:
                time.sleep(0.002)
                continue
            act()
            # The next one asks when there is no request: it must not find this one's answer.
            self.set(ANSWER, 0)
            self.set(REQUEST, 0)

    def lock(self) -> None:
        with self.busy:
            self.set(STATE, LOCKED)

    def checkpoint(self) -> None:
        for number in range(self.n):
            self.page[self.saved(number)] = self.path(number).read_bytes()
            self.path(number).unlink()
        self.set(STATE, CHECKPOINTED)

    def restore(self) -> None:
        self.handle = secrets.token_hex(8)
        for number in range(self.get(N_DEVICES)):
            self.set_text(UUIDS + 48 * number, self.text(WANTED + 48 * number))
        for number in range(self.n):
            self.path(number).write_bytes(self.page[self.saved(number)])
            self.page[self.saved(number)] = bytes(VRAM_BYTES)
        self.set(STATE, LOCKED)

    def unlock(self) -> None:
        self.set(STATE, RUNNING)

    # --- the program's part ----------------------------------------------------------------------------

    def call(self, work):
        """Do something on the GPU; waits while the process is locked."""
        while True:
            with self.busy:
                if self.get(STATE) == RUNNING:
                    return work()
            time.sleep(0.002)

    def count(self) -> int:
        def work() -> int:
            number = 0
            for device in range(self.n):
                with self.path(device).open("r+b") as file:
                    number = struct.unpack("<Q", file.read(8))[0] + 1
                    file.seek(0)
                    file.write(struct.pack("<Q", number))
            return number

        return self.call(work)

    def sum(self) -> str:
        def work() -> str:
            digest = hashlib.sha256()
            for device in range(self.n):
                digest.update(self.path(device).read_bytes()[8:])
            return digest.hexdigest()

        return self.call(work)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("uuids")
    parser.add_argument("--used", type=int, default=0)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--loose", default="")
    options = parser.parse_args()
    rank = 0
    for number in range(1, options.ranks):
        if os.fork() == 0:
            rank = number
            break
    wanted: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: wanted.append(1))
    uuids = options.uuids.split(",")
    gpu = Gpu(options.directory, uuids, options.used or len(uuids), options.mib, f"rank {rank}")
    if options.loose:
        os.open(options.loose, os.O_RDONLY)
    first = gpu.sum()
    while True:
        number = gpu.count()
        if rank == 0:
            print("tick", number, flush=True)
        if number % 50 == 0 and gpu.sum() != first:
            print("broken", rank, flush=True)
        if wanted:
            wanted.clear()
            print("sum", gpu.sum(), flush=True)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
