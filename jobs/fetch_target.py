"""`rayspec fetch` as a script, for `ray job submit --working-dir . -- python jobs/fetch_target.py ...`."""

from rayspec.cli import script

if __name__ == "__main__":
    script("fetch")
