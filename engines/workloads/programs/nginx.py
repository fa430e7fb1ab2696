"""nginx: a master with two workers, a kept-alive connection, and a download that is half done."""

import sys

sys.path.insert(0, "/workloads")
import http.client
import os
import shutil
import socket
import subprocess

from common import Absent, check, eventually, run, same

PORT = 7301
CONFIGURATION = """
daemon off; user root; worker_processes 2; pid /tmp/nginx.pid; error_log /tmp/nginx-error.log;
events { worker_connections 64; }
http {
  access_log /tmp/nginx-access.log;
  client_body_temp_path /tmp/n1; proxy_temp_path /tmp/n2; fastcgi_temp_path /tmp/n3;
  uwsgi_temp_path /tmp/n4; scgi_temp_path /tmp/n5;
  keepalive_timeout 300; send_timeout 300;
  server { listen 127.0.0.1:7301; root /tmp/www; }
}
"""


def get(connection, path):
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read()


def logged():
    with open("/tmp/nginx-access.log") as log:
        return len(log.read().splitlines())


def up():
    try:
        socket.create_connection(("127.0.0.1", PORT), timeout=1).close()
    except OSError:
        return False
    return True


def setup():
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin")
    if program is None:
        raise Absent("no nginx")
    os.mkdir("/tmp/www")
    content = os.urandom(8 << 20)
    with open("/tmp/www/large", "wb") as file:
        file.write(content)
    with open("/tmp/www/small", "w") as file:
        file.write("small")
    with open("/tmp/nginx.conf", "w") as file:
        file.write(CONFIGURATION)
    master = subprocess.Popen([program, "-p", "/tmp", "-e", "/tmp/nginx-error.log", "-c", "/tmp/nginx.conf"])
    eventually(up, "nginx answers", 20)
    kept = http.client.HTTPConnection("127.0.0.1", PORT, timeout=10)
    same(get(kept, "/small"), (200, b"small"), "the first answer")
    half = http.client.HTTPConnection("127.0.0.1", PORT, timeout=10)
    half.request("GET", "/large")
    answer = half.getresponse()
    begun = answer.read(100_000)

    def verify():
        check(master.poll() is None, "nginx ended")
        same(get(kept, "/small"), (200, b"small"), "the kept-alive connection")
        check(begun + answer.read() == content, "the download that was half done")
        fresh = http.client.HTTPConnection("127.0.0.1", PORT, timeout=10)
        same(get(fresh, "/small"), (200, b"small"), "a new connection")
        same(get(fresh, "/none")[0], 404, "a missing page")
        # nginx writes a line after it has answered.
        eventually(lambda: logged() == 5, "five lines of the access log")

    return verify


run(setup)
