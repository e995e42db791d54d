"""The workbook: the learner writes a function of a lesson, whose own `--check` judges it.

    catalog.py     what the exercises are: stubs/ and texts/
    refusing.py    what is said of a learner's file before it is run
    overlay.py     a copy of the lesson with the learner's text in the place of the answer
    asking.py      in whose place a prediction stands
    running.py     runs a program in the copy, and ends it where it hangs
    observer.py    in that copy, in every rank: writes where its threads are
    verdict.py     what a run means: findings, exceptions, who waits where
    costs.py       whether a right answer sends or holds more than it has to
    measuring.py   the same for a number that the learner predicts
    checking.py    all of it, from the learner's file to the verdict
    words.py       what is said, in Japanese and in English (words.toml)
    watching.py    `make learn`: one exercise after the other, judged whenever the file is saved
"""
