"""A small service for tests, with state of every common kind: service.py PORT MIB.

Keeps MIB mebibytes of pseudo-random memory, a file in /data open for appending and reading, a pipe with
unread bytes, and a listening TCP socket. Answers one line per request line: `count` (goes up by one), `sum`
(sha256 of the memory), `file` (the open file's reading position and size), `write WORD` (appends to it),
`pipe` (takes what lies in the pipe, puts the count in), `clients` (how many connections are open), `where`
(hostname).
"""

import hashlib
import os
import selectors
import signal
import socket
import sys


class Service:
    def __init__(self, port: int, mebibytes: int) -> None:
        self.count = 0
        blocks = (hashlib.shake_128(number.to_bytes(4, "big")).digest(1 << 20) for number in range(mebibytes))
        self.memory = bytearray().join(blocks)
        self.file = open("/data/service.log", "a+b", buffering=0)  # noqa: SIM115
        self.file.write(b"first line\nsecond line\n")
        self.file.seek(len(b"first line\n"))
        self.reader, self.writer = os.pipe()
        os.write(self.writer, b"left in the pipe")
        self.selector = selectors.DefaultSelector()
        self.clients: dict[socket.socket, bytes] = {}
        self.listener = socket.create_server(("0.0.0.0", port), backlog=16)
        self.selector.register(self.listener, selectors.EVENT_READ)

    def answer(self, words: list[str]) -> str:
        if words[0] == "count":
            self.count += 1
            return str(self.count)
        if words[0] == "sum":
            return hashlib.sha256(self.memory).hexdigest()
        if words[0] == "file":
            return f"{self.file.tell()} {os.fstat(self.file.fileno()).st_size}"
        if words[0] == "write":
            position = self.file.tell()
            self.file.write(words[1].encode() + b"\n")
            self.file.seek(position)
            return "written"
        if words[0] == "pipe":
            content = os.read(self.reader, 4096)
            os.write(self.writer, str(self.count).encode())
            return content.decode()
        if words[0] == "clients":
            return str(len(self.clients))
        if words[0] == "where":
            return socket.gethostname()
        return "unknown"

    def serve(self) -> None:
        print("ready 1", flush=True)
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    client, _ = self.listener.accept()
                    self.clients[client] = b""
                    self.selector.register(client, selectors.EVENT_READ)
                else:
                    self.read(key.fileobj)

    def read(self, client: socket.socket) -> None:
        try:
            data = client.recv(4096)
            *lines, self.clients[client] = (self.clients[client] + data).split(b"\n")
            for line in lines:
                client.sendall(self.answer(line.decode().split()).encode() + b"\n")
        except OSError:
            data = b""
        if not data:
            self.selector.unregister(client)
            del self.clients[client]
            client.close()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
    Service(int(sys.argv[1]), int(sys.argv[2])).serve()
