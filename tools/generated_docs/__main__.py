"""Prints the generated parts of documents; with `--write` puts them there instead."""

from __future__ import annotations

import argparse

from generated_docs.parts import ROOT, replace_part, texts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m generated_docs", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write them into the documents")
    write: bool = parser.parse_args().write
    for (document, name), text in texts().items():
        if write:
            replace_part(ROOT / document, name, text)
        else:
            print(f"{document}, {name}:\n\n{text}\n")


if __name__ == "__main__":
    main()
