"""The product files that run one chat request, and the forms that it takes, in warm processes of router, prefill and decode.

Usage: python tools/traced_request.py [--list]. For another revision, run this file with that checkout's interpreter.

A file counts when a function of it is called, returns or calls a builtin between question and last byte. Threads that poll run at
the same time: files that also run in two seconds without a request are counted apart. A form is a class of plain data (a msgspec
struct, a dataclass, a named tuple, a protobuf message) whose values carry the question's text or tokens, or those of the answer, as
arguments or results of the product's functions. It imports nothing of the repository, so it runs on old revisions.
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
from typing import Any

import msgspec

RECORDER = r"""
import json, os, sys, threading, time
folder, seen, forms, marks = os.environ["TRACED_REQUEST"], set(), {}, None
known = {}

def fields_of(kind):
    if kind not in known:
        names = None
        if kind.__module__.startswith("pdserve."):
            names = getattr(kind, "__struct_fields__", None) or tuple(getattr(kind, "__dataclass_fields__", ()))
            names = names or getattr(kind, "_fields", None)
            if not names and hasattr(kind, "DESCRIPTOR") and hasattr(kind.DESCRIPTOR, "fields"):
                names = tuple(field.name for field in kind.DESCRIPTOR.fields)
        known[kind] = names or None
    return known[kind]

def carries(value, name, depth=2):
    if isinstance(value, str):
        return marks["text"] in value or (len(value) > 3 and value in marks["answer"])
    if isinstance(value, (bytes, bytearray)):
        value = bytes(value)
        return any(part in value for part in marks["bytes"])
    if isinstance(value, dict):
        return depth > 0 and any(carries(one, name, depth - 1) for one in list(value.values())[:16])
    if isinstance(value, (list, tuple)) or hasattr(value, "tolist") or type(value).__name__.startswith("Repeated"):
        try:
            if hasattr(value, "tolist"):
                # weights and caches are arrays, too: to list one of those stops its process for seconds
                if "token" not in name or value.nbytes > 1 << 20:
                    return False
                values = value.tolist()
            else:
                values = list(value)
        except Exception:
            return False
        if not isinstance(values, list) or not values:
            return False
        if isinstance(values[0], int):
            if "token" not in name:
                return False
            prompt, last = marks["prompt"], len(marks["prompt"])
            if any(values[i:i + last] == prompt for i in range(len(values) - last + 1)):
                return True
            return len(values) <= 8 and any(one in marks["tokens"] for one in values)
        return depth > 0 and any(carries(one, name, depth - 1) for one in values[:16])
    return False

def look(value):
    names = fields_of(type(value))
    if names is None:
        return
    form = type(value).__module__.removeprefix("pdserve.") + "." + type(value).__name__
    if form in forms:
        return
    for name in names:
        try:
            found = carries(getattr(value, name), name)
        except Exception:
            continue
        if found:
            forms[form] = time.time()
            return

def record(frame, event, argument):
    name = frame.f_code.co_filename
    seen.add(name)
    if marks and "/pdserve/" in name:
        if event == "call":
            for value in list(frame.f_locals.values()):
                look(value)
        elif event == "return":
            look(argument)

def watch():
    global marks
    sys.setprofile(None)
    while True:
        name = next((n for n in os.listdir(folder) if n.endswith(".on")), None)
        if name is not None:
            seen.clear()
            forms.clear()
            with open(os.path.join(folder, name)) as mark:
                told = json.load(mark)
            if told:
                told["bytes"] = [bytes.fromhex(one) for one in told["bytes"]]
            marks = told or None
            while os.path.exists(os.path.join(folder, name)):
                time.sleep(0.01)
            marks = None
            files = sorted(f for f in seen.copy() if "/pdserve/" in f and "_pb2" not in f)
            role = next((r for r in ("prefill", "decode") if r in sys.orig_argv), "router")
            with open(os.path.join(folder, f"{name[:-3]}.{role}.{os.getpid()}.json"), "w") as out:
                json.dump({"files": files, "forms": dict(forms)}, out)
        time.sleep(0.01)

threading.Thread(target=watch, daemon=True).start()
threading.setprofile(record)
sys.setprofile(record)
"""
START_S = 600.0
IDLE_S = 2.0
QUESTION = "What is the capital of France?"
MARK = "capital of France"
"""Part of the question by which its text is known."""
NUM_MARKED = 6
"""Tokens at the prompt's end by which its ids are known."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(url: str, text: str, **fields: object) -> bytes:
    """The bytes of the answer, a stream unless `fields` say otherwise."""
    body: dict[str, object] = {
        "model": "demo",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8,
        "temperature": 0,
    }
    data = json.dumps(body | {"stream": True} | fields).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return bytes(answer.read())


def marks_of(url: str) -> dict[str, Any]:
    """Marks by which the recorders know the request's data: text, token ids, and bytes of both as they are serialised."""
    # with a salt, so that the traced request finds nothing of this one in a cache
    answer = json.loads(ask(url, QUESTION, stream=False, return_token_ids=True, cache_salt="marks"))
    [choice] = answer["choices"]
    prompt = answer["prompt_token_ids"][-NUM_MARKED:]
    return {
        "text": MARK,
        "prompt": prompt,
        "tokens": choice["token_ids"],
        "answer": choice["message"]["content"],
        "bytes": [
            MARK.encode().hex(),
            b"".join(map(msgspec.msgpack.encode, prompt)).hex(),
            *(array(prompt, size).hex() for size in (4, 8)),
        ],
    }


def array(numbers: list[int], size: int) -> bytes:
    return b"".join(n.to_bytes(size, "little") for n in numbers)


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def recorded(folder: Path, name: str, url: str | None, marks: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Role -> files and forms, meanwhile. url: where to ask the question; None: wait for `IDLE_S`."""
    mark = folder / f"{name}.on"
    (folder / "new").write_text(json.dumps(marks))
    (folder / "new").rename(mark)
    time.sleep(0.3)
    if url is None:
        time.sleep(IDLE_S)
    elif not ask(url, QUESTION).rstrip().endswith(b"[DONE]"):
        raise RuntimeError("the answer has no end")
    else:
        time.sleep(0.3)
    mark.unlink()
    time.sleep(2)
    found: dict[str, dict[str, Any]] = {}
    for path in folder.glob(f"{name}.*.json"):
        read = json.loads(path.read_text())
        role = found.setdefault(path.name.split(".")[1], {"files": set(), "forms": {}})
        role["files"] |= {file.partition("/pdserve/")[2] for file in read["files"]}
        role["forms"] |= read["forms"]
    return found


def traced() -> dict[str, Any]:
    """Per role and together the files, how many of them also run without a request, and the forms; then all forms in order."""
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
            marks = marks_of(url)
            for question in ("What is the capital of Spain?", "What is the capital of Italy?"):
                ask(url, question)
            idle = recorded(folder, "idle", None, {})
            busy = recorded(folder, "busy", url, marks)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    roles = {}
    for role in ("router", "prefill", "decode"):
        files = busy[role]["files"]
        roles[role] = {
            "files": sorted(files), "polling": len(files & idle[role]["files"]), "forms": sorted(busy[role]["forms"])
        }  # fmt: skip
    every, polling = (set().union(*(role["files"] for role in one.values())) for one in (busy, idle))
    first: dict[str, float] = {}
    for found in busy.values():
        for form, moment in found["forms"].items():
            first[form] = min(moment, first.get(form, moment))
    forms = sorted(first, key=lambda form: first[form])
    roles["together"] = {"files": sorted(every), "polling": len(every & polling), "forms": sorted(forms)}
    return {"roles": roles, "forms": forms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--list", action="store_true", help="print files and forms, too")
    arguments = parser.parse_args()
    record = traced()
    for name, role in record["roles"].items():
        print(
            f"{name:<8} {len(role['files']):4d} files, {role['polling']} of them also without a request; {len(role['forms'])} forms"
        )
    if arguments.list:
        print("\n".join([*record["roles"]["together"]["files"], "", *record["forms"]]))


if __name__ == "__main__":
    main()
