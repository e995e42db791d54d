"""Record a run of any program from outside of it: `python -m tracing PROGRAM`.

    record.py      the command: wraps the program while it runs, writes the files in the end
    messages.py    in each process: calls, sends, collectives, RRefs, futures, to a file of its own
    work.py        in each process: what it computes, to the same file
    timeline.py    kinds of spans and their colours; the line of the lesson in which a process is
    merge.py       the files of all processes put together: which call a message answers
    page.py        the picture, and the trace for Perfetto
    replay.py      the page, replay.html
    cells.py       the tutorial's cell that a line belongs to
"""
