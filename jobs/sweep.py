"""`rayspec sweep` as a script, for `ray job submit --working-dir . -- python jobs/sweep.py ...`."""

from rayspec.cli import script

if __name__ == "__main__":
    script("sweep")
