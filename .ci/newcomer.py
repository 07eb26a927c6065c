"""A newcomer's first commands, with their times: `python .ci/newcomer.py` (`make newcomer`).

Runs the commands of README.md in a fresh clone of the last commit, each example briefly, and the wheel in a second
environment. Prints a table of seconds; exits with 1 if a step fails. Takes minutes to an hour.
"""

import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = {  # examples that need no external model or data
    "train_char_gpt.py": "--quick",
    "bert_block.py": "--quick",
    "train_long.py": "--quick",
}


def readme_commands(text):
    """The command lines of the sections "Install" and "The two commands", without comments."""
    found = []
    for title in ("Install", "The two commands"):
        block = re.search(rf"## {title}\n.*?```\n(.*?)```", text, re.DOTALL)
        assert block, f"README.md has no commands under {title}"
        found.append([line.split("#")[0].strip() for line in block[1].splitlines() if line.strip()])
    return tuple(found)


def main():
    install, make = readme_commands((ROOT / "README.md").read_text())
    results = []

    def step(name, command, folder):
        started = time.monotonic()
        done = subprocess.run(
            command, shell=True, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        results.append((name, time.monotonic() - started, done.returncode))
        print(f"{results[-1][1]:7.0f} s  {'ok' if not done.returncode else 'FAILED'}  {name}", flush=True)
        if done.returncode:
            print("\n".join(done.stdout.splitlines()[-15:]), flush=True)
        return not done.returncode

    with tempfile.TemporaryDirectory() as temporary:
        clone = Path(temporary) / "fused_layernorm"
        step("git clone", f"git clone -q {shlex.quote(str(ROOT))} {clone}", temporary)
        for command in make:
            step(command, command, clone)
        for name, options in EXAMPLES.items():
            step(f"examples/{name} {options}".strip(), f".venv/bin/python examples/{name} {options}", clone)
        if step("make wheel", "make wheel", clone):
            torch = subprocess.check_output(
                [clone / ".venv/bin/python", "-c", "import torch; print(torch.__version__.split('+')[0])"], text=True
            ).strip()
            step("a second environment with torch", f"{sys.executable} -m venv second && "
                 f"second/bin/python -m pip install -q torch=={torch} setuptools ninja", temporary)  # fmt: skip
            step("its wheel", f"second/bin/python -m pip install {clone}/dist/*.whl && "
                 "second/bin/python -m fused_layernorm", temporary)  # fmt: skip
            for command in install[1:]:
                step(command, f". {temporary}/second/bin/activate && {command}", clone)
    print("\n| step | seconds |\n|---|---|")
    for name, seconds, status in results:
        print(f"| `{name}` | {'failed' if status else round(seconds)} |")
    return any(status for _, _, status in results)


if __name__ == "__main__":
    sys.exit(main())
