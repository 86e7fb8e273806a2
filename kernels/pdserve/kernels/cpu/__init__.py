"""Matrix products on a CPU, and the memory and pages that they take."""
