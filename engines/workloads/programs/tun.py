"""A tunnel device of the container's own (VPN clients have one)."""

import sys

sys.path.insert(0, "/workloads")
import fcntl
import os
import socket
import struct

from common import Absent, check, run


def setup():
    try:
        os.makedirs("/dev/net", exist_ok=True)
        if not os.path.exists("/dev/net/tun"):
            os.mknod("/dev/net/tun", 0o20600, os.makedev(10, 200))
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, 0x400454CA, struct.pack("16sH22x", b"tun7", 1 | 0x1000))
    except OSError as error:
        raise Absent(f"no tunnel device: {error}") from error
    return lambda: check("tun7" in [name for _, name in socket.if_nameindex()], "the device is gone")


run(setup)
