"""PostgreSQL: committed rows, an open transaction, a lock that another session waits for."""

import sys

sys.path.insert(0, "/workloads")
import glob
import os
import subprocess

from common import Absent, check, eventually, run, same

USER = 1234


def demoted():
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)


class Session:
    """psql at the other end of two pipes."""

    def __init__(self, program):
        argv = [program, "-h", "/tmp/pg", "-U", "owner", "-d", "postgres", "-AtqX", "-v", "ON_ERROR_STOP=1"]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, statement):
        self.process.stdin.write(f"{statement};\n\\echo -- done\n")
        self.process.stdin.flush()

    def answer(self):
        lines = []
        while (line := self.process.stdout.readline()) != "-- done\n":
            check(line, "psql ended")
            lines.append(line.strip())
        return "\n".join(lines)

    def __call__(self, statement):
        self.tell(statement)
        return self.answer()


def setup():
    folders = sorted(glob.glob("/usr/lib/postgresql/*/bin"))
    if not folders:
        raise Absent("no PostgreSQL")
    initdb, postgres, psql = (f"{folders[-1]}/{name}" for name in ("initdb", "postgres", "psql"))
    with open("/etc/passwd", "a") as file:
        file.write(f"owner:x:{USER}:{USER}::/tmp:/bin/sh\n")
    for path in ("/tmp/pg", "/tmp/data"):
        os.mkdir(path, 0o700)
        os.chown(path, USER, USER)
    argv = [initdb, "-D", "/tmp/data", "-U", "owner", "-A", "trust", "--no-sync", "--locale=C", "-E", "UTF8"]
    done = subprocess.run(argv, preexec_fn=demoted, capture_output=True, text=True, cwd="/tmp", check=False)
    check(done.returncode == 0, f"initdb: {done.stderr[-300:]}")
    argv = [postgres, "-D", "/tmp/data", "-k", "/tmp/pg", "-c", "listen_addresses=127.0.0.1"]
    argv += ["-c", "shared_buffers=16MB"]
    with open("/tmp/pg.log", "w") as log:
        server = subprocess.Popen(argv, preexec_fn=demoted, stdout=log, stderr=log, cwd="/tmp")
    eventually(lambda: os.path.exists("/tmp/pg/.s.PGSQL.5432"), "PostgreSQL listens", 30)

    def answers():
        done = subprocess.run(
            [psql, "-h", "/tmp/pg", "-U", "owner", "-d", "postgres", "-c", "select 1"],
            capture_output=True,
            check=False,
        )
        return done.returncode == 0

    eventually(answers, "PostgreSQL answers", 30)
    first, second = Session(psql), Session(psql)
    first("create table t (n integer); insert into t select generate_series(1, 10000)")
    first("begin")
    first("update t set n = n + 1 where n = 10000")
    same(second("select max(n) from t"), "10000", "what another session sees")
    second.tell("update t set n = n + 10 where n = 10000")

    def verify():
        check(server.poll() is None, "PostgreSQL ended")
        same(first("select max(n) from t"), "10001", "the open transaction")
        first("commit")
        same(second.answer(), "", "the session that waited for the lock")
        same(second("select count(*), max(n) from t"), "10000|10001", "the table afterwards")
        third = Session(psql)
        same(third("insert into t values (5); select count(*) from t"), "10001", "a new session")
        third("checkpoint")

    return verify


run(setup)
