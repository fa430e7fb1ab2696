"""Pipes, FIFOs and socket pairs with bytes that nobody has read yet."""

import sys

sys.path.insert(0, "/workloads")
import fcntl
import os
import socket

from common import check, run, same

F_SETPIPE_SZ, F_GETPIPE_SZ = 1031, 1032


def setup():
    reader, writer = os.pipe()
    fcntl.fcntl(writer, F_SETPIPE_SZ, 1 << 18)
    data = os.urandom(200_000)
    os.write(writer, data)
    os.set_blocking(reader, False)
    os.mkfifo("/tmp/fifo", 0o640)
    fifo = os.open("/tmp/fifo", os.O_RDWR)
    os.write(fifo, b"left in the fifo")
    stream = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    datagram = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    packet = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stream[0].sendall(b"left in the stream")
    for pair in (datagram, packet):
        pair[0].send(b"first")
        pair[0].send(b"second")
    lone, gone = os.pipe()
    os.close(gone)

    def verify():
        same(fcntl.fcntl(writer, F_GETPIPE_SZ), 1 << 18, "size of the pipe")
        check(not os.get_blocking(reader), "O_NONBLOCK is lost")
        found = b""
        while len(found) < len(data):
            found += os.read(reader, 65536)
        check(found == data, "content of the pipe")
        same(os.read(fifo, 100), b"left in the fifo", "content of the fifo")
        same(os.stat("/tmp/fifo").st_mode & 0o777, 0o640, "mode of the fifo")
        same(stream[1].recv(100), b"left in the stream", "content of the stream")
        for pair in (datagram, packet):
            same([pair[1].recv(100), pair[1].recv(100)], [b"first", b"second"], "datagrams")
            pair[1].send(b"back")
            same(pair[0].recv(100), b"back", "the way back")
        same(os.read(lone, 1), b"", "end of file of a pipe that nobody writes to")

    return verify


run(setup)
