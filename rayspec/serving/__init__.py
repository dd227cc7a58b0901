"""From a champion to an endpoint: what it is served with, where it comes from, whether it may take traffic."""
