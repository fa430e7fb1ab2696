"""Makes one call of an engine from a process of its own, so that a test can kill it.

call_engine.py CHECKOUT REQUEST; REQUEST is JSON: {"engine": "criu", "settings": {...}, "call": "checkpoint" |
"restore" | "release" | "undo", "request": {...}}. Writes `go` and, at the end, `done` or
`failed KIND MESSAGE` to the file that REQUEST names as "report". Its standard streams are the container's.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    from engines import registry
    from engines.api import CheckpointRequest, EngineError, EngineSettings, ReleaseRequest, RestoreRequest

    order = json.loads(sys.argv[2])

    def fields(values):
        paths = {key for key, value in values.items() if key.endswith("_path") and value}
        paths.discard("search_path")
        return {key: Path(value) if key in paths else value for key, value in values.items()}

    kinds = {"checkpoint": CheckpointRequest, "restore": RestoreRequest, "release": ReleaseRequest}
    engine = registry.create(order.get("engine", "criu"), EngineSettings(**fields(order["settings"])))
    report = open(order["report"], "a", buffering=1)  # noqa: SIM115
    report.write("go\n")
    try:
        if order["call"] == "undo":
            engine.undo(order["request"])
        else:
            getattr(engine, order["call"])(kinds[order["call"]](**fields(order["request"])))
    except EngineError as error:
        report.write(f"failed {type(error).__name__} {error.after} {error}\n")
    except BaseException as error:
        report.write(f"crashed {error!r}\n")
        raise
    else:
        report.write("done\n")


if __name__ == "__main__":
    main()
