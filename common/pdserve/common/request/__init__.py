"""Requests as services exchange them: parameters, outputs, wire forms."""
