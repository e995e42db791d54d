"""Records from outside what a process sends, whom it calls, and what it waits for.

    messages.start(folder, rank, roles, title, machine)    in each process, before it joins
    {"lanes": ..., "ops": ...} = merge.merged(folder)      where the files of all processes are

An operation begins and, perhaps, ends: a run that is killed leaves it open. What is recorded:

    call        an RPC, until its answer is there: `rpc_sync`, `rpc_async`, `remote`, of an RRef too
    run         its execution in the other process, until the answer leaves
                (`rrefs` of both: those that they forward to another process than their owner's)
    fetch       `RRef.to_here`
    hold        an RRef that this process has, until it drops it
    future      a `torch.futures.Future` that a lesson has made, until it is set
    context     of distributed autograd, in the process that opened it, until it is left
    wait        for a future, for an `isend`, for the backward of distributed autograd
    send, recv  also `isend` and `irecv`, until their `wait`
    collective  with its group and its number there; also joining and leaving

What C++ sends itself cannot be seen from Python: the messages of distributed autograd, the
all_reduce of DistributedDataParallel, calls of torch's own operators (`rpc_sync(to, torch.add)`).
"""

import contextlib
import functools
import inspect
import itertools
import json
import mmap
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import autograd, rpc
from torch.distributed.rpc import api, internal, rref_proxy

from tracing import timeline

FULL = 2**22  # bytes of a file; a process keeps two files, the last ones
TRACED = "_traced"  # the argument that brings the identity of a call to the process that runs it
PEERS = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}
ROOTS = {"broadcast": "src", "broadcast_object_list": "src", "scatter": "src",
         "scatter_object_list": "src", "reduce": "dst", "gather": "dst", "gather_object": "dst"}
COLLECTIVES = [*ROOTS, "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object",
               "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
               "barrier", "monitored_barrier", "new_group", "init_process_group"]
RREF = re.compile(r"created_on=(\d+), local_id=(\d+)")  # in the text of an RRef
_as_json = json.JSONEncoder(default=str, separators=(",", ":")).encode
_recorder = None


class Here(threading.local):
    """Holds what a thread is in."""

    depth = 0  # above 0: in a recorded function, which calls others of these
    waits = 0  # how many times it has waited so far
    call, sync = None, False  # the RPC that it is about to send
    run = None  # the operation in which RPC runs a function here
    rrefs = ()  # (identity, rank of the owner) of each RRef in what it is about to send


here = Here()


class Recorder:
    """Appends events to a file, one line of JSON each; they stay if the process is killed.

    The file is mapped memory: a call of the system for each event would make every thread give up
    Python's lock. A full file becomes the older one of two, in place of the one before it.

    Args:
        path: of the file.
        header: the first event; every file has it.
    """

    def __init__(self, path: Path, *header: object) -> None:
        self.path, self.ids, self.open = path, itertools.count(1), {0: ("header", *header)}
        self.lock = threading.RLock()  # RLock: a finalizer may come in between
        for left in (path, older(path)):  # by an earlier run
            left.unlink(missing_ok=True)
        self._next_file()

    def _next_file(self) -> None:
        """Go on in a new file, which begins with the header and with what is still open."""
        if self.path.exists():
            self.path.replace(older(self.path))
        with self.path.open("wb+") as file:
            if hasattr(os, "posix_fallocate"):  # or a full disk would kill the process later
                os.posix_fallocate(file.fileno(), 0, FULL)
            file.truncate(FULL)
            self.memory, self.at = mmap.mmap(file.fileno(), FULL), 0
        for op, event in list(self.open.items()):
            if self.at > FULL // 2:  # so many are open that little else would find room
                del self.open[op]
            else:
                self.write(event)

    def write(self, event: tuple) -> None:
        """Write an event of plain values; texts in the place of others."""
        line = f"{_as_json(event)}\n".encode()
        with self.lock:
            if self.at + len(line) > FULL:
                self._next_file()
            at, self.at = self.at, self.at + len(line)
            self.memory[at : self.at] = line

    def begin(self, kind: str, where: list | None = None, thread: int | None = None,
              op: int | None = None, **about: object) -> int:
        """Write that an operation begins, here or at `where`; return its number."""
        op = op or next(self.ids)
        here.waits += kind == "wait" or bool(about.get("waits"))
        event = ("begin", op, time.time(), kind, thread or threading.get_ident(),
                 timeline.here() if where is None else where, about)
        self.open[op] = event
        self.write(event)
        return op

    def finish(self, op: int, **about: object) -> None:
        """Write that an operation has ended, once."""
        if self.open.pop(op, None) is not None:
            self.write(("end", op, time.time(), about))


def start(folder: Path, rank: int, roles: list[str], title: str, machine: dict) -> None:
    """Record the messages and spans of this process from now on.

    Args:
        folder: for its file, `rank-0`.
        rank: of this process.
        roles: the names of all ranks.
        title: of the run.
        machine: for the captions of pictures, what `report.machine` returns.
    """
    global _recorder
    folder.mkdir(parents=True, exist_ok=True)
    _recorder = Recorder(folder / f"rank-{rank}", rank, roles, title, machine,
                         threading.main_thread().ident)
    timeline.start(roles[rank], lambda span: write("span", here.run, span))
    _record_groups(len(roles))
    _record_calls(rank)
    _record_autograd()
    _record_rrefs()
    _record_futures()


def older(path: Path) -> Path:
    """Return the path of the older one of the two files of a process."""
    return path.with_name(f"older-{path.name}")


def write(*event: object) -> None:
    """Write what work.py has recorded."""
    _recorder.write(event)


def failed(error: BaseException) -> None:
    """Record that this process ends by an exception."""
    _recorder.begin("failed", error=_in_a_line(error))


def _in_a_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def replace(owner: object, name: str, make: Callable) -> None:
    """Put `make(what there is)` in the place of a function, under its name."""
    there = getattr(owner, name, None)
    if there is not None:
        setattr(owner, name, functools.wraps(there)(make(there)))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Record nothing of what this thread does meanwhile."""
    here.depth += 1
    try:
        yield
    finally:
        here.depth -= 1


def _is_inside() -> bool:
    return here.depth > 0


def _within(function: Callable, op: int, end: bool, /, *args: object, **kwargs: object) -> object:
    """Call a function for an operation; what it calls itself is not recorded.

    The operation ends with it, if `end`; by an exception always.
    """
    try:
        with quiet():
            result = function(*args, **kwargs)
    except BaseException as error:
        _recorder.finish(op, error=_in_a_line(error))
        raise
    if end:
        _recorder.finish(op)
    return result


def _nbytes(value: object) -> int | None:
    """Return the bytes of a tensor, or of the tensors in a list; None where there are none."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    sizes = [_nbytes(item) for item in value] if isinstance(value, list | tuple) else []
    return None if not sizes or None in sizes else sum(sizes)


# --- groups: send, recv, collectives


def _record_groups(world_size: int) -> None:
    works, counts = weakref.WeakKeyDictionary(), {}

    def recorder_of(name: str) -> Callable:
        def make(function):
            names = list(inspect.signature(function).parameters)

            def recorded(*args, **kwargs):
                if _is_inside():
                    return function(*args, **kwargs)
                given = dict(zip(names, args, strict=False)) | kwargs
                about, kind = _about(name, given, world_size), PEERS.get(name, "collective")
                kind = {"dst": "send", "src": "recv"}.get(kind, kind)
                if kind == "collective":
                    about["number"] = counts[about["group"]] = counts.get(about["group"], -1) + 1
                waits = not (name in ("isend", "irecv") or given.get("async_op"))
                op = _recorder.begin(kind, name=name, waits=waits, **about)
                result = _within(function, op, False, *args, **kwargs)
                if isinstance(result, dist.Work):
                    works[result] = op
                elif name == "recv" and about["peer"] is None:
                    _recorder.finish(op, peer=result)
                else:
                    _recorder.finish(op)
                return result

            return recorded

        return make

    for name in (*PEERS, *COLLECTIVES):
        replace(dist, name, recorder_of(name))
        if hasattr(dist, name):  # P2POp compares the two
            setattr(dist.distributed_c10d, name, getattr(dist, name))

    def work_wait(function):
        def wait(work, *args, **kwargs):
            if _is_inside() or work not in works:
                return function(work, *args, **kwargs)
            waiting = _recorder.begin("wait", name="wait", on=works[work])
            result = _within(function, waiting, True, work, *args, **kwargs)
            _recorder.finish(works.pop(work))
            return result

        return wait

    replace(dist.Work, "wait", work_wait)

    def shutdown(function):
        def recorded(*args, **kwargs):
            op = _recorder.begin("collective", name="rpc.shutdown", waits=True, group="rpc",
                                 ranks=[*range(world_size)], number=1)
            return _within(function, op, True, *args, **kwargs)

        return recorded

    replace(rpc, "shutdown", shutdown)
    replace(rpc, "init_rpc", lambda function: lambda *args, **kwargs: _within(
        function, _recorder.begin("collective", name="init_rpc", waits=True, group="rpc",
                                  ranks=[*range(world_size)], number=0), True, *args, **kwargs))


def _about(name: str, given: dict, world_size: int) -> dict:
    """Return what a function's arguments say: its group, its peer or root, its bytes."""
    group = given.get("group") if name != "new_group" else None
    ranks = dist.get_process_group_ranks(group) if group else [*range(world_size)]
    about = {"group": getattr(group, "group_name", None) if len(ranks) < world_size else "world",
             "ranks": ranks}
    side = PEERS.get(name) or ROOTS.get(name)
    if side:
        at = given.get(f"group_{side}")
        other = ranks[at] if at is not None else given.get(side, 0 if name in ROOTS else None)
        about["peer"] = other if name in PEERS or other is None else int(other)
    if name in PEERS:
        about["tag"] = given.get("tag", 0)
    sizes = [size for size in map(_nbytes, given.values()) if size]
    if sizes:
        about["bytes"] = min(sizes)  # of a list of pieces and a piece: what goes from one to one
    return about


# --- RPC


def _record_calls(rank: int) -> None:
    udf_type, run_function = internal.PythonUDF, internal._run_function
    local = rref_proxy._local_invoke, rref_proxy._local_invoke_async_execution
    ran = {}  # of a thread: the operation that it has run and will answer, and whom

    def python_udf(func, args, kwargs):  # what will be sent: here it gets its number
        here.call = None
        if _is_inside():
            return udf_type(func, args, kwargs)
        asked = args[3].pop(TRACED, None) if func in local else None
        name = (args[1] if func in local else "the type of an RRef"
                if func is api._rref_typeof_on_owner
                else getattr(func, "__qualname__", type(func).__name__))
        call = {"op": next(_recorder.ids), "name": name}
        if asked:  # perhaps by another thread
            call["where"], call["thread"], asked[2] = asked[0], asked[1], call["op"]
        here.call, here.rrefs = call, ()
        return udf_type(func, args, {**kwargs, TRACED: [rank, call["op"]]})

    api.PythonUDF = python_udf

    def sending(how: str) -> Callable:
        def make(function):
            def send(to, pickled, tensors, *args):
                call, here.call = here.call, None
                if call is None:
                    return function(to, pickled, tensors, *args)
                sync = how == "rpc" and here.sync
                size = len(pickled) + (_nbytes(tensors) or 0)
                way = how if how == "remote" else "rpc_sync" if sync else "rpc_async"
                op = _recorder.begin("call", to=to.id, bytes=size, how=way, waits=sync, **call,
                                     **_forwarded(to.id))
                result = _within(function, op, False, to, pickled, tensors, *args)
                if how == "remote":
                    _recorder.finish(op, rref=_hold(result, made=op))
                else:
                    _futures[result] = [None, None, op, sync]
                    if not sync:  # the end of that is the end of its wait
                        result.add_done_callback(lambda _: _recorder.finish(op))
                return result

            return send

        return make

    replace(api, "_invoke_rpc_python_udf", sending("rpc"))
    replace(api, "_invoke_remote_python_udf", sending("remote"))

    def invoke(function):
        def invoked(to, func, rpc_type, *args, **kwargs):
            here.sync = rpc_type is internal.RPCExecMode.SYNC
            return function(to, func, rpc_type, *args, **kwargs)

        return invoked

    replace(api, "_invoke_rpc", invoke)

    def invoke_proxy(function):
        def invoked(rref, rpc_api, name, timeout, *args, **kwargs):
            if _is_inside():
                return function(rref, rpc_api, name, timeout, *args, **kwargs)
            asked = [timeline.here(), threading.get_ident(), None, False]
            result = function(rref, rpc_api, name, timeout, *args, **kwargs, **{TRACED: asked})
            if isinstance(result, torch._C.Future):  # of the proxy; the call has another one
                _futures[result] = asked
            return result

        return invoked

    replace(rref_proxy, "_invoke_rpc", invoke_proxy)

    def run(call):
        caller = getattr(call, "kwargs", {}).pop(TRACED, None)
        if caller is None:
            return run_function(call)
        name = call.args[1] if call.func in local else getattr(call.func, "__qualname__", "")
        here.run = op = _recorder.begin("run", call=caller, name=name)
        waits = here.waits
        result = run_function(call)
        here.run, about = None, {"waited": True} if here.waits > waits else {}
        if isinstance(result, torch._C.Future):  # of an async_execution: it answers later
            result.add_done_callback(lambda _: _recorder.finish(op, **about))
        elif isinstance(result, internal.RemoteException):
            _recorder.finish(op, error=result.exception_type.__name__)
        else:
            _recorder.finish(op, **about)
            # By thread: of a thread of C++, what Python keeps for it is lost in between.
            ran[threading.get_ident()] = op, caller[0]
        return result

    internal._run_function = run

    def serialize(function):
        def answer(value):
            here.rrefs = ()
            data = function(value)
            op, to = ran.pop(threading.get_ident(), (None, None))
            if op and (about := _forwarded(to)):
                _recorder.write(("end", op, time.time(), about))
            return data

        return answer

    replace(internal, "serialize", serialize)


# --- distributed autograd


def _record_autograd() -> None:
    opened = weakref.WeakKeyDictionary()

    def enter(function):
        def recorded(context):
            number = function(context)  # the rank in 16 bits, then a count
            name = f"{number >> 48}.{number & (2**48 - 1)}"
            opened[context] = _recorder.begin("context", context=name)
            return number

        return recorded

    def leave(function):
        def recorded(context, *error):
            function(context, *error)
            _recorder.finish(opened.pop(context))

        return recorded

    replace(autograd.context, "__enter__", enter)
    replace(autograd.context, "__exit__", leave)
    replace(autograd, "backward", lambda function: lambda *args, **kwargs: _within(
        function, _recorder.begin("wait", name="dist_autograd.backward"), True, *args, **kwargs))


def has_context() -> bool:
    """Return whether this process takes part in a context of distributed autograd."""
    return (api._is_current_rpc_agent_set()  # else torch refuses to answer
            and autograd._get_debug_info()["num_autograd_contexts"] > 0)


def _rref_id(rref: rpc.PyRRef) -> str:
    """Return the identity of an RRef, "0.3": on which rank it was made, and its number there."""
    return ".".join(RREF.search(rpc.PyRRef.__str__(rref)).groups())


def _hold(rref: rpc.PyRRef, **about: object) -> str:
    """Record that this process has an RRef, until it is gone; return its identity."""
    name = _rref_id(rref)
    op = _recorder.begin("hold", rref=name, owner=rref.owner().id, **about)
    weakref.finalize(rref, _recorder.finish, op).atexit = False
    return name


def _forwarded(to: int) -> dict[str, list[str]]:
    """Return the RRefs in what is about to be sent to a rank, but those that it owns."""
    names = [name for name, owner in here.rrefs if owner != to]
    return {"rrefs": names} if names else {}


def _record_rrefs() -> None:
    pickler = internal._InternalRPCPickler

    def reduce(function):
        def sent(pickler, rref):
            here.rrefs += ((_rref_id(rref), rref.owner().id),)
            return function(pickler, rref)

        return sent

    replace(pickler, "_py_rref_reducer", reduce)

    def made(function):
        def init(rref, *args, **kwargs):
            function(rref, *args, **kwargs)
            if not _is_inside():
                _hold(rref)

        return init

    def fetch(function):
        def to_here(rref, *args, **kwargs):
            if _is_inside() or rref.is_owner():
                return function(rref, *args, **kwargs)
            op = _recorder.begin("fetch", rref=_rref_id(rref), to=rref.owner().id, waits=True)
            result = _within(function, op, False, rref, *args, **kwargs)
            _recorder.finish(op, bytes=_nbytes(result))
            return result

        return to_here

    received = pickler._py_rref_receiver

    @functools.wraps(received)  # its name is what is sent
    def receive(_, data):
        rref = received(data)
        _hold(rref)
        return rref

    pickler._py_rref_receiver = classmethod(receive)
    replace(rpc.RRef, "__init__", made)
    replace(rpc.PyRRef, "to_here", fetch)


# --- futures

_futures = weakref.WeakKeyDictionary()  # of calls: [where, thread, the call, is it sync]
_made = weakref.WeakKeyDictionary()  # by a lesson: its operation


def _record_futures() -> None:
    def wait(function):
        def recorded(future, *args):
            asked = _futures.get(future)
            sync = asked and asked[3]
            if _is_inside() or not sync and future.done():
                return function(future, *args)
            on, op = asked[2] if asked else _made.get(future), None
            if not sync and (where := timeline.here()):
                op = _recorder.begin("wait", where, name="Future.wait", on=on)
            try:
                return _within(function, on if sync else op, True, future, *args)
            except BaseException as error:
                if on:  # it has ended, too, and could not know how
                    _recorder.write(("end", on, time.time(), {"error": _in_a_line(error)}))
                raise

        return recorded

    def make(function):
        def init(future, **kwargs):
            function(future, **kwargs)
            if timeline.lesson_file(sys._getframe(1).f_code.co_filename):
                _made[future] = _recorder.begin("future", name="Future")

        return init

    def complete(function):
        def recorded(future, result):
            if future in _made:
                _recorder.finish(_made[future], done=timeline.here())
            function(future, result)

        return recorded

    replace(torch._C.Future, "wait", wait)
    replace(torch.futures.Future, "__init__", make)
    replace(torch.futures.Future, "set_result", complete)
    replace(torch.futures.Future, "set_exception", complete)
