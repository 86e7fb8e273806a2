"""Several router processes behind one port: their parent, which counts for all, starts and restarts them."""
