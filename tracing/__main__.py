"""`python -m tracing PROGRAM FLAGS`: see `record.py`."""

from tracing import record

if __name__ == "__main__":
    __spec__ = None  # otherwise each process imports this module, too
    record.main()
