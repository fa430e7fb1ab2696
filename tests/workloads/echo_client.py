"""A live TCP client for tests: echo_client.py ADDRESS PORT.

Sends a numbered 8-byte record every 10 ms and checks that the echo comes back in order. On standard output:
`ready` once the first echo is there, then for each line read from standard input one line
`<records received> <seconds since the last echo> <error or ->`. Ends when standard input closes.
"""

import select
import socket
import struct
import sys
import time


def main() -> None:
    connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setblocking(False)
    sent = received = 0
    error = "-"
    pending = bytearray()
    out = bytearray()
    last = due = time.monotonic()
    while True:
        now = time.monotonic()
        if error == "-" and now >= due:
            due = now + 0.01
            if len(out) < 4096:
                out += struct.pack("!Q", sent)
                sent += 1
        readers = [sys.stdin.fileno()] + ([connection] if error == "-" else [])
        ready, _, _ = select.select(readers, [], [], max(0.0, due - now) if error == "-" else None)
        try:
            if out and error == "-":
                del out[: connection.send(out)]
        except BlockingIOError:
            pass
        except OSError as failure:
            error = type(failure).__name__
        if connection in ready and error == "-":
            try:
                data = connection.recv(65536)
                if not data:
                    error = "EOF"
                pending += data
            except BlockingIOError:
                pass
            except OSError as failure:
                error = type(failure).__name__
            while len(pending) >= 8:
                (number,) = struct.unpack("!Q", pending[:8])
                del pending[:8]
                if number != received:
                    error = f"order:{number}!={received}"
                    break
                received += 1
                last = time.monotonic()
                if received == 1:
                    print("ready", flush=True)
        if sys.stdin.fileno() in ready:
            if not sys.stdin.buffer.raw.read(100):
                return
            print(received, f"{time.monotonic() - last:.3f}", error, flush=True)


if __name__ == "__main__":
    main()
