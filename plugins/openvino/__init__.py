"""Graphs in OpenVINO: sessions, rows of `bench`, and the capabilities of its devices."""
