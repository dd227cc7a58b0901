"""`rayspec export` as a script, for `ray job submit --working-dir . -- python jobs/export.py ...`."""

from rayspec.cli import script

if __name__ == "__main__":
    script("export")
