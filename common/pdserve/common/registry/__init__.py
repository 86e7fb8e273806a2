"""Redis: connections and records."""
