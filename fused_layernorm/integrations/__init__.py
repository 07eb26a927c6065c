"""Plugs into the ways in which other packages swap layers. Each module is imported by name; none of them by default."""
