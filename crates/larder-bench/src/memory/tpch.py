"""TPC-H in DuckDB, for `larder-bench memory`: told what to do by words on its input, it answers each by a line of JSON.

generate FILE SCALE   makes a database file with the tables, and ends
run FILE THREADS      loads the tables into memory; then for each line `pass` runs the 22 queries, until its input ends
"""

import hashlib
import json
import os
import sys
import time

import duckdb


def connect(path, threads):
    connection = duckdb.connect(path)
    connection.execute("load tpch")
    connection.execute(f"set threads = {threads}")
    # It would go by the limit of its cgroup, and write to files what does not fit.
    connection.execute("set memory_limit = '1TB'")
    connection.execute("set temp_directory = ''")
    return connection


def answer(**values):
    print(json.dumps(values), flush=True)


def generate(path, scale):
    made = f"{path}.{os.getpid()}"
    connection = connect(made, os.cpu_count())
    connection.execute(f"call dbgen(sf = {scale})")
    connection.close()
    os.rename(made, path)


def load(path, threads):
    connection = connect(":memory:", threads)
    connection.execute(f"attach '{path}' as disk (read_only)")
    connection.execute("copy from database disk to memory")
    connection.execute("detach disk")
    # The file's pages would be counted as this process's memory.
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return connection


def run_pass(connection):
    """Seconds of each query, and a digest of all rows: in no order, since rows may be equal in what they are ordered by."""
    seconds, digest = [], hashlib.sha256()
    for query in range(1, 23):
        start = time.monotonic()
        rows = connection.execute(f"pragma tpch({query})").fetchall()
        seconds.append(time.monotonic() - start)
        for row in sorted(map(repr, rows)):
            digest.update(row.encode() + b"\n")
        digest.update(b"\f")
    return {"queries": seconds, "digest": digest.hexdigest()}


def main():
    match sys.argv[1:]:
        case ["generate", path, scale]:
            generate(path, scale)
        case ["run", path, threads]:
            start = time.monotonic()
            connection = load(path, threads)
            answer(seconds=time.monotonic() - start)
            for line in sys.stdin:
                if line != "pass\n":
                    sys.exit(f"{line!r} is not known")
                answer(**run_pass(connection))
        case _:
            sys.exit(__doc__)


main()
