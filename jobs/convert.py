"""`rayspec convert` as a script, for `ray job submit --working-dir . -- python jobs/convert.py ...`."""

from rayspec.cli import script

if __name__ == "__main__":
    script("convert")
