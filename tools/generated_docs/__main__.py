"""Prints the generated parts of documents; with `--write` puts them there instead."""

from __future__ import annotations

import sys

from generated_docs.parts import ROOT, replace_part, texts

for (document, name), text in texts().items():
    if "--write" in sys.argv[1:]:
        replace_part(ROOT / document, name, text)
    else:
        print(f"{document}, {name}:\n\n{text}\n")
