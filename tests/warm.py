"""Run Python programs without the seconds of their imports: a process that has imported torch forks them.

A test that starts a program would spend most of its time on importing torch: once in the launcher, once in the fork
server or in each rank of torchrun. `Popen` here is subprocess's, except that the new process is a fork of one server,
which has imported what the lessons need from elsewhere, and nothing of this repository. The program is executed as
`python script.py` would: as `__main__`, with its own arguments, environment, working folder and session.

What a fork does not show, such as how a fresh interpreter starts and is taken apart, tests with `cold=True` show, which
start theirs with `subprocess.Popen` itself (tests/helpers.py).
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import json
import os
import re
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path

PRELOAD = ["torch", "torch.distributed.rpc", "torch.distributed.optim", "torch.distributed.run", "torch._dynamo",
           "torch.distributed.checkpoint.state_dict", "torch.distributed.pipelining", "gymnasium", "joblib", "psutil", "matplotlib.figure", "matplotlib.backends.backend_agg"]
# Several runs share the cores, and a process that polls its shared memory would take the time of all others.
# What is started cold (tests/helpers.py) sends as it does for a user.
os.environ.setdefault("RPC_TRANSPORTS", "uv")
# For the same reason, one thread: a rank that is alone on its machine, or in its terminal, would have one for each core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
CLONE_NEWNET = 0x40000000  # of sched.h
PR_SET_NAME = 15  # of prctl.h
MADV_COLLAPSE = 25  # of mman.h


class Popen(subprocess.Popen):
    """A program that is forked; see `subprocess.Popen` for everything else."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags,
                       shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *others):
        start_new_session = others[5]  # after restore_signals, gid, gids, uid, umask
        args, streams = list(map(str, args)), (p2cread, c2pwrite, errwrite)
        namespace = args[3] if args[:3] == ["ip", "netns", "exec"] else None
        _, *argv = args[4:] if namespace else args  # the first is this Python
        request = {"argv": argv, "environ": dict(os.environ if env is None else env), "namespace": namespace,
                   "folder": str(cwd or os.getcwd()), "session": start_new_session}
        self._life = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._life.connect(address())
        descriptors = [default if stream == -1 else stream for default, stream in enumerate(streams)]
        socket.send_fds(self._life, [json.dumps(request).encode()], descriptors)
        self.pid = int(self._life.recv(100))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _internal_poll(self, _deadstate=None):
        return super()._internal_poll(_deadstate, lambda _, wait_flags: self._try_wait(wait_flags))

    def _try_wait(self, wait_flags):
        self._life.setblocking(wait_flags != os.WNOHANG)
        try:
            word = self._life.recv(100)
        except BlockingIOError:
            return 0, 0
        self._life.close()
        return self.pid, int(word or -1)


if sys.platform != "linux":  # the server needs /proc, sockets of messages and namespaces
    Popen = subprocess.Popen


owner = os.getpid()  # the process with which the server ends; all workers of pytest-xdist have their controller (tests/conftest.py)
_starting = threading.Lock()


def address():
    """Return the path of the server, which the first one starts who asks."""
    with _starting:  # a cache alone would let two threads start two servers
        return _started()


@functools.cache
def _started():
    path = f"/tmp/warm-{owner}"
    with open(f"{path}.lock", "w") as lock, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if probe.connect_ex(path):
            environ = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # read while torch is imported; the launcher sets it later
            server = subprocess.Popen([sys.executable, __file__, path, str(owner)], stdin=subprocess.DEVNULL,
                                      stdout=subprocess.PIPE, env=environ, start_new_session=True)
            with server.stdout as ready:
                assert ready.read(1)
            server.returncode = 0  # nobody waits for it
    return path


def as_python():
    """The text of an executable that is `python`, but that the server forks it."""
    return (f"#!{sys.executable}\nimport os, signal, sys\nsys.path.insert(0, {str(Path(__file__).parent.parent)!r})\n"
            f"from tests import warm\nwarm.address = lambda: {address()!r}\n"
            "python = warm.Popen([sys.executable, *sys.argv[1:]])\n"
            "signal.signal(signal.SIGINT, lambda *_: os.kill(python.pid, signal.SIGINT))  # it is in another session\n"
            "sys.exit(python.wait())\n")


def serve(address, owner):
    """Fork a process for each request and say how it ends. Returns only in the forked processes, with the request."""
    ended, wakeup = socket.socketpair()
    for end in (ended, wakeup):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup.fileno())
    lives = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, selectors.DefaultSelector() as selector:
        Path(address).unlink(missing_ok=True)  # of a killed server whose process id has come again
        listener.bind(address)
        listener.listen()
        over = os.pidfd_open(owner)
        for readable in (listener, ended, over):
            selector.register(readable, selectors.EVENT_READ)
        os.write(1, b".")
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if over in ready:
                for path in (address, f"{address}.lock"):
                    os.unlink(path)
                os._exit(0)
            if ended in ready:
                ended.recv(4096)
                with contextlib.suppress(ChildProcessError):
                    while (found := os.waitpid(-1, os.WNOHANG))[0]:
                        with contextlib.suppress(OSError), lives.pop(found[0]) as life:
                            life.send(str(found[1]).encode())
            if listener in ready:
                life, _ = listener.accept()
                message, streams, _, _ = socket.recv_fds(life, 2**20, 3)
                if not message:  # somebody has only looked whether there is a server
                    life.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    break
                life.send(str(pid).encode())
                lives[pid] = life
                for stream in streams:
                    os.close(stream)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for standard, stream in enumerate(streams):
        os.dup2(stream, standard)
    _keep_only(0, 1, 2)
    return json.loads(message)


def _keep_only(*kept):
    """Let go of all other files. Their numbers stay taken: Python objects that have them may still close them."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in (*kept, nothing):
            with contextlib.suppress(OSError):  # that of the listing itself
                os.fstat(descriptor)
                os.dup2(nothing, descriptor, inheritable=False)


_status = None  # with which this process leaves


def become(argv, environ, namespace, folder, session):
    """Be `python *argv`, as far as one can see; at its end leave at once (see `_leave`), if no exception ends it."""
    global _status
    if session:
        os.setsid()
    if namespace:
        with open(f"/run/netns/{namespace}") as there:
            assert ctypes.CDLL(None).setns(there.fileno(), CLONE_NEWNET) == 0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    try:
        run_as_main(argv, environ)
        _status = 0
    except SystemExit as end:
        _status = end.code if isinstance(end.code, int) else None if end.code else 0
        raise


def _leave():
    """Called as the last function of `atexit`: Python would now take apart what was forked, and so copy it first."""
    if _status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status)


def run_as_main(argv, environ):
    """Execute a program as `python *argv` would."""
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # torch has asked where it is; TMPDIR may be another one now
    sys.orig_argv = [sys.executable, *argv]
    unbuffered = argv[0] == "-u"
    argv = argv[unbuffered:]
    _open_streams(unbuffered)
    home = str(Path(__file__).parent)
    paths = [path for path in sys.path if path != home]
    sys.path[:] = [*filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)), *paths]
    if argv[:2] == ["-m", "torch.distributed.run"]:
        del sys.modules[argv[1]]  # imported already; runpy would warn
        given = dict(zip(argv, argv[1:], strict=False))
        attempts = 1 + int(given.get("--max_restarts", 0))
        waiting = [Waiting() for _ in range(attempts * int(given["--nproc_per_node"]))]
        subprocess_handler.Popen = functools.partial(_rank_of_torchrun, waiting)
    elif "RANK" not in environ:
        fork_the_fork_server()
    if argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        sys.path.insert(0, "")
        exec(argv[1], {"__name__": "__main__"})
    elif argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path.insert(0, str(Path(argv[0]).resolve().parent))
        runpy.run_path(os.path.abspath(argv[0]), run_name="__main__")


def _open_streams(unbuffered=False):
    """Have those of a fresh Python, whatever stood for them before the fork."""
    sys.stdin = os.fdopen(0, closefd=False)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        by_line = 1 if unbuffered or name == "stderr" else -1
        stream = os.fdopen(descriptor, "w", by_line, encoding="utf-8", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def fork_the_fork_server():
    """Let multiprocessing's fork server be a fork of this process as it is now, with all that it has imported."""
    from multiprocessing import util  # registers a function, see `_leave`

    util.spawnv_passfds = functools.partial(_fork_server, Waiting(), util.spawnv_passfds)


class Waiting:
    """A child that will become what this process needs: forked now, before it has threads, which no fork survives."""

    def __init__(self):
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self.socket.close()
            self.wait(theirs)
        theirs.close()

    def wake(self, function, numbers, *arguments, session=False):
        """Let it call `function`, by its name, with arguments, with this process's open files of these `numbers`."""
        blocked = list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))
        request = {"function": function, "numbers": list(numbers), "arguments": arguments, "blocked": blocked,
                   "session": session}
        socket.send_fds(self.socket, [json.dumps(request).encode()], numbers)
        self.socket.close()
        return self.pid

    def wait(self, theirs):
        """In the child."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _keep_only(0, 1, 2, theirs.fileno())
        message, received, _, _ = socket.recv_fds(theirs, 2**20, 10)
        if not message:
            os._exit(0)
        theirs.close()
        request = json.loads(message)
        aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 100) for descriptor in received]
        for descriptor in received:
            os.close(descriptor)
        for descriptor, its_number in zip(aside, request["numbers"], strict=True):
            os.dup2(descriptor, its_number)
            os.close(descriptor)
        if request["session"]:
            os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _be_called(request["function"])  # no longer waiting
        globals()[request["function"]](*request["arguments"])
        sys.exit()


def _be_called(name):
    """What `ps` shows, and tests look for: at most 15 characters."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def _fork_server(waiting, spawnv_passfds, path, args, passfds):
    """In place of `multiprocessing.util.spawnv_passfds`."""
    if "forkserver" not in args[-1] or waiting.socket.fileno() < 0:  # it has been one: then that of this process's own start
        return spawnv_passfds(path, args, passfds)
    return waiting.wake("be_fork_server", passfds, args[-1], dict(os.environ))


def be_fork_server(code, environ):
    """What the fork server's interpreter would execute."""
    os.environ.clear()
    os.environ.update(environ)
    _be_called("forkserver")
    tempfile.tempdir = None
    sys.orig_argv = [sys.executable, "-c", code]
    _open_streams()
    try:
        exec(code, {})
    finally:
        atexit._run_exitfuncs()  # the last of which exits: the rest of this stack is that of who was forked


def _rank_of_torchrun(waiting, args, env, stdout, stderr, start_new_session):
    """In place of torchrun's Popen."""
    if not waiting:
        return subprocess.Popen(args, env=env, stdout=stdout, stderr=stderr, start_new_session=start_new_session)
    process = object.__new__(subprocess.Popen)
    process.__dict__.update(args=args, returncode=None, stdin=None, stdout=None, stderr=None, _child_created=True,
                            _waitpid_lock=threading.Lock(), _sigint_wait_secs=0.25)
    process.pid = waiting.pop(0).wake("run_as_main", [], args[1:], env, session=start_new_session)
    return process


def _in_huge_pages():
    """Have as few pages as possible, where the kernel can (Linux 6.1): a fork copies the list of them, and an end undoes it."""
    with open("/proc/self/maps") as maps:
        for start, end in re.findall(r"^(\w+)-(\w+) rw-p 0+ 00:00 0", maps.read(), re.MULTILINE):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(int(start, 16)), ctypes.c_size_t(int(end, 16) - int(start, 16)), MADV_COLLAPSE)


if __name__ == "__main__":
    atexit.register(_leave)  # before what is imported registers its own: the first one is called last
    gc.disable()  # nothing of what comes is garbage
    # As in a CPU build: what is frozen below is not taken apart, and triton would print that as leaks.
    sys.modules["triton"] = None
    for module in PRELOAD:
        __import__(module)
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    runpy.run_path(Path(__file__).parent.parent / "common/vision.py")["import_torchvision"]()
    # To name its events, torchrun asks where it is, again and again, and inspect looks through thousands of modules.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    for finalizer in list(weakref.finalize._registry):  # torch.library's, one for each operator
        finalizer.atexit = False
    gc.freeze()
    gc.enable()
    _in_huge_pages()
    become(**serve(sys.argv[1], int(sys.argv[2])))
