"""Progress of a ninja build: `python progress.py FOLDER COMMAND...` runs the command and prints a line to stderr
whenever another file in FOLDER has been compiled. Needs neither torch nor the package."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def told(folder: Path) -> Iterator[None]:
    """Count the files that ninja compiles in `folder` and print the count."""
    done, start = threading.Event(), time.time()

    def since_start(pattern: str) -> list[Path]:
        return [path for path in folder.rglob(pattern) if path.stat().st_mtime >= start]

    def watch() -> None:
        compiled = 0
        while not done.wait(1.0):
            with contextlib.suppress(OSError):  # a file that goes while it is looked at
                found = len(since_start("*.o"))
                if found > compiled:
                    compiled = found
                    plans = [path.read_text().count(".o: ") for path in since_start("build.ninja")]
                    total = f" of {max(plans)}" if plans else ""
                    seconds = time.time() - start
                    print(f"fused_layernorm: {found}{total} files compiled, {seconds:.0f} s", file=sys.stderr, flush=True)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


if __name__ == "__main__":
    with told(Path(sys.argv[1])):
        status = subprocess.run(sys.argv[2:]).returncode
    sys.exit(status)
