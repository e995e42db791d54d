"""The workbook: the learner writes a function of a lesson, whose own `--check` judges it.

    catalog.py     the exercises (stubs/, texts/), and the learner's desk
    judging.py     puts the learner's function into a copy of the lesson, runs its `--check` there
    predicting.py  compares a number that the learner predicts with one that a run has measured
    watching.py    `make learn`: one exercise after the other, judged whenever the file is saved
"""
