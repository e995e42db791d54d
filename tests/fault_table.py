"""What ends a run, how it is reported: the rows that the tests try, and that docs/faults.md shows.

The tests take from here which line they expect, and `benchmarks.docs` writes the tables of the pages from here.
A line is a pattern (`re.fullmatch`) with {timeout}, {rank} and {role} in it; it follows "error: rank 1 (observer1) ".
"""

from typing import NamedTuple

from tests.helpers import ENDS_S


class Fault(NamedTuple):
    """One row: what happens to a rank, and what is reported of it."""

    what: str  # English
    what_ja: str
    line: str  # in a local run and in each terminal of a manual launch
    torchrun: str | None = None  # under torchrun, if it is another one; "" where it is not tried
    by_silence: bool = False  # it is noticed after --timeout, not at once
    note: str = ""  # on the page
    note_ja: str = ""
    traceback: bool = False  # printed before the line
    of_who_waits: bool = False  # the line begins with a rank that waits for this one
    whole: bool = False  # the line says of whom it is
    more_s: int = 0  # that it takes, at most

    def expected(self, way="local"):
        """The line in one of the three ways in, as a pattern."""
        return self.torchrun if way == "torchrun" and self.torchrun is not None else self.line

    def within_s(self, timeout_s):
        """By when the run must have ended everywhere; the page says 10 s, and on a quiet machine so does ENDS_S."""
        return ENDS_S + self.more_s + (timeout_s if self.by_silence else 0)


SILENT = r"has not answered for \d+ s"
DIED = "died; torchrun shows how"
WAITED = (r"(has waited for {timeout} s at \S+:\d+, `.*`|timed out: .* for {timeout} s); "
          r"(.*; )?rank {rank} \({role}\) is at \S+:\d+, `.*`")
WAITING = r"has waited for {timeout} s at \S+:\d+, `.*`; rank \d+ \(\w+\) is at \S+:\d+, `.*`"  # any two
BEFORE_THE_END = "exited with status 0 before its work was done"
# Of a rank that was frozen for about --timeout, and goes on.
AWAY = r"(has not answered|did not answer) for \d+ s"

OF_A_RANK = {
    "exception": Fault("it raises ValueError", "ValueErrorを送出する", "raised ValueError", traceback=True),
    "long traceback": Fault("it raises ValueError with a message of 10 MB", "10 MBのメッセージを持つValueErrorを送出する",
                            "raised ValueError", traceback=True, note="the traceback is printed without its middle",
                            note_ja="トレースバックは中ほどを省いて表示する"),
    "KeyboardInterrupt": Fault("it raises KeyboardInterrupt", "KeyboardInterruptを送出する", "raised KeyboardInterrupt",
                               traceback=True, note="also in a function that another rank has called over RPC",
                               note_ja="ほかのランクがRPCで呼んだ関数の中でも同じ"),
    "os._exit(0)": Fault("os._exit(0) in the middle of its work", "作業の途中でos._exit(0)", BEFORE_THE_END, DIED),
    "sys.exit(0)": Fault("sys.exit(0) in the middle of its work", "作業の途中でsys.exit(0)", BEFORE_THE_END,
                         note="also in a function that another rank has called over RPC",
                         note_ja="ほかのランクがRPCで呼んだ関数の中でも同じ"),
    "sys.exit(3)": Fault("sys.exit(3)", "sys.exit(3)", "exited with status 3"),
    "SIGKILL": Fault("SIGKILL, out of memory", "SIGKILL、メモリー不足", "was killed by SIGKILL", DIED),
    "SIGTERM": Fault("SIGTERM", "SIGTERM", "was killed by SIGTERM", DIED),
    "SIGSEGV": Fault("SIGSEGV, sent to it", "SIGSEGVを送られる", "was killed by SIGSEGV", DIED),
    "segmentation fault": Fault("a segmentation fault", "セグメンテーション違反", "was killed by SIGSEGV", DIED),
    "SIGABRT": Fault("SIGABRT, an assertion in C++", "SIGABRT、C++のアサーション", "was killed by SIGABRT", DIED),
    "SIGSTOP": Fault("SIGSTOP, a machine that swaps itself to a standstill", "SIGSTOP、スワップで固まったマシン",
                     SILENT, by_silence=True),
    "lock held": Fault("one call holds Python's interpreter lock for longer than --timeout",
                       "1回の呼び出しがPythonのインタープリターロックを--timeoutより長く保持する", SILENT, by_silence=True),
    "destroyed group": Fault("it destroys or aborts its process group, and goes on",
                             "プロセスグループを破棄または中断したまま続ける", "raised ValueError", traceback=True),
    "loop": Fault("it loops for ever, and another rank waits for it", "無限ループに入り、ほかのランクがそれを待つ",
                  WAITED, by_silence=True, traceback=True, of_who_waits=True),
    "lock": Fault("it waits for a lock that nobody releases", "誰も解放しないロックを待つ",
                  WAITED, by_silence=True, traceback=True, of_who_waits=True),
    "lone barrier": Fault("it alone calls barrier()", "1つのランクだけがbarrier()を呼ぶ",
                          WAITING, by_silence=True, traceback=True, of_who_waits=True,
                          note="which of the two comes first is chance", note_ja="どちらが先に挙がるかは偶然による"),
    "send without recv": Fault("it calls send(), and nobody recv()", "send()を呼んだが誰もrecv()しない",
                               WAITING, by_silence=True, traceback=True, of_who_waits=True,
                               note="which of the two comes first is chance", note_ja="どちらが先に挙がるかは偶然による"),
}

# Between terminals and machines; rank 1 is on the other one. {joins}: s. (tests/test_machines.py, tests/test_launch.py)
OF_A_MACHINE = {
    "interrupted": Fault("Ctrl-C on its machine", "そのマシンでCtrl-C", "was interrupted",
                         "(raised KeyboardInterrupt|was stopped)"),
    "cable cut": Fault("its machine is lost, a cable cut", "そのマシンの停止、ケーブルの切断",
                       r"cannot be reached: no sign of life for \d+ s", by_silence=True,
                       note="torchrun itself ends up to 10 s later", note_ja="torchrun自身が終わるのは、さらに10秒後までになることがある"),
    "never comes": Fault("it is not started", "起動されない", "has not joined within {joins} s", "",
                         by_silence=True, more_s=8),
    "rank 0 never comes": Fault("rank 0 is not started", "ランク0が起動されない",
                                "rank 0 cannot be reached: {address} has not answered for {joins} s", "",
                                by_silence=True, more_s=8, whole=True),
}

# What ends nothing: a rank does not come back from a call, and nobody has set a limit to it.
STANDSTILL = r"note: for {timeout} s, nothing has moved.*: .*rank {rank} \({role}\) is at .*\. Waiting goes on; Ctrl-C ends it\."


class Beside(NamedTuple):
    """One row: what happens to processes that are no ranks, and what becomes of the run."""

    deeds: str  # "fork server SIGSTOP, rank 1 SIGKILL": in this order, at the same time
    what: str  # English
    what_ja: str
    line: str = ""  # after "error: ", as a pattern; "" if nothing is printed
    status: int = 1  # of the command; 0: the run goes on, and ends as if nothing had happened
    by_silence: bool = False
    others: str | None = None  # the line in the other terminals of a manual launch
    more_s: int = 0

    within_s = Fault.within_s


KILLED = -9
STOPPED_BOTH = "; stopped 2 other processes"
INTERRUPTED = "interrupted; stopped (2|0) processes"  # 0: before any has started
FORK_SERVER = f"the fork server was killed{STOPPED_BOTH}"
GONE = "ended: its launcher is gone"
NOT_REACHED = r"cannot be reached: no sign of life for \d+ s"
WAS_STOPPED = r"rank {0} \(role{0}\) did not answer for \d+ s: its launcher was stopped"
NOT_STARTED = "cannot start 1 process: the fork server has ended"
NOT_WATCHED = "is not watched: the process beside it"

# way in, phase -> rows. The run has two ranks, role0 and role1; in terminals, it happens in that of rank 1, or in "manual 0".
OF_A_LAUNCHER = {
    ("local", "import"): [
        Beside("launcher SIGKILL", "the launcher is killed", "ランチャーがkillされる", status=KILLED),
        Beside("all SIGSTOP, all SIGCONT", "Ctrl-Z, then fg", "Ctrl-Zのあとfg", status=0),
        Beside("launcher SIGSTOP, launcher SIGCONT", "the launcher is frozen, and goes on", "ランチャーが凍結し、再開する", status=0),
        Beside("fork server SIGKILL", "the fork server is killed", "フォークサーバーがkillされる",
               "cannot start 2 processes: the fork server has ended"),
        Beside("fork server SIGSTOP, launcher SIGINT", "the fork server is frozen; Ctrl-C",
               "フォークサーバーが凍結し、Ctrl-C", INTERRUPTED, status=130),
        Beside("fork server SIGSTOP, launcher SIGTERM", "the fork server is frozen; SIGTERM",
               "フォークサーバーが凍結し、SIGTERM", INTERRUPTED, status=130),
        Beside("tracker SIGKILL", "the resource tracker is killed", "リソーストラッカーがkillされる", status=0),
    ],
    ("local", "connect"): [
        Beside("launcher SIGKILL", "the launcher is killed", "ランチャーがkillされる", status=KILLED),
    ],
    ("local", "run"): [
        Beside("launcher SIGKILL", "the launcher is killed", "ランチャーがkillされる", status=KILLED),
        Beside("all SIGSTOP, all SIGCONT", "Ctrl-Z, then fg", "Ctrl-Zのあとfg", status=0),
        Beside("launcher SIGSTOP, launcher SIGCONT", "the launcher is frozen, and goes on", "ランチャーが凍結し、再開する", status=0),
        Beside("rank 1 SIGSTOP, launcher SIGKILL", "a rank is frozen, the launcher killed",
               "ランクが凍結し、ランチャーがkillされる", status=KILLED),
        Beside("fork server SIGKILL", "the fork server is killed", "フォークサーバーがkillされる", FORK_SERVER),
        Beside("rank 1 SIGSTOP, fork server SIGKILL", "a rank is frozen, the fork server killed",
               "ランクが凍結し、フォークサーバーがkillされる", FORK_SERVER),
        Beside("fork server SIGSTOP", "the fork server is frozen", "フォークサーバーが凍結する", status=0),
        Beside("fork server SIGSTOP, launcher SIGINT", "the fork server is frozen; Ctrl-C",
               "フォークサーバーが凍結し、Ctrl-C", INTERRUPTED, status=130),
        Beside("fork server SIGSTOP, launcher SIGKILL", "the fork server is frozen, the launcher killed",
               "フォークサーバーが凍結し、ランチャーがkillされる", status=KILLED),
        Beside("fork server SIGSTOP, rank 1 SIGKILL", "the fork server is frozen, a rank killed",
               "フォークサーバーが凍結し、ランクがkillされる",
               r"rank 1 \(role1\) was killed by SIGKILL; stopped 1 other process"),
        Beside("fork server SIGSTOP, rank 1 SIGSTOP", "the fork server and a rank are frozen",
               "フォークサーバーとランクが凍結する",
               rf"rank 1 \(role1\) {SILENT}; stopped 1 other process", by_silence=True),
        Beside("tracker SIGKILL", "the resource tracker is killed", "リソーストラッカーがkillされる", status=0),
        Beside("tracker SIGSTOP", "the resource tracker is frozen", "リソーストラッカーが凍結する", status=0),
    ],
    ("local", "shutdown"): [
        Beside("launcher SIGKILL", "the launcher is killed", "ランチャーがkillされる", status=KILLED),
        Beside("fork server SIGKILL", "the fork server is killed", "フォークサーバーがkillされる", status=0),
        Beside("fork server SIGSTOP", "the fork server is frozen", "フォークサーバーが凍結する", status=0),
        Beside("tracker SIGKILL", "the resource tracker is killed", "リソーストラッカーがkillされる", status=0),
        Beside("tracker SIGSTOP", "the resource tracker is frozen", "リソーストラッカーが凍結する", status=0),
    ],
    ("manual", "import"): [
        Beside("fork server SIGKILL", "the fork server is killed", "フォークサーバーがkillされる",
               rf"rank 1 \(role1\) {NOT_STARTED}", others=rf"rank 1 \(role1\) {NOT_STARTED}; stopped 1 other process"),
    ],
    ("manual", "run"): [
        Beside("launcher SIGKILL", "the launcher is killed", "ランチャーがkillされる", status=KILLED,
               others=rf"rank 1 \(role1\) {GONE}; stopped 1 other process"),
        Beside("launcher SIGSTOP", "the launcher is frozen, and woken when the others have ended",
               "ランチャーが凍結し、ほかが終わってから再開する", by_silence=True,
               line=WAS_STOPPED.format(1),
               others=r"rank 1 \(role1\) cannot be reached: .*; stopped 1 other process"),
        Beside("fork server SIGKILL", "the fork server is killed", "フォークサーバーがkillされる",
               "the fork server was killed; stopped 1 other process", others="the fork server was killed; stopped 1 other process"),
        Beside("rank 1 exit", "a rank ends with status 0", "ランクが終了ステータス0で終わる",
               rf"rank 1 \(role1\) {BEFORE_THE_END}", others=rf"rank 1 \(role1\) {BEFORE_THE_END}; stopped 1 other process"),
    ],
    # That of rank 0 serves the store.
    ("manual 0", "run"): [
        Beside("launcher SIGKILL", "the launcher is killed", "ランチャーがkillされる", status=KILLED,
               others=rf"rank 0 \(role0\) {GONE}; stopped 1 other process"),
        Beside("launcher SIGSTOP", "the launcher is frozen, and woken when the others have ended",
               "ランチャーが凍結し、ほかが終わってから再開する", by_silence=True,
               line=WAS_STOPPED.format(0),
               others=rf"rank 0 \(role0\) {NOT_REACHED}; stopped 1 other process"),
    ],
    ("torchrun", "run"): [
        Beside("agent SIGKILL", "torchrun is killed", "torchrunがkillされる", rf"rank \d \(role\d\) {GONE}", status=KILLED),
        Beside("rank 1 SIGSTOP, agent SIGKILL", "a rank is frozen, torchrun killed",
               "ランクが凍結し、torchrunがkillされる", rf"rank \d \(role\d\) {GONE}", status=KILLED),
        Beside("agent SIGSTOP, agent SIGCONT", "torchrun is frozen, and goes on", "torchrunが凍結し、再開する", status=0),
        Beside("watcher 0 SIGKILL", "the process beside rank 0 is killed", "ランク0の監視プロセスがkillされる",
               rf"rank 0 \(role0\) {NOT_WATCHED} was killed"),
        Beside("watcher 1 SIGKILL", "the process beside rank 1 is killed", "ランク1の監視プロセスがkillされる",
               rf"rank 1 \(role1\) {NOT_WATCHED} was killed"),
        Beside("watcher 0 SIGSTOP", "the process beside rank 0 is frozen", "ランク0の監視プロセスが凍結する",
               rf"rank 0 \(role0\) {NOT_WATCHED} {SILENT}", by_silence=True),
        Beside("watcher 1 SIGSTOP", "the process beside rank 1 is frozen", "ランク1の監視プロセスが凍結する",
               rf"rank 1 \(role1\) {NOT_WATCHED} {SILENT}", by_silence=True),
        Beside("rank 1 exit", "a rank ends with status 0", "ランクが終了ステータス0で終わる", rf"rank 1 \(role1\) {DIED}"),
    ],
    ("torchrun", "shutdown"): [
        Beside("agent SIGKILL", "torchrun is killed", "torchrunがkillされる", status=KILLED),
        Beside("watcher 0 SIGKILL", "the process beside rank 0 is killed", "ランク0の監視プロセスがkillされる", status=0),
        Beside("watcher 1 SIGSTOP", "the process beside rank 1 is frozen", "ランク1の監視プロセスが凍結する", status=0),
    ],
}
