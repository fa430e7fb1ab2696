"""Dumps a container and stands still at `dumped`, with a verdict written, so that a test can kill it.

undecided.py CHECKOUT ORDER; ORDER is JSON: {"settings": {...}, "request": {...}, "verdict": "hold", "report":
PATH}. Writes its state as one word to the report: `waiting`, then `done` or `failed`.
"""

import json
import sys
import time
from pathlib import Path


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    from engines import registry
    from engines.api import CheckpointRequest, EngineSettings

    order = json.loads(sys.argv[2])
    report = Path(order["report"])

    def fields(values):
        paths = {key for key, value in values.items() if key.endswith("_path") and value} - {"search_path"}
        return {key: Path(value) if key in paths else value for key, value in values.items()}

    request = fields(order["request"])

    def on_phase(phase, info):
        if phase == "dumped":
            if order["verdict"]:
                request["verdict_path"].write_text(order["verdict"] + "\n")
            report.write_text("waiting")
            time.sleep(600)

    engine = registry.create("criu", EngineSettings(**fields(order["settings"])))
    try:
        engine.checkpoint(CheckpointRequest(**(request | {"on_phase": on_phase})))
    except BaseException:
        report.write_text("failed")
        raise
    report.write_text("done")


if __name__ == "__main__":
    main()
