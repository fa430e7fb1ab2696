"""Node.js: timers, promises under way, an HTTP server, a worker thread; its engine may use io_uring."""

import sys

sys.path.insert(0, "/workloads")
import http.client
import shutil
import subprocess

from common import Absent, check, eventually, run, same

PROGRAM = r"""
const http = require("http");
const { Worker } = require("worker_threads");
let ticks = 0, answers = new Map();
setInterval(() => { ticks++; }, 10);
const worker = new Worker(`
  const { parentPort } = require("worker_threads");
  let sum = 41;
  parentPort.on("message", () => parentPort.postMessage(++sum));
`, { eval: true });
let ask = [];
worker.on("message", (value) => ask.shift()(value));
const later = new Promise((done) => { globalThis.finish = done; });
const server = http.createServer(async (request, response) => {
  if (request.url === "/ticks") response.end(String(ticks));
  else if (request.url === "/worker") {
    const value = await new Promise((done) => { ask.push(done); worker.postMessage(0); });
    response.end(String(value));
  } else if (request.url === "/wait") response.end(String(await later));
  else if (request.url === "/finish") { globalThis.finish("kept promise"); response.end("finished"); }
});
server.keepAliveTimeout = 0;
server.listen(7401, "127.0.0.1");
"""

# None is closed: an epoll set that forgot one is what some releases of runsc do not keep, and warn of.
CONNECTIONS = []


def connect():
    CONNECTIONS.append(http.client.HTTPConnection("127.0.0.1", 7401, timeout=10))
    return CONNECTIONS[-1]


def get(path, connection=None):
    connection = connection or connect()
    connection.request("GET", path)
    return connection.getresponse().read().decode()


def up():
    try:
        return get("/ticks") != ""
    except OSError:
        return False


def setup():
    program = shutil.which("node", path="/usr/bin:/bin")
    if program is None:
        raise Absent("no node")
    with open("/tmp/program.js", "w") as file:
        file.write(PROGRAM)
    server = subprocess.Popen([program, "/tmp/program.js"])
    eventually(up, "node answers", 30)
    kept = connect()
    same(get("/worker", kept), "42", "the worker's first answer")
    waiting = connect()
    waiting.request("GET", "/wait")
    ticks = int(get("/ticks", kept))

    def verify():
        check(server.poll() is None, "node ended")
        eventually(lambda: int(get("/ticks")) > ticks + 5, "its timer goes on")
        same(get("/worker", kept), "43", "the worker's memory")
        same(get("/worker"), "44", "a new connection")
        same(get("/finish"), "finished", "an answer")
        same(waiting.getresponse().read(), b"kept promise", "a request that was waiting")

    return verify


run(setup)
