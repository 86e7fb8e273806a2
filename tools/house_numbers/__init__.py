"""Size and shape of the code, for `docs/house.md`. `python -m house_numbers 5d7000ff .` compares revisions."""
