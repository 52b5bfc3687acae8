"""Checks of one machine: what is wrong for the role that it plays, and how to mend it."""
