"""What each command of the program takes and prints; each calls one function of `api.py`."""
