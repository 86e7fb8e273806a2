"""Parts of `docs/` that are made from the code. `python -m generated_docs` prints them, `--write` puts them into the documents."""
