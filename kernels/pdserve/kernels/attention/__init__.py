"""Attention over pages: what a plan and a back end are, the reference in torch, and the choice of a back end."""
