"""Record from outside what a process sends, which process it calls, and what it waits for.

    messages.start(folder, rank, roles, title, machine)    in each process, before it joins
    record = merge.merged(folder)                          the files of all processes

An operation begins and usually ends. If the process is killed meanwhile, the operation stays open.

    call        an RPC until its answer arrives: `rpc_sync`, `rpc_async`, `remote`, also of an RRef
    run         execution of the call in the other process, until the answer leaves
                (`rrefs` of both: the RRefs that they forward to a process other than the owner)
    fetch       `RRef.to_here`
    hold        an RRef that this process holds, until it drops the RRef
    future      a `torch.futures.Future` that a lesson has created, until it is completed
    context     a context of distributed autograd in the process that opened it
    wait        a wait for a future, for an `isend`, for the backward pass of distributed autograd
    send, recv  also `isend` and `irecv`, until their `wait`
    collective  with its group and its number there; also joining and leaving

Python does not see what C++ sends: the messages of distributed autograd, the all_reduce of
DistributedDataParallel, calls of torch's own operators (`rpc_sync(to, torch.add)`).

Some wrapped functions are private. If this torch lacks one of them, messages of its kind are not
recorded, and the program runs as before.
"""

import functools
import inspect
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import autograd, rpc

from tracing.events import Recorder, here
from tracing.places import lesson_file

TRACED = "_traced"  # the argument that takes the identity of a call to the process that runs it
PEERS = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}
ROOTS = {"broadcast": "src", "broadcast_object_list": "src", "scatter": "src",
         "scatter_object_list": "src", "reduce": "dst", "gather": "dst", "gather_object": "dst"}
COLLECTIVES = [*ROOTS, "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object",
               "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
               "barrier", "monitored_barrier", "new_group", "init_process_group"]
RREF = re.compile(r"created_on=(\d+), local_id=(\d+)")  # in the text of an RRef
recorder = None  # of this process


def start(folder: Path, rank: int, roles: list[str], title: str, machine: dict) -> None:
    """Record this process from now on.

    Args:
        folder: Folder of the record; the file of this process is `rank-0`.
        rank: Rank of this process.
        roles: Names of all ranks.
        title: Title of the run.
        machine: What `report.machine` returns, for the caption of the picture.
    """
    global recorder
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(folder / f"rank-{rank}", rank, roles, title, machine,
                        threading.main_thread().ident)
    _record_groups(len(roles))
    for what, record in (("RPC calls", functools.partial(_record_calls, rank)),
                         ("RRefs", _record_rrefs), ("futures", _record_futures)):
        try:
            record()
        except (AttributeError, ImportError) as error:
            if rank == 0:
                print(f"note: {what} are not recorded with torch {torch.__version__}: {error}",
                      flush=True)


def failed(error: BaseException) -> None:
    """Record that an exception ends this process."""
    recorder.begin("failed", error=_in_a_line(error))


def _in_a_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def replace(owner: object, name: str, make: Callable) -> None:
    """Replace a function by `make(function)`, under the same name.

    Raises:
        AttributeError: The owner has no such function.
    """
    function = getattr(owner, name)
    setattr(owner, name, functools.wraps(function)(make(function)))


def _within(function: Callable, op: int, end: bool, /, *args: object,
            **kwargs: object) -> object:
    """Call a function for an operation, without recording what the function itself calls.

    An exception ends the operation. If `end` is true, a normal return ends it, too.
    """
    here.depth += 1
    try:
        result = function(*args, **kwargs)
    except BaseException as error:
        recorder.finish(op, error=_in_a_line(error))
        raise
    finally:
        here.depth -= 1
    if end:
        recorder.finish(op)
    return result


def _nbytes(value: object) -> int | None:
    """Return the bytes of a tensor, or of the tensors in a list; None if there are none."""
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
                if here.depth:
                    return function(*args, **kwargs)
                given = dict(zip(names, args, strict=False)) | kwargs
                about = _about(name, given, world_size)
                kind = {"dst": "send", "src": "recv"}.get(PEERS.get(name), "collective")
                if kind == "collective":
                    about["number"] = counts[about["group"]] = counts.get(about["group"], -1) + 1
                waits = not (name in ("isend", "irecv") or given.get("async_op"))
                op = recorder.begin(kind, name=name, waits=waits, **about)
                result = _within(function, op, False, *args, **kwargs)
                if isinstance(result, dist.Work):
                    works[result] = op
                elif name == "recv" and about["peer"] is None:
                    recorder.finish(op, peer=result)
                else:
                    recorder.finish(op)
                return result

            return recorded

        return make

    for name in (*PEERS, *COLLECTIVES):
        if hasattr(dist, name):
            replace(dist, name, recorder_of(name))
            setattr(dist.distributed_c10d, name, getattr(dist, name))  # P2POp compares the two

    def work_wait(function):
        def wait(work, *args, **kwargs):
            if here.depth or work not in works:
                return function(work, *args, **kwargs)
            waiting = recorder.begin("wait", name="wait", on=works[work])
            result = _within(function, waiting, True, work, *args, **kwargs)
            recorder.finish(works.pop(work))
            return result

        return wait

    def of_all(name: str, number: int) -> Callable:
        def make(function):
            def recorded(*args, **kwargs):
                op = recorder.begin("collective", name=name, waits=True, group="rpc",
                                    ranks=[*range(world_size)], number=number)
                return _within(function, op, True, *args, **kwargs)

            return recorded

        return make

    replace(dist.Work, "wait", work_wait)
    replace(rpc, "init_rpc", of_all("init_rpc", 0))
    replace(rpc, "shutdown", of_all("rpc.shutdown", 1))


def _about(name: str, given: dict, world_size: int) -> dict:
    """Return what a function's arguments say: the group, the peer or root, the bytes."""
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
        about["bytes"] = min(sizes)  # of a list of pieces and one piece: what one rank sends
    return about


# --- RPC


def _record_calls(rank: int) -> None:
    from torch.distributed.rpc import api, internal, rref_proxy

    udf_type, run_function, remote_exception = (
        internal.PythonUDF, internal._run_function, internal.RemoteException)
    local = rref_proxy._local_invoke, rref_proxy._local_invoke_async_execution
    type_of_rref, future_type, sync = (
        api._rref_typeof_on_owner, torch._C.Future, internal.RPCExecMode.SYNC)
    replaced = [(api, "_invoke_rpc_python_udf"), (api, "_invoke_remote_python_udf"),
                (api, "_invoke_rpc"), (rref_proxy, "_invoke_rpc"), (internal, "serialize")]
    for owner, name in replaced:
        getattr(owner, name)  # all of them or none
    ran = {}  # for each thread: the operation that the thread has run, and the rank that called

    def python_udf(func, args, kwargs):  # what will be sent gets its number here
        here.call = None
        if here.depth:
            return udf_type(func, args, kwargs)
        asked = args[3].pop(TRACED, None) if func in local else None
        name = (args[1] if func in local else "the type of an RRef" if func is type_of_rref
                else getattr(func, "__qualname__", type(func).__name__))
        call = {"op": next(recorder.numbers), "name": name}
        if asked:  # perhaps by another thread
            call["place"], call["thread"], asked[2] = asked[0], asked[1], call["op"]
        here.call, here.rrefs = call, ()
        return udf_type(func, args, {**kwargs, TRACED: [rank, call["op"]]})

    def sending(how: str) -> Callable:
        def make(function):
            def send(to, pickled, tensors, *args):
                call, here.call = here.call, None
                if call is None:
                    return function(to, pickled, tensors, *args)
                waits = how == "rpc" and here.sync
                size = len(pickled) + (_nbytes(tensors) or 0)
                named = how if how == "remote" else "rpc_sync" if waits else "rpc_async"
                op = recorder.begin("call", to=to.id, bytes=size, how=named, waits=waits,
                                        **call, **_forwarded(to.id))
                result = _within(function, op, False, to, pickled, tensors, *args)
                if how == "remote":
                    recorder.finish(op, rref=_hold(result, made=op))
                else:
                    _futures[result] = [None, None, op, waits]
                    if not waits:  # otherwise the call ends with its wait
                        result.add_done_callback(lambda _: recorder.finish(op))
                return result

            return send

        return make

    def invoke(function):
        def invoked(to, func, rpc_type, *args, **kwargs):
            here.sync = rpc_type is sync
            return function(to, func, rpc_type, *args, **kwargs)

        return invoked

    def invoke_proxy(function):
        def invoked(rref, rpc_api, name, timeout, *args, **kwargs):
            if here.depth:
                return function(rref, rpc_api, name, timeout, *args, **kwargs)
            asked = [recorder.place(), threading.get_ident(), None, False]
            result = function(rref, rpc_api, name, timeout, *args, **kwargs, **{TRACED: asked})
            if isinstance(result, future_type):  # the proxy's; the call has a future of its own
                _futures[result] = asked
            return result

        return invoked

    def run(call):
        caller = getattr(call, "kwargs", {}).pop(TRACED, None)
        if caller is None:
            return run_function(call)
        name = call.args[1] if call.func in local else getattr(call.func, "__qualname__", "")
        here.run = op = recorder.begin("run", 0, call=caller, name=name)
        waits = here.waits
        result = run_function(call)
        here.run, about = None, {"waited": True} if here.waits > waits else {}
        if isinstance(result, future_type):  # of an async_execution: the answer leaves later
            result.add_done_callback(lambda _: recorder.finish(op, **about))
        elif isinstance(result, remote_exception):
            recorder.finish(op, error=result.exception_type.__name__)
        else:
            recorder.finish(op, **about)
            # By thread, because Python's state of a thread of C++ is lost in between.
            ran[threading.get_ident()] = op, caller[0]
        return result

    def serialize(function):
        def answer(value):
            here.rrefs = ()
            data = function(value)
            op, to = ran.pop(threading.get_ident(), (None, None))
            if op and (about := _forwarded(to)):
                recorder.write("end", op, time.time(), about)
            return data

        return answer

    api.PythonUDF, internal._run_function = python_udf, run
    makers = sending("rpc"), sending("remote"), invoke, invoke_proxy, serialize
    for (owner, name), make in zip(replaced, makers, strict=True):
        replace(owner, name, make)
    _record_autograd()


def _record_autograd() -> None:
    opened = weakref.WeakKeyDictionary()

    def enter(function):
        def recorded(context):
            number = function(context)  # the rank in 16 bits, then a count
            name = f"{number >> 48}.{number & (2**48 - 1)}"
            opened[context] = recorder.begin("context", context=name)
            return number

        return recorded

    def leave(function):
        def recorded(context, *error):
            function(context, *error)
            recorder.finish(opened.pop(context))

        return recorded

    replace(autograd.context, "__enter__", enter)
    replace(autograd.context, "__exit__", leave)
    replace(autograd, "backward", lambda function: lambda *args, **kwargs: _within(
        function, recorder.begin("wait", name="dist_autograd.backward"), True, *args, **kwargs))


def _rref_id(rref: rpc.PyRRef) -> str:
    """Return the identity of an RRef, "0.3": the rank that created it, and its number there."""
    return ".".join(RREF.search(rpc.PyRRef.__str__(rref)).groups())


def _hold(rref: rpc.PyRRef, **about: object) -> str:
    """Record that this process holds an RRef, until it drops the RRef; return its identity."""
    name = _rref_id(rref)
    op = recorder.begin("hold", rref=name, owner=rref.owner().id, **about)
    weakref.finalize(rref, recorder.finish, op).atexit = False
    return name


def _forwarded(to: int) -> dict[str, list[str]]:
    """Return the RRefs in what the thread is about to send to a rank that does not own them."""
    rrefs, here.rrefs = here.rrefs, ()
    names = [_rref_id(rref) for rref in rrefs if rref.owner().id != to]
    return {"rrefs": names} if names else {}


def _record_rrefs() -> None:
    from torch.distributed.rpc.internal import _InternalRPCPickler as pickler

    received = pickler._py_rref_receiver

    def reduce(function):
        def sent(pickler, rref):
            here.rrefs += (rref,)
            return function(pickler, rref)

        return sent

    @functools.wraps(received)  # the message has its name
    def receive(_, data):
        rref = received(data)
        if not rref.is_owner():  # every call of an RRef brings it to its owner
            _hold(rref)
        return rref

    def made(function):
        def init(rref, *args, **kwargs):
            function(rref, *args, **kwargs)
            if not here.depth:
                _hold(rref)

        return init

    def fetch(function):
        def to_here(rref, *args, **kwargs):
            if here.depth or rref.is_owner():
                return function(rref, *args, **kwargs)
            op = recorder.begin("fetch", rref=_rref_id(rref), to=rref.owner().id, waits=True)
            result = _within(function, op, False, rref, *args, **kwargs)
            recorder.finish(op, bytes=_nbytes(result))
            return result

        return to_here

    replace(pickler, "_py_rref_reducer", reduce)
    pickler._py_rref_receiver = classmethod(receive)
    replace(rpc.RRef, "__init__", made)
    replace(rpc.PyRRef, "to_here", fetch)


# --- futures

_futures = weakref.WeakKeyDictionary()  # of calls: [place, thread, the call, whether it waits]
_made = weakref.WeakKeyDictionary()  # by a lesson: its operation


def _record_futures() -> None:
    def wait(function):
        def recorded(future, *args):
            asked = _futures.get(future)
            sync = asked and asked[3]
            if here.depth or not sync and future.done():
                return function(future, *args)
            on, op = asked[2] if asked else _made.get(future), None
            if not sync and (place := recorder.place()):
                op = recorder.begin("wait", place, name="Future.wait", on=on)
            try:
                return _within(function, on if sync else op, True, future, *args)
            except BaseException as error:
                if on:  # it has ended, too, and could not know how
                    recorder.write("end", on, time.time(), {"error": _in_a_line(error)})
                raise

        return recorded

    def make(function):
        def init(future, **kwargs):
            function(future, **kwargs)
            if lesson_file(sys._getframe(1).f_code.co_filename):
                _made[future] = recorder.begin("future", name="Future")

        return init

    def complete(function):
        def recorded(future, result):
            if future in _made:
                recorder.finish(_made[future], done=recorder.place())
            function(future, result)

        return recorded

    replace(torch._C.Future, "wait", wait)
    replace(torch.futures.Future, "__init__", make)
    replace(torch.futures.Future, "set_result", complete)
    replace(torch.futures.Future, "set_exception", complete)
