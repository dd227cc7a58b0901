"""`rayspec prepare` as a script, for `ray job submit --working-dir . -- python jobs/prepare.py ...`."""

from rayspec.cli import script

if __name__ == "__main__":
    script("prepare")
