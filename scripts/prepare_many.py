"""Streams made-up conversations through `draftsmith data prepare`, and says what it took: no file of them is kept.

    python scripts/prepare_many.py 5000000 --target SMOLLM2_FOLDER

They are written into the command's standard input while they are made (`make_conversations`); the command keeps a copy
in the temporary folder, because it reads its data twice. Prints one JSON object: conversations, bytes, tokens, wall and
CPU seconds of the command, its largest resident memory (pages of mapped files included). Exit code 1 if that is above
--limit-gib.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from make_conversations import conversations


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--target", required=True, help="directory or hub name; only its tokenizer is used")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--limit-gib", type=float, default=2.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="draftsmith-many-") as folder:
        content = {
            "target": {"path": arguments.target},
            "data": {"train": "-", "cache": f"{folder}/cache"},
            "rows": {"length": arguments.length},
        }
        config = Path(folder, "run.yaml")
        config.write_text(json.dumps(content), encoding="utf-8")  # which is YAML as well
        began, written = time.monotonic(), 0
        command = [sys.executable, "-m", "draftsmith", "data", "prepare", str(config), "--json"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        said: list[bytes] = []
        reader = threading.Thread(target=lambda out=process.stdout: said.append(out.read()))
        reader.start()
        for conversation in conversations(arguments.count):
            line = json.dumps(conversation).encode() + b"\n"
            process.stdin.write(line)
            written += len(line)
        process.stdin.close()
        streamed = time.monotonic() - began
        code = process.wait()
        reader.join()
        if code:
            return code
        prepared = json.loads(said[0])
        cache = sum(path.stat().st_size for path in Path(folder, "cache").rglob("*") if path.is_file())
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = prepared["report"]
    found = {
        "conversations": report["conversations"],
        "bytes": written,
        "tokens": prepared["tokens"],
        "rows": report["train"]["rows"],
        "padding": report["train"]["waste"],
        "cache_bytes": cache,
        "seconds": round(time.monotonic() - began, 1),
        "seconds_streaming": round(streamed, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_gib": round(prepared["peak_bytes"] / 2**30, 3),
        "limit_gib": arguments.limit_gib,
    }
    print(json.dumps(found))
    return 0 if found["peak_gib"] <= arguments.limit_gib else 1


if __name__ == "__main__":
    sys.exit(main())
