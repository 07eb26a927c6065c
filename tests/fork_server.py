"""Processes that run lines of Python and are forked from one process that has imported torch, and nothing of this
library: the import takes seconds of a core, and tests need many fresh processes.

What Python or torch reads when it starts (PYTHONDONTWRITEBYTECODE, OMP_NUM_THREADS) is the server's: a test of that
needs a process of its own.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Reads requests, one a line, and answers with the status of the process. At the end of a process only its exit
# functions run: to take a forked torch apart would take half a second of a core.
SERVER = """
import atexit, gc, json, os, sys, torch, traceback
gc.freeze()
while True:
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    request = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
for number, (path, mode) in enumerate(((os.devnull, os.O_RDONLY), *((p, os.O_WRONLY) for p in request["outputs"]))):
    os.dup2(os.open(path, mode), number)
sys.stdin = open(0, closefd=False)
os.chdir(request["cwd"])
os.environ.clear()
os.environ.update(request["environment"])
sys.argv = ["-c", *request["arguments"]]
sys.path[1:1] = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
status = 0
try:
    exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
except SystemExit as end:
    status = end.code or 0
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
except BaseException:
    traceback.print_exc()
    status = 1
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
"""

_lock = threading.Lock()  # the server has one child at a time


@functools.cache
def _server():
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", SERVER], env=environment, stdin=pipe, stdout=pipe, text=True)


def run_code(code, *arguments, cwd=ROOT, environment=None, timeout=300):
    """Runs the code as `python -c code *arguments`, with this repository on its path, in a process that has imported
    torch. `environment`: what is set beside the variables of this process; None as a value: not set there."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})}
    with tempfile.TemporaryDirectory() as folder, _lock:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        for path in outputs:
            path.touch()
        request = {
            "code": textwrap.dedent(code),
            "arguments": list(map(str, arguments)),
            "cwd": str(cwd),
            "environment": {name: value for name, value in variables.items() if value is not None},
            "outputs": list(map(str, outputs)),
        }
        server = _server()
        timer = threading.Timer(timeout, server.kill)
        timer.start()
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        timer.cancel()
        stdout, stderr = (path.read_text() for path in outputs)
        if not answer:
            _server.cache_clear()
            raise AssertionError(f"the process ran longer than {timeout} s:\n{stdout}\n{stderr}")
        return subprocess.CompletedProcess(code, int(answer), stdout, stderr)
