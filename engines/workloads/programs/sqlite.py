"""SQLite in the middle of a transaction, with a second connection that must not see it yet."""

import sys

sys.path.insert(0, "/workloads")

from common import Absent, check, run, same

try:
    import sqlite3
except ImportError:
    sqlite3 = None


def setup():
    if sqlite3 is None:
        raise Absent("this machine's Python has no sqlite3")
    writer = sqlite3.connect("/tmp/data.db", isolation_level=None)
    writer.execute("create table t (n integer)")
    writer.executemany("insert into t values (?)", [(n,) for n in range(100)])
    reader = sqlite3.connect("/tmp/data.db", timeout=0.1)
    writer.execute("begin immediate")
    writer.executemany("insert into t values (?)", [(n,) for n in range(100, 5000)])

    def count(connection):
        return connection.execute("select count(*), sum(n) from t").fetchone()

    def verify():
        same(count(reader)[0], 100, "rows that others see before the commit")
        same(count(writer)[0], 5000, "rows within the transaction")
        try:
            reader.execute("insert into t values (1)")
        except sqlite3.OperationalError:
            pass
        else:
            check(False, "the lock on the database is lost")
        writer.execute("commit")
        reader.rollback()
        same(count(reader), (5000, sum(range(5000))), "rows after the commit")
        same(writer.execute("pragma integrity_check").fetchone(), ("ok",), "integrity")

    return verify


run(setup)
