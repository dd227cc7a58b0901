"""Targets as Hugging Face folders under `$RAYSPEC_HOME/models`: where they come from, and how they are made.

`catalogue` names those that any machine can fetch; `fetch` brings one from a package index, a file or the Hugging Face
hub; `gguf` turns a GGUF file into a folder.
"""
