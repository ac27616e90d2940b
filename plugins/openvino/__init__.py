"""Runs graphs in OpenVINO, also for `bench`, and checks what its devices support."""
