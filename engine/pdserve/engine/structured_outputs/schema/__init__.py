"""JSON schemas as grammars: each keyword is enforced, or the schema is refused."""
