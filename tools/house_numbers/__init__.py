"""Size and shape of the code at two revisions. `python -m house_numbers` prints them, `--write` puts them into `docs/house.md`."""
