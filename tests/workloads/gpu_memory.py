"""A process with memory on a real GPU: counts there, and knows a checksum of what it put there.

Usage: gpu_memory.py SITE MIB; SITE is a directory that holds cuda-bindings.

Prints `tick N` about every 20 ms, where N is kept in GPU memory. SIGUSR1 prints `sum HEX`, a checksum of the
rest, read back from the GPU.
"""

import ctypes
import hashlib
import signal
import sys
import time

BLOCK = 1 << 20


def main() -> None:
    sys.path.append(sys.argv[1])
    from cuda.bindings import driver as cuda

    def checked(result, *values):
        if int(result):
            raise SystemExit(f"CUDA: {result!r}")
        return values[0] if values else None

    n_blocks = int(sys.argv[2])
    wanted: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: wanted.append(1))
    checked(*cuda.cuInit(0))
    device = checked(*cuda.cuDeviceGet(0))
    # As a framework does: the primary context, whose signature no version of the bindings changes.
    checked(*cuda.cuCtxSetCurrent(checked(*cuda.cuDevicePrimaryCtxRetain(device))))
    counter = checked(*cuda.cuMemAlloc(8))
    memory = checked(*cuda.cuMemAlloc(n_blocks * BLOCK))
    buffer = ctypes.create_string_buffer(BLOCK)
    where = ctypes.addressof(buffer)
    for block in range(n_blocks):
        buffer.raw = hashlib.shake_128(block.to_bytes(4, "big")).digest(BLOCK)
        checked(*cuda.cuMemcpyHtoD(int(memory) + block * BLOCK, where, BLOCK))
    count = ctypes.c_uint64(0)
    place = ctypes.addressof(count)
    checked(*cuda.cuMemcpyHtoD(counter, place, 8))
    while True:
        checked(*cuda.cuMemcpyDtoH(place, counter, 8))
        count.value += 1
        checked(*cuda.cuMemcpyHtoD(counter, place, 8))
        print("tick", count.value, flush=True)
        if wanted:
            wanted.clear()
            digest = hashlib.sha256()
            for block in range(n_blocks):
                checked(*cuda.cuMemcpyDtoH(where, int(memory) + block * BLOCK, BLOCK))
                digest.update(buffer.raw)
            print("sum", digest.hexdigest(), flush=True)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
