"""`python -m tracing PROGRAM` with the program's own flags: see `record.py`."""

from tracing import record

if __name__ == "__main__":
    __spec__ = None  # or each process would import this module, too
    record.main()
