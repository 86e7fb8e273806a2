"""Parts of `docs/`, and the schema of the chart's settings, that are made from the code.

`python -m generated_docs` prints them, `--write` puts them into the documents."""
