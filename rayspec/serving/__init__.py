"""Serves a champion: where it comes from, whether it may take traffic, what it is served with."""
