"""Unix sockets of every type, by path and by abstract name, and a descriptor under way in one."""

import sys

sys.path.insert(0, "/workloads")
import array
import os
import socket

from common import check, run, same


def setup():
    stream, packet = (
        socket.socket(socket.AF_UNIX, kind) for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
    )
    stream.bind("/tmp/stream.sock")
    packet.bind("\0torpor-packet")
    clients, servers = [], []
    for listener, name in ((stream, "/tmp/stream.sock"), (packet, "\0torpor-packet")):
        listener.listen(8)
        client = socket.socket(socket.AF_UNIX, listener.type)
        client.connect(name)
        clients.append(client)
        servers.append(listener.accept()[0])
        client.send(b"unread")
    datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    datagram.bind("/tmp/datagram.sock")
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.connect("/tmp/datagram.sock")
    sender.send(b"unread datagram")
    shut = socket.socketpair()
    shut[0].sendall(b"last words")
    shut[0].shutdown(socket.SHUT_WR)
    passing = socket.socketpair()
    reader, writer = os.pipe()
    os.write(writer, b"in a passed pipe")
    passing[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [reader]))])
    os.close(reader)

    def verify():
        for client, server in zip(clients, servers, strict=True):
            same(server.recv(100), b"unread", "what was under way")
            server.send(b"back")
            same(client.recv(100), b"back", "the way back")
        for listener, name in ((stream, "/tmp/stream.sock"), (packet, "\0torpor-packet")):
            client = socket.socket(socket.AF_UNIX, listener.type)
            client.connect(name)
            server = listener.accept()[0]
            client.send(b"new")
            same(server.recv(100), b"new", "a new connection")
        same(datagram.recv(100), b"unread datagram", "the datagram")
        sender.send(b"new datagram")
        same(datagram.recv(100), b"new datagram", "a new datagram")
        same(shut[1].recv(100) + shut[1].recv(100), b"last words", "a half-closed connection")
        data, ancillary, _, _ = passing[1].recvmsg(10, socket.CMSG_SPACE(4))
        same(data, b"x", "the message that carries a descriptor")
        check(ancillary, "the passed descriptor is lost")
        passed = array.array("i")
        passed.frombytes(ancillary[0][2][:4])
        same(os.read(passed[0], 100), b"in a passed pipe", "the passed pipe")

    return verify


run(setup)
