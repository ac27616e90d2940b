"""Graphs in OpenVINO: sessions, rows of `bench`, and what its devices compute."""
