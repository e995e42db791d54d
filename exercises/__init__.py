"""The workbook: the learner writes a function of a lesson, whose own `--check` judges it.

    catalog.py     what the exercises are: stubs/ and texts/
    refusing.py    what a learner's file may not have
    overlay.py     a copy of the lesson with the learner's function in the place of the answer
    inside.py      in that copy, in every rank: loads the function, notes where each rank waits
    checking.py    runs the copy's check, ends it where it hangs, and finds out what it means
    measuring.py   the same for a number that the learner predicts
    words.py       what is said, in Japanese and in English (words.toml)
    watching.py    `make learn`: one exercise after the other, judged whenever the file is saved
"""
