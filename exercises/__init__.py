"""The workbook: the learner writes a function of a lesson, whose own `--check` judges it.

    catalog.py     the exercises (stubs/, texts/), and what is said about them (words.toml)
    judging.py     puts the learner's function into a copy of the lesson, runs its `--check` there
    predicting.py  compares numbers that the learner predicts with those that a run has measured
    session.py     the learner's files and progress; judges whenever a file is saved
"""
