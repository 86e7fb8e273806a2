"""Prints the generated parts of documents and generated files; with `--write` puts them there instead."""

from __future__ import annotations

import argparse

from generated_docs.parts import ROOT, files, replace_part, texts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m generated_docs", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write them into the documents")
    write: bool = parser.parse_args().write
    for (document, name), text in texts().items():
        if write:
            replace_part(ROOT / document, name, text)
        else:
            print(f"{document}, {name}:\n\n{text}\n")
    for file, text in files().items():
        if write:
            (ROOT / file).write_text(text)
        else:
            print(f"{file}:\n\n{text}")


if __name__ == "__main__":
    main()
