"""`make gpu`: everything that only a GPU can prove or measure, in one command. docs/gpu.md says how to run it and what it fills in.

`__main__.py` runs the stages of `plan.py` one after the other, each in a process of its own (`stage_process.py`), so that none
hides the others. A stage appends rows to `rows.jsonl` as it makes them; `report.py` makes the table.
"""
