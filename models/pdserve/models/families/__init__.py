"""One file per model family; `pdserve.models.registry` lists them."""
