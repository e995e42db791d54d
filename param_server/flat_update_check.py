"""The oracle of `flat_update.py`: that of `batch_update.py`, which computes the same updates."""

from param_server.batch_update_check import check, single_process

__all__ = ["check", "single_process"]
