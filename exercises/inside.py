"""In the copy of a lesson, in every process: the learner's function, and where each rank is.

Copied there as `exercise_inside.py`; it imports nothing of the workbook. Every half second each
rank writes into the folder `seen` in which line each of its threads is, and for how long: when a
run hangs, this says who waits.
"""

import ast
import contextlib
import json
import math
import os
import re
import sys
import threading
import time
from pathlib import Path

PERIOD_S = 0.5
BUSY = 0.2  # of a period: a thread that has computed for longer does not wait
HERE = Path(__file__).parent
GIVEN = json.loads((HERE / "exercise.json").read_text())
NOT_THEIRS = {"_beat", "observe"}  # threads of the launcher, and of this file


def function(name, namespace):
    """The learner's function, defined in the module of the lesson, whose names it can use."""
    exec(compile(ast.parse(GIVEN["source"]), GIVEN["path"], "exec"), namespace)
    return namespace[name]


class method:  # used like a function
    """Stands for the learner's method until Python has made its class."""

    def __init__(self, name, namespace):
        self.name, self.namespace = name, namespace

    def __set_name__(self, owner, name):
        tree = ast.parse(GIVEN["source"])
        at = [getattr(node, "name", None) for node in tree.body].index(name)
        # `super()` looks around the function for a variable of this name.
        (factory,) = ast.parse(f"def _bind(__class__):\n    return {name}").body
        factory.body.insert(0, tree.body[at])
        tree.body[at] = factory
        exec(compile(tree, GIVEN["path"], "exec"), self.namespace)
        bound = self.namespace.pop("_bind")(owner)
        getattr(bound, "__func__", bound).__qualname__ = f"{owner.__qualname__}.{name}"
        setattr(owner, name, bound)


def predictions():
    """Print what the learner's function predicts for each line of standard input, in JSON."""
    namespace = {"__name__": "prediction"}
    predict = function(GIVEN["function"], namespace)
    for line in sys.stdin:
        number = predict(**json.loads(line))
        is_number = isinstance(number, int | float) and math.isfinite(number)
        print(f"predicted: {json.dumps(number if is_number else repr(number))}", flush=True)


def observe():
    """Write down, again and again, where the threads of this process are."""
    before, began = {}, {}
    while True:
        time.sleep(PERIOD_S)
        now, threads = time.monotonic(), []
        for ident, frame in sys._current_frames().items():
            frames = list(_frames(frame))
            seen = _place(frames)
            if seen is None:
                continue
            cpu = _cpu_s(ident)
            token = frames[0].f_code.co_filename, frames[0].f_lineno, seen["line"]
            _, since, last_cpu = before.get(ident, (None, now, cpu))
            if before.get(ident, [None])[0] != token or cpu - last_cpu > BUSY * PERIOD_S:
                since = now
            before[ident] = token, since, cpu
            call = id(frames[seen.pop("depth")])
            if began.get(ident, [None])[0] != call:
                began[ident] = call, now, cpu
            threads.append({**seen, "still_s": now - since, "inside_s": now - began[ident][1],
                            "computed_s": cpu - began[ident][2]})
            del frames, frame
        if "RANK" not in os.environ and not any(thread["own"] for thread in threads):
            continue  # the launcher, or a rank that has not begun
        with contextlib.suppress(OSError):  # the copy is being removed
            _write(now, sorted(threads, key=lambda thread: not thread["own"]))


def _frames(frame):
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frames):
    """The innermost line of the learner, or else of the lesson; None in the threads of others."""
    if any(frame.f_code.co_name in NOT_THEIRS for frame in frames):
        return None
    files = [frame.f_code.co_filename for frame in frames]
    own = [depth for depth, file in enumerate(files) if file == GIVEN["path"]]
    lesson = [depth for depth, file in enumerate(files)
              if file.startswith(str(HERE)) and "/common/" not in file]
    if not own and not lesson:
        return None
    taught = [depth for depth in lesson if not re.search("check|record", files[depth])]
    depth = (own or taught or lesson)[0]
    file = files[depth] if own else os.path.relpath(files[depth], HERE)
    return {"own": bool(own), "file": file, "line": frames[depth].f_lineno, "depth": depth}


def _cpu_s(ident):
    """Seconds that a thread has computed; 0 where the system does not say."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(ident))
    except (AttributeError, OSError):
        return 0.0


def _write(now, threads):
    rank = int(os.environ.get("RANK", 0))
    module = sys.modules.get(GIVEN["program"].removesuffix(".py").replace("/", "."))
    role = f"rank{rank}"
    with contextlib.suppress(Exception):
        role = module.role_name(rank, int(os.environ["WORLD_SIZE"]))
    path = HERE / "seen" / f"{rank}.json"
    temporary = path.with_suffix(f".{os.getpid()}")
    state = {"rank": rank, "role": role, "pid": os.getpid(), "time": now, "threads": threads}
    temporary.write_text(json.dumps(state))
    temporary.replace(path)


def _start():
    threading.Thread(target=observe, daemon=True).start()


if __name__ == "__main__":
    _start()
    predictions()
else:
    os.register_at_fork(after_in_child=_start)  # ranks are forked from a server that has this
    if "forkserver" not in " ".join(sys.orig_argv):  # which must have no threads
        _start()
