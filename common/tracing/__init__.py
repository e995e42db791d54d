"""Records a run of any program from outside of it: `record.py`, its spans, and what shows them."""
