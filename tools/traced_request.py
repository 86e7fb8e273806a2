"""The product files that run one chat request: router, prefill and decode are processes of their own, and warm.

Usage: python tools/traced_request.py. To look at another revision, run this file with that checkout's interpreter. A file counts
when a function of it is called, returns or calls a builtin between question and last byte. Threads that poll run beside it: files
that also run in two seconds without a request are counted apart. It imports nothing of the repository, so it runs on old revisions.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

RECORDER = """
import json, os, sys, threading, time
folder, seen = os.environ["TRACED_REQUEST"], set()
here = threading.local()
def record(frame, event, argument):
    seen.add(frame.f_code.co_filename)
def watch():
    sys.setprofile(None)
    while True:
        name = next((n for n in os.listdir(folder) if n.endswith(".on")), None)
        if name is not None:
            seen.clear()
            while os.path.exists(os.path.join(folder, name)):
                time.sleep(0.01)
            files = sorted(f for f in seen.copy() if "/pdserve/" in f and "_pb2" not in f)
            role = next((r for r in ("prefill", "decode") if r in sys.orig_argv), "router")
            with open(os.path.join(folder, f"{name[:-3]}.{role}.{os.getpid()}.json"), "w") as out:
                json.dump(files, out)
        time.sleep(0.01)
threading.Thread(target=watch, daemon=True).start()
threading.setprofile(record)
sys.setprofile(record)
"""
START_S = 600.0
IDLE_S = 2.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(url: str, text: str) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
    data = json.dumps(body | {"stream": True}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        if not answer.read().rstrip().endswith(b"[DONE]"):
            raise RuntimeError("the answer has no end")


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def recorded(folder: Path, name: str, during: float | tuple[str, str]) -> dict[str, set[str]]:
    """Role -> files that ran meanwhile. during: seconds of waiting, or URL and question."""
    mark = folder / f"{name}.on"
    mark.touch()
    time.sleep(0.3)
    if isinstance(during, tuple):
        ask(*during)
        time.sleep(0.3)
    else:
        time.sleep(during)
    mark.unlink()
    time.sleep(2)
    found: dict[str, set[str]] = {}
    for path in folder.glob(f"{name}.*.json"):
        files = {file.partition("/pdserve/")[2] for file in json.loads(path.read_text())}
        found.setdefault(path.name.split(".")[1], set()).update(files)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--list", action="store_true", help="print the files, too")
    shows_files: bool = parser.parse_args().list
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(RECORDER)
        port = free_port()
        command = [sys.executable, "-m", "pdserve.cli.main", "up", "--ask", "", "--port", str(port)]
        command += ["--grpc-port", str(free_port()), "--local-prefill", "never", "--connector", "tcp"]
        environ = os.environ | {"PYTHONPATH": name, "TRACED_REQUEST": name}
        process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
        url = f"http://127.0.0.1:{port}"
        try:
            until = time.monotonic() + START_S
            while not ready(url):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"the cluster did not start: {process.poll()}")
                time.sleep(0.2)
            for question in ("What is the capital of Spain?", "What is the capital of Italy?"):
                ask(url, question)
            idle = recorded(folder, "idle", IDLE_S)
            busy = recorded(folder, "busy", (url, "What is the capital of France?"))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    for role in ("router", "prefill", "decode"):
        print(
            f"{role:<8} {len(busy[role]):4d} files, of which {len(busy[role] & idle[role])} also run without a request"
        )
    every, polling = set().union(*busy.values()), set().union(*idle.values())
    print(f"together {len(every):4d} files, of which {len(every & polling)} also run without a request")
    if shows_files:
        print("\n".join(sorted(every)))


if __name__ == "__main__":
    main()
