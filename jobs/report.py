"""`rayspec report` as a script, for `ray job submit --working-dir . -- python jobs/report.py ...`."""

from rayspec.cli import script

if __name__ == "__main__":
    script("report")
