"""Record a run of any program from outside: `python -m tracing PROGRAM FLAGS`.

    record.py      the command: wraps the program while it runs, writes the results at the end
    messages.py    in each process: calls, sends, collectives, RRefs, futures
    work.py        in each process: what it computes
    events.py      in each process: the file of what these two record
    places.py      the line of the lesson, and the tutorial's cell
    merge.py       the files of all processes put together: which call a message answers
    timeline.py    the picture, timeline.png
    replay.py      the page, replay.html
"""
